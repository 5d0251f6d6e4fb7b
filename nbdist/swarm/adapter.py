"""The one place that knows transformers: what a model is made of, how it is loaded in parts, how its caches are used.

No family of models is known by name. Whatever prepares the call of a layer (masks, positions, rotations) is the model's
own code, which runs with the client; what a layer is given is sent to whoever has the layer, and called there as it
would have been here. So all that is known is that there is a list of layers, and that a cache has one entry for each.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nbdist.errors import UsageError

try:
    import transformers
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import PreTrainedModel  # whose module takes a second or two to import: here, not at the first use
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
except ImportError as error:  # an extra of this package
    raise ImportError('nbdist.swarm needs transformers: pip install "nbdist[swarm]"') from error

__all__ = [
    "CACHE",
    "Checkpoint",
    "LayerCall",
    "OPERATIONS",
    "Place",
    "RecordedCache",
    "build",
    "call",
    "complete",
    "convert_gguf",
    "empty",
    "find_cache",
    "find_layers",
    "forgets",
    "is_same",
    "length",
    "nbytes",
    "new_cache",
    "operate",
    "part",
    "strip",
    "windows",
    "write_checkpoint",
]

_WEIGHTS = "model.safetensors"
OPERATIONS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording")
"""What generation does to a cache between two steps; a cache elsewhere has to have the same done to it."""


class Place(Enum):
    """What stands for something that each has of his own."""

    CACHE = "cache"


CACHE = Place.CACHE


class LayerCall(NamedTuple):
    """How a layer is called, but for the hidden states; `CACHE` stands where its cache goes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# -- models -----------------------------------------------------------------------------------------


_building = threading.Lock()


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Modules that this thread makes have parameters of no memory; their buffers, which no file may have, are real."""
    with _building:
        register = nn.Module.register_parameter
        me = threading.get_ident()

        def empty(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and parameter.device.type != "meta" and threading.get_ident() == me:
                parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            register(self, name, parameter)

        nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(config: Any, kind: str = "CausalLM", num_labels: int | None = None) -> Any:
    """A model of this configuration, with a head of that kind, whose parameters have no memory yet."""
    config = copy.deepcopy(config)
    if num_labels is not None:
        config.num_labels = num_labels
    auto = getattr(transformers, "AutoModel" if kind == "Model" else f"AutoModelFor{kind}")
    with _without_weights():
        model: Any = auto.from_config(config)
    return model.eval()


def complete(model: Any, kind: str) -> None:
    """Give a head that the file has not got weights to begin with; there is none that could write."""
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        if kind != "SequenceClassification":
            raise UsageError(f"the model came without {name}: Swarm.model() wants no head")
        owner, _, own = name.rpartition(".")
        made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        nn.init.normal_(made, std=getattr(model.config, "initializer_range", 0.02))
        setattr(model.get_submodule(owner), own, made)


def find_layers(model: Any) -> str:
    """The path of the list of layers in a model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found: list[tuple[int, str]] = [
        (sum(parameter.numel() for parameter in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise UsageError(f"{type(model).__name__} has no list of {count} layers")
    return max(found)[1]


class Checkpoint:
    """A folder with a configuration and one file of weights, under the names that the model itself has for them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = transformers.AutoConfig.from_pretrained(self.folder)
        with open(self.folder / _WEIGHTS, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        spans = {name: told["data_offsets"] for name, told in header.items() if name != "__metadata__"}
        self._sizes: dict[str, int] = {name: end - begin for name, (begin, end) in spans.items()}
        self.names: frozenset[str] = frozenset(self._sizes)
        family: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        self._base: str = family.base_model_prefix

    @classmethod
    def opened(cls, folder: str | Path, scratch: Path) -> Checkpoint:
        """A folder as others write it; where its weights have other names, or lie in several files, a copy."""
        if (Path(folder) / _WEIGHTS).exists():
            found = cls(folder)
            model = build(found.config)
            path = find_layers(model)
            names = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()]
            if all(found._named(name) in found.names for name in names):
                return found
        config = transformers.AutoConfig.from_pretrained(folder)
        own = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        write_checkpoint(own.from_pretrained(folder), scratch)
        return cls(scratch)

    def tokenizer(self) -> Any:
        """What makes numbers of text, if it is there."""
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @property
    def generation(self) -> Any:
        """How the model is to generate, if the folder says so."""
        if not (self.folder / "generation_config.json").exists():
            return None
        return transformers.GenerationConfig.from_pretrained(self.folder)

    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """Give a module its weights; they stay in the file, of which all processes of a host share the memory."""
        state = {}
        with safe_open(self.folder / _WEIGHTS, "pt") as file:
            for name in module.state_dict():
                found = self._named(prefix + name)
                if found in self.names:
                    state[name] = file.get_tensor(found)
        module.load_state_dict(state, strict=False, assign=True)
        module.requires_grad_(False)

    def _named(self, name: str) -> str:
        """How the file calls what a model calls so: with a head, or without, it has one name more, or less."""
        if name in self.names:
            return name
        base = f"{self._base}."
        return name.removeprefix(base) if name.startswith(base) else base + name

    def nbytes(self, prefix: str) -> int:
        """Of all weights whose names begin so."""
        prefixes = (prefix, prefix.removeprefix(f"{self._base}."))
        return sum(size for name, size in self._sizes.items() if name.startswith(prefixes))


def write_checkpoint(model: Any, folder: Path) -> None:
    """Write a model so that `Checkpoint` reads it."""
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"a transformers model, a folder with one, or a name, not a {type(model).__name__}")
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, torch.Tensor] = {}
    known: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and place in known:
            continue  # it is tied to one that is there
        known[place] = name
        state[name] = tensor.detach().contiguous()
    save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a model of llama.cpp's format so that `Checkpoint` reads it, with its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    write_checkpoint(model, folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


# -- caches -----------------------------------------------------------------------------------------


def new_cache(config: Any) -> Any:
    """An empty one."""
    return DynamicCache(config=config)


def is_same(one: tuple[tuple[Any, ...], dict[str, Any]], other: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether two layers are given the same objects."""
    (args, kwargs), (others, named) = one, other
    if len(args) != len(others) or len(kwargs) != len(named):
        return False
    for first, second in zip(args, others, strict=True):
        if first is not second:
            return False
    return all(value is named.get(name, one) for name, value in kwargs.items())


def find_cache(values: Sequence[Any]) -> Any:
    """The cache among the arguments of a layer; None where there is none."""
    return next((each for each in values if isinstance(each, Cache)), None)


class RecordedCache:
    """What a client knows of a cache that is elsewhere: how much is in it, and what is done to it.

    It is the model's own cache with entries of one byte. So all that generation asks of it is answered as it would be,
    and each operation is told to ``tell`` besides. Whoever has the entries begins with ``empty``.
    """

    def __init__(self, cache: Any, count: int) -> None:
        if type(cache) is not DynamicCache:
            raise UsageError(f"a swarm keeps caches of its own, which grow: not a {type(cache).__name__}")
        self.empty = copy.deepcopy(cache)
        self._count = count
        self.tell: Callable[[str, tuple[Any, ...]], None] = lambda name, args: None
        self._cache = weakref.ref(cache)  # which has this one
        for name in OPERATIONS:
            own = getattr(type(cache), name, None)
            if own is not None:
                setattr(cache, name, self._recording(name, own))

    def _recording(self, name: str, own: Callable[..., Any]) -> Any:
        known = self._cache

        def record(*args: Any, **kwargs: Any) -> Any:
            cache: Any = known()
            before = cache.get_seq_length() if name == "crop" else 0
            found = own(cache, *args, **kwargs)  # first: it may be refused
            told = (*args, *kwargs.values())
            if name == "crop":  # by how much, whatever this version is told
                told = (cache.get_seq_length() - before,)
            self.tell(name, told)
            return found

        return record

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedCache:
        raise UsageError("a cache whose entries are elsewhere cannot be copied: take the text through the model again")

    def grow(self, batch: int, tokens: int) -> None:
        """So many tokens have come to all layers' caches."""
        cache = self._cache()
        if cache is None:
            return
        little = torch.zeros(batch, 1, tokens, 1, dtype=torch.int8)
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        for number in range(self._count):
            layer = cache.layers[number] if number < len(cache.layers) else None
            # Nearly all are alike; what one has become, the others are, too.
            key = (type(layer), getattr(layer, "sliding_window", None), getattr(layer, "record_past", None))
            if layer is None or key not in known:
                cache.update(little, little, number)
                known[key] = vars(cache.layers[number])
            else:
                vars(layer).update(known[key])


def operate(cache: Any, name: str, args: Sequence[Any], begin: int, end: int) -> None:
    """Do to the entries of some layers what was done to all of the client's."""
    for layer in cache.layers[begin:end]:
        method = getattr(layer, name, None)
        if method is not None and (layer.is_initialized or name == "activate_past_recording"):
            method(*args)


def length(cache: Any, span: tuple[int, int]) -> int:
    """How many tokens are in the caches of some layers."""
    return int(cache.layers[span[0]].get_seq_length()) if span[0] < len(cache.layers) else 0


def nbytes(cache: Any, span: tuple[int, int]) -> int:
    """Of the caches of some layers."""
    return sum(
        tensor.nbytes
        for layer in cache.layers[slice(*span)]
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor)
    )


def part(cache: Any, begin: int, end: int) -> Any:
    """A cache with the entries of these layers only."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    for number, layer in enumerate(found.layers):
        if not begin <= number < end:
            layer.reset()
    return found


def forgets(cache: Any) -> bool:
    """Whether a cache that was cropped is as if what was cropped had never been there."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def windows(cache: Any) -> list[int | None]:
    """How many tokens each layer looks back at; None for all."""
    return [getattr(layer, "sliding_window", None) if layer.is_sliding else None for layer in cache.layers]


def empty(module: nn.Module) -> None:
    """Take a module's weights from it. Its buffers stay: not all of them are in the file."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))


def strip(args: Sequence[Any], kwargs: dict[str, Any], cache: Any) -> LayerCall:
    """The arguments of a layer for somebody who has a cache of his own."""
    if cache is None:
        return LayerCall(tuple(args), kwargs)
    return LayerCall(
        tuple(CACHE if each is cache else each for each in args),
        {name: CACHE if each is cache else each for name, each in kwargs.items()},
    )


def call(layer: nn.Module, hidden: torch.Tensor, told: LayerCall, cache: Any) -> torch.Tensor:
    """Call a layer as its model would; its hidden states."""
    args = [cache if each is CACHE else each for each in told.args]
    kwargs = {name: cache if each is CACHE else each for name, each in told.kwargs.items()}
    result = layer(hidden, *args, **kwargs)
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found
