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
    from transformers.cache_utils import Cache, DynamicCache
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
    "convert_gguf",
    "find_cache",
    "find_layers",
    "operate",
    "strip",
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


def build(config: Any) -> Any:
    """A model of this configuration whose parameters have no memory yet."""
    with _without_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))  # type: ignore[no-untyped-call]
    return model.eval()


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
        with safe_open(self.folder / _WEIGHTS, "pt") as file:
            self.names: frozenset[str] = frozenset(file.keys())

    @classmethod
    def opened(cls, folder: str | Path, scratch: Path) -> Checkpoint:
        """A folder as others write it; where its weights have other names, or lie in several files, a copy."""
        if (Path(folder) / _WEIGHTS).exists():
            found = cls(folder)
            model = build(found.config)
            path = find_layers(model)
            if all(f"{path}.{name}" in found.names for name, _ in model.get_submodule(path).named_parameters()):
                return found
        write_checkpoint(transformers.AutoModelForCausalLM.from_pretrained(folder), scratch)
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
        with safe_open(self.folder / _WEIGHTS, "pt") as file:
            state = {
                name: file.get_tensor(prefix + name) for name in module.state_dict() if prefix + name in self.names
            }
        module.load_state_dict(state, strict=False, assign=True)
        module.requires_grad_(False)

    def nbytes(self, prefix: str) -> int:
        """Of all weights whose names begin so."""
        with open(self.folder / _WEIGHTS, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        spans = [told["data_offsets"] for name, told in header.items() if name.startswith(prefix)]
        return sum(end - begin for begin, end in spans)


def write_checkpoint(model: Any, folder: Path) -> None:
    """Write a model so that `Checkpoint` reads it."""
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


def find_cache(values: Sequence[Any]) -> Any:
    """The cache among the arguments of a layer; None where there is none."""
    return next((each for each in values if isinstance(each, Cache)), None)


class RecordedCache:
    """What a client knows of a cache that is elsewhere: how much is in it, and what is done to it.

    It is the model's own cache with entries of one byte. So all that generation asks of it is answered as it would be,
    and each operation is told to ``tell`` besides. Whoever has the entries begins with ``empty``.
    """

    def __init__(self, cache: Any) -> None:
        if type(cache) is not DynamicCache:
            raise UsageError(f"a swarm keeps caches of its own, which grow: not a {type(cache).__name__}")
        self.empty = copy.deepcopy(cache)
        self.tell: Callable[[str, tuple[Any, ...]], None] = lambda name, args: None
        self._cache = weakref.ref(cache)  # which has this one
        for name in OPERATIONS:
            own = getattr(type(cache), name, None)
            if own is not None:
                setattr(cache, name, self._recording(name, own))

    def _recording(self, name: str, own: Callable[..., Any]) -> Any:
        known = self._cache

        def record(*args: Any) -> Any:
            self.tell(name, args)
            return own(known(), *args)

        return record

    def grow(self, layer: int, batch: int, tokens: int) -> None:
        """So many tokens have come to a layer's cache."""
        cache = self._cache()
        if cache is not None:
            little = torch.zeros(batch, 1, tokens, 1, dtype=torch.int8)
            cache.update(little, little, layer)


def operate(cache: Any, name: str, args: Sequence[Any], begin: int, end: int) -> None:
    """Do to the entries of some layers what was done to all of the client's."""
    for layer in cache.layers[begin:end]:
        method = getattr(layer, name, None)
        if method is not None and (layer.is_initialized or name == "activate_past_recording"):
            method(*args)


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
