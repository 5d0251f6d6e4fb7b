"""Works on the cache of a transformers model: its entries, its length, its operations. It has one entry for each layer.

The servers have the real entries. On the client, a `RecordedCache` reports each operation on the user's cache, and
`operate` repeats the operation on a server's cache.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer  # `adapter` says so if transformers is missing

from nbdist.errors import UsageError

# The methods with which generation changes a cache between two steps. The servers repeat them on their caches.
OPERATIONS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording")
_BY_INDEX = ("reorder_cache", "batch_select_indices")  # of these, those that name sequences by their indices

# True if the argument of `crop` is the new length, as in transformers 5.0: there, 0 would remove all tokens.
_CROPS_TO_A_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def new_cache(config: Any) -> Any:
    """Make an empty cache for a model with this configuration."""
    return DynamicCache(config=config)


def described(kind: int, config: Any) -> Any:
    """Make an empty cache of a kind: 0 without a configuration, 1 of this ``config``, 2 also recording its past."""
    cache = new_cache(config) if kind else DynamicCache()
    if kind == 2:  # for a method of generation that takes tokens back
        cache.activate_past_recording()
    return cache


def description(empty: Any, config: Any) -> int:
    """Return the kind of an empty cache, for `described` elsewhere; raise UsageError if there is none like it."""
    wanted = _kinds_of_layers(empty)
    for kind in range(2 + hasattr(empty, "activate_past_recording")):
        if _kinds_of_layers(described(kind, config)) == wanted:
            return kind
    raise UsageError("a client on another host needs a cache of the model's own: DynamicCache(config=model.config)")


def _kinds_of_layers(cache: Any) -> list[str]:
    return [f"{type(layer)} {vars(layer)}" for layer in cache.layers]  # as texts: some attributes are tensors


def find_cache(values: Sequence[Any]) -> Any:
    """Return the cache among the arguments of a layer; None if there is none."""
    return next((each for each in values if isinstance(each, Cache)), None)


class RecordedCache:
    """The client's stand-in for a cache whose entries are on the servers. Counts tokens, and reports changes by `tell`.

    The user's cache stays the model's own, so that generation gets right answers from it, such as its length. Each
    operation of `OPERATIONS` on it is also reported as ``tell(name, args)``. Servers begin with copies of ``empty``.
    """

    def __init__(self, cache: Any, count: int) -> None:
        if type(cache) is not DynamicCache:
            raise UsageError(
                f"a swarm keeps its caches on the workers, where they grow, so it needs a DynamicCache or none, not a "
                f"{type(cache).__name__}"
            )
        self.empty = copy.deepcopy(cache)
        self._count = count
        self.tell: Callable[[str, tuple[Any, ...]], None] = lambda name, args: None
        self._cache = weakref.ref(cache)  # the cache itself holds this object, as `cache.nbdist`
        for name in OPERATIONS:
            if (own := getattr(type(cache), name, None)) is not None:
                setattr(cache, name, self._recording(name, own))

    def _recording(self, name: str, own: Callable[..., Any]) -> Any:
        """Return the function that replaces the cache's method ``own``: it calls the method, then reports the call."""
        # Weak: the cache has the function. In a cycle, it would stay until garbage is collected, and its session as
        # long (`test_a_session_ends_with_its_text_and_not_when_garbage_is_collected`).
        known = self._cache

        def record(*args: Any, **kwargs: Any) -> Any:
            cache: Any = known()
            before = cache.get_seq_length() if name == "crop" else 0
            found = own(cache, *args, **kwargs)  # first, since it may raise: then there is nothing to report
            told = (*args, *kwargs.values())
            if name == "crop":  # report the change in length, because transformers' versions differ in crop's argument
                told = (cache.get_seq_length() - before,)
            self.tell(name, told)
            return found

        return record

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedCache:
        raise UsageError(
            "copy.deepcopy cannot copy this cache, because its entries are on the workers of a swarm: call the model "
            "with the whole text and a new cache"
        )

    @contextlib.contextmanager
    def growing(self, batch: int, tokens: int) -> Iterator[None]:
        """Return a context manager to enter around a step of ``tokens`` new tokens of ``batch`` sequences.

        The cache gets entries for the new tokens; if the ``with`` block raises, it is restored.
        """
        cache: Any = self._cache()  # the caller has it
        # Copies of the attributes are enough: these layers never change a tensor in place.
        before = [(layer, vars(layer).copy()) for layer in cache.layers]
        try:
            self._grow(cache, batch, tokens)
            yield
        except BaseException:  # also Ctrl-C: the tokens of a step that failed must not count
            del cache.layers[len(before) :]
            for layer, attributes in before:
                vars(layer).clear()
                vars(layer).update(attributes)
            raise

    def _grow(self, cache: Any, batch: int, tokens: int) -> None:
        # One byte for each new token, by the cache's own `update`: lengths, crops and sliding windows then come out as
        # with the real entries.
        little = torch.zeros(batch, 1, tokens, 1, dtype=torch.int8)
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        for number in range(self._count):
            layer = cache.layers[number] if number < len(cache.layers) else None
            # Nearly all layers are alike: update one of each kind, and copy its attributes to the others.
            key = (type(layer), getattr(layer, "sliding_window", None), getattr(layer, "record_past", None))
            if layer is None or key not in known:
                cache.update(little, little, number)
                known[key] = vars(cache.layers[number])
            else:
                vars(layer).update(known[key])


def operate(cache: Any, name: str, args: Sequence[Any], begin: int, end: int) -> None:
    """Repeat an operation of `OPERATIONS` on a server's cache, for the layers from ``begin`` to before ``end``.

    Raises UsageError for another name: a client on another host may send any.
    """
    if name not in OPERATIONS:
        raise UsageError(f"a cache has no operation {name!r}, only {', '.join(OPERATIONS)}")
    if name == "crop" and _CROPS_TO_A_LENGTH and not args[0]:  # 0 would be the new length
        return
    filled = [layer.keys for layer in cache.layers[begin:end] if layer.is_initialized and hasattr(layer, "keys")]
    if name in _BY_INDEX and filled:
        index = torch.as_tensor(args[0]).cpu()
        rows = min(keys.shape[0] for keys in filled)
        # On a GPU, such an index would end all work of the process.
        if index.dtype != torch.bool and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise UsageError(f"the cache has {rows} sequences, and {name} asks for others")
    for layer in cache.layers[begin:end]:
        method = getattr(layer, name, None)
        # In a layer without entries nothing can change; but recording must begin before the first entries.
        if method is not None and (layer.is_initialized or name == "activate_past_recording"):
            method(*args)


def length(cache: Any, span: tuple[int, int]) -> int:
    """Return the number of tokens in the cache of a span (begin, end) of layers, as its first layer counts them.

    Tokens that a sliding window has left behind count, too.
    """
    return int(cache.layers[span[0]].get_seq_length()) if span[0] < len(cache.layers) else 0


def nbytes(cache: Any, span: tuple[int, int]) -> int:
    """Return the bytes of the cache entries of the layers of a span (begin, end)."""
    return sum(
        tensor.nbytes
        for layer in cache.layers[slice(*span)]
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor)
    )


def move_cache(cache: Any, device: str) -> None:
    """Move the entries of all layers of a cache to ``device``."""
    for layer in cache.layers:
        for name, value in list(vars(layer).items()):
            if isinstance(value, torch.Tensor):
                setattr(layer, name, value.to(device))
            elif isinstance(value, torch.device):  # where the layer puts new entries
                setattr(layer, name, torch.device(device))


def part(cache: Any, begin: int, end: int) -> Any:
    """Return a copy of a cache that shares the entries of these layers; all other layers of the copy are empty."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    # All layers stay in the list: blocks have the same numbers on every server.
    for number, layer in enumerate(found.layers):
        if not begin <= number < end:
            layer.reset()
    return found


def forgets(cache: Any) -> bool:
    """Return whether a crop leaves a cache as if the cropped tokens had never been in it. False for sliding windows."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def windows(cache: Any) -> list[int | None]:
    """Return, for each layer, the size of its sliding window in tokens; None for a layer without one."""
    return [getattr(layer, "sliding_window", None) if layer.is_sliding else None for layer in cache.layers]
