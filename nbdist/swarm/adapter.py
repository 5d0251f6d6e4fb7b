"""Finds, loads and calls the parts of a model. Only this module and `model_cache` depend on transformers.

This module knows no family of models by name. The model's own code runs on the client and prepares the call of each
layer (masks, positions, rotations). The client sends these arguments to the server that has the layer, and the server
calls the layer with them. The module relies on two facts only: a model has a list of layers, and a cache has one entry
for each layer.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from nbdist.errors import UsageError

try:
    import transformers
    from transformers import PreTrainedModel  # takes a second or two to import: do it now, not at the first use
except ImportError as error:  # transformers comes with the extra "swarm" of this package
    raise ImportError('nbdist.swarm needs transformers: pip install "nbdist[swarm]"') from error

from nbdist.swarm.weight_file import WEIGHTS, WeightFile, write_weights  # needs safetensors, which transformers needs

CONFIG = "config.json"  # the configuration, in a model's folder
# The files of a model's folder that clients on other hosts get: the configurations, and the tokenizer.
TEXTS = (
    *(CONFIG, "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
)


class Placeholder(Enum):
    """Placeholders in the arguments of a layer, for objects that the server inserts."""

    CACHE = "cache"


CACHE = Placeholder.CACHE


class LayerCall(NamedTuple):
    """The arguments of a layer besides the hidden states, with `CACHE` in place of the cache."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# -- models -----------------------------------------------------------------------------------------


_building = threading.Lock()


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Let the calling thread make modules whose parameters need no memory; their buffers are real."""
    # Not `torch.device("meta")`, which would take the buffers along: a buffer may be in no file, so nothing could fill
    # it later.
    with _building:
        register = nn.Module.register_parameter
        me = threading.get_ident()

        def empty(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            # Another thread may make ordinary modules at this moment.
            if parameter is not None and parameter.device.type != "meta" and threading.get_ident() == me:
                parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            register(self, name, parameter)

        nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(config: Any, kind: str = "CausalLM", num_labels: int | None = None) -> Any:
    """Build a model from its configuration, in eval mode; its parameters have no memory yet.

    ``kind`` completes the name of transformers' class AutoModelFor...: "CausalLM", "SequenceClassification". "Model"
    builds a model without a head. If ``num_labels``, a classifier's number of classes, is None, ``config`` has it.
    """
    config = copy.deepcopy(config)  # the caller's stays as it is
    if num_labels is not None:
        config.num_labels = num_labels
    auto = getattr(transformers, "AutoModel" if kind == "Model" else f"AutoModelFor{kind}")
    with _without_weights():
        model: Any = auto.from_config(config)
    return model.eval()


def complete(model: Any, kind: str) -> None:
    """Initialise at random the weights of a classifier that the checkpoint lacks, normally the head, to be trained.

    These are the weights that `Checkpoint.fill` has left on the meta device. In a model of another ``kind`` than
    "SequenceClassification", a missing weight raises UsageError: a random head could not write text.
    """
    for name, parameter in list(model.named_parameters()):  # a copy: the loop replaces parameters
        if not parameter.is_meta:
            continue
        if kind != "SequenceClassification":
            raise UsageError(f"the model came without {name}: use Swarm.model(), which needs no head")
        owner, _, own = name.rpartition(".")
        made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        nn.init.normal_(made, std=getattr(model.config, "initializer_range", 0.02))
        setattr(model.get_submodule(owner), own, made)


def find_layers(model: Any) -> str:
    """Return the path of a model's list of layers, such as "model.layers".

    The list is an `nn.ModuleList` with as many modules as the model's configuration has layers. If there are several,
    it is the one with the most parameters. Raises UsageError if there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found: list[tuple[int, str]] = [
        (sum(parameter.numel() for parameter in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise UsageError(f"a swarm cannot serve {type(model).__name__}: it has no nn.ModuleList of its {count} layers")
    return max(found)[1]


def plain_attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer that are numbers or texts, such as its kind of attention."""
    # A model's code may read them: transformers 5.0 picks a layer's mask by `layer.attention_type`.
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and isinstance(value, (str, int, float))
    }


class Weights(Protocol):
    """Weights by name, as `Checkpoint` reads them."""

    sizes: dict[str, int]  # bytes of each weight, by its name in the model's state dict

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weights with these ``names``. The caller does not change them."""


class Checkpoint:
    """A folder with a configuration, and weights with the same names as in the model's state dict.

    By default, ``weights`` are those in the folder's own file.
    """

    def __init__(self, folder: str | Path, weights: Weights | None = None) -> None:
        self.folder = Path(folder)
        self.config = transformers.AutoConfig.from_pretrained(self.folder)
        self.weights: Weights = WeightFile(folder) if weights is None else weights
        family: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        # The prefix of a base model's weights in a model with a head, such as "model".
        self._base: str = family.base_model_prefix

    @classmethod
    def opened(cls, folder: str | Path, scratch: Path) -> Checkpoint:
        """Open a folder with a model as transformers or others have written it.

        If its weights have other names, or are in several files, the model is written to ``scratch``, which is opened.
        """
        if (Path(folder) / WEIGHTS).exists():
            found = cls(folder)
            model = build(found.config)
            path = find_layers(model)
            names = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()]
            if all(found._named(name) in found.weights.sizes for name in names):
                return found
        config = transformers.AutoConfig.from_pretrained(folder)
        # The class that was saved: another one would lose the head, or make one up.
        own = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        write_checkpoint(own.from_pretrained(folder), scratch)
        return cls(scratch)

    def describe(self) -> tuple[str, dict[str, int]]:
        """Return the text of the configuration, and the bytes of each weight by name."""
        return (self.folder / CONFIG).read_text(), self.weights.sizes

    def texts(self) -> tuple[dict[str, bytes], dict[str, int]]:
        """Return the contents of the folder's files in `TEXTS`, and the bytes of each weight by name."""
        found = {name: self.folder / name for name in TEXTS}
        return {name: path.read_bytes() for name, path in found.items() if path.is_file()}, self.weights.sizes

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return weights by name."""
        return self.weights.read(names)

    def tokenizer(self) -> Any:
        """Load and return the tokenizer; raises transformers' error if the folder has none."""
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @property
    def generation(self) -> Any:
        """The model's GenerationConfig, or None if the folder has none."""
        if not (self.folder / "generation_config.json").exists():
            return None
        return transformers.GenerationConfig.from_pretrained(self.folder)

    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """Give a module its weights, and freeze them.

        ``prefix`` is the path of the module in the model, with a dot at its end. Weights that the checkpoint does not
        have stay unchanged.
        """
        names = {name: self._named(prefix + name) for name in module.state_dict()}
        read = self.weights.read([name for name in names.values() if name in self.weights.sizes])
        state = {name: read[found] for name, found in names.items() if found in read}
        # Assigned, not copied: the processes of a host share the memory of the mapped file.
        module.load_state_dict(state, strict=False, assign=True)
        module.requires_grad_(False)

    def _named(self, name: str) -> str:
        """Return the checkpoint's name for a weight of a model."""
        if name in self.weights.sizes:
            return name
        # A model with a head calls a weight "model.layers.0...", a base model "layers.0...". The checkpoint has the
        # names of the model that was written, which may be of the other kind.
        base = f"{self._base}."
        return name.removeprefix(base) if name.startswith(base) else base + name

    def nbytes(self, prefix: str) -> int:
        """Return the bytes of all weights whose names in the model begin with ``prefix``."""
        prefixes = (prefix, prefix.removeprefix(f"{self._base}."))
        return sum(size for name, size in self.weights.sizes.items() if name.startswith(prefixes))


def write_checkpoint(model: Any, folder: Path) -> None:
    """Write a model into a folder that `Checkpoint` can read. Raises UsageError if it is no transformers model."""
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"a swarm serves a transformers model, a folder with one, or a name, not a {type(model).__name__}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    whole = model.state_dict()
    sources = model.get_expanded_tied_weights_keys(all_submodels=True)
    # A head that the configuration ties to the embeddings is left out: `tie` restores it. A weight with several names
    # for another reason is written under each, because a server loads a block by the block's own names.
    pairs = {name: (whole[name], whole[source]) for name, source in sources.items() if {name, source} <= whole.keys()}
    tied = {name for name, (one, other) in pairs.items() if _memory_of(one) == _memory_of(other)}
    write_weights({name: tensor.detach() for name, tensor in whole.items() if name not in tied}, folder)
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def tie(model: Any) -> None:
    """Tie the weights of a model that its configuration ties, after `Checkpoint.fill`.

    If the checkpoint has different values for both, they stay apart, and transformers logs a warning.
    """
    missing = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.is_meta}
    model.tie_weights(missing_keys=missing)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a model from a file in llama.cpp's format into a folder that `Checkpoint` can read, with its tokenizer.

    The weights become float32. Needs the packages gguf and accelerate; transformers raises an error without them.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    write_checkpoint(model, folder)
    # AutoTokenizer of transformers 5.0 would take a class that splits texts otherwise, and loses the end of an answer.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    for token, number in (("eos_token", model.config.eos_token_id), ("pad_token", model.config.pad_token_id)):
        if isinstance(number, int):
            setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(number))
    tokenizer.save_pretrained(folder)


def sampling_warper(temperature: float, top_p: float) -> Any:
    """Return a function of (tokens, scores), which returns the scores to sample by; None for the highest score."""
    if temperature < 1e-5:  # divided by it, scores might not be finite
        return None
    warp = [transformers.TemperatureLogitsWarper(float(temperature)), transformers.TopPLogitsWarper(float(top_p))]
    return transformers.LogitsProcessorList(warp)


# -- layers -----------------------------------------------------------------------------------------


def is_same(one: tuple[tuple[Any, ...], dict[str, Any]], other: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Return whether two layers are called with the same objects as (args, kwargs); compares identity, not values."""
    (args, kwargs), (others, named) = one, other
    # A loop that stops early: this runs for each layer and token.
    if len(args) != len(others) or len(kwargs) != len(named):
        return False
    for first, second in zip(args, others, strict=True):
        if first is not second:
            return False
    # `one` is never an argument, so it stands for a name that is missing.
    return all(value is named.get(name, one) for name, value in kwargs.items())


def empty(module: nn.Module) -> None:
    """Free a module's weights: move them to the meta device. Its buffers stay, because some are in no file."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))


def strip(args: Sequence[Any], kwargs: dict[str, Any], cache: Any) -> LayerCall:
    """Return a layer's arguments to send to a server: without the hidden states, and with `CACHE` for the cache."""
    if cache is None:
        return LayerCall(tuple(args), kwargs)
    return LayerCall(
        tuple(CACHE if each is cache else each for each in args),
        {name: CACHE if each is cache else each for name, each in kwargs.items()},
    )


def moved(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Return a value with its tensors on ``device``. The value is a tensor, a `LayerCall`, or tuples, lists and dicts.

    With ``dtype``, floating-point tensors get this type.
    """
    # The table has moved objects by the id of the old one; ids stay unique while the caller holds the whole value.
    return _moved(value, device, dtype, {})


def _moved(value: Any, device: str, dtype: torch.dtype | None, known: dict[int, Any]) -> Any:
    if id(value) in known:  # such as the call that all layers of a model share
        return known[id(value)]
    found = value
    if isinstance(value, torch.Tensor):
        if dtype is not None and value.is_floating_point() and value.dtype != dtype:
            # A mask's lowest number would become -inf, and a row of only -inf gives nan.
            least = max(torch.finfo(value.dtype).min, torch.finfo(dtype).min)
            found = value.clamp(min=least).to(dtype)
        found = found.to(device)
    elif isinstance(value, LayerCall):
        found = LayerCall(_moved(value.args, device, dtype, known), _moved(value.kwargs, device, dtype, known))
    elif type(value) in (tuple, list):
        found = type(value)(_moved(each, device, dtype, known) for each in value)
    elif type(value) is dict:
        found = {name: _moved(each, device, dtype, known) for name, each in value.items()}
    known[id(value)] = found
    return found


def call(layer: nn.Module, hidden: torch.Tensor, told: LayerCall, cache: Any) -> torch.Tensor:
    """Call a layer with the arguments that were recorded for it, and with ``cache``; return the hidden states."""
    args = [cache if each is CACHE else each for each in told.args]
    kwargs = {name: cache if each is CACHE else each for name, each in told.kwargs.items()}
    result = layer(hidden, *args, **kwargs)
    # Layers of some models return a tuple (`Server.returns_tuple`).
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found
