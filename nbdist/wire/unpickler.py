"""Rebuilds what `nbdist.wire.pickler` and `nbdist.wire.few_tensors` have pickled."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist import torch_private
from nbdist.errors import DecodeError
from nbdist.wire import names, stand_ins
from nbdist.wire.tensors import Buffer

__all__ = ["Unpickler"]


class _Globals(dict[str, Any]):
    """The globals of a by-value function: what the sender lacked is the receiver's own, at run time."""

    def __missing__(self, name: str) -> Any:
        for module in names.MAIN_NAMES:
            namespace = getattr(sys.modules.get(module), "__dict__", {})
            if name in namespace:
                return namespace[name]
        raise KeyError(name)


class Unpickler(pickle.Unpickler):
    def __init__(
        self,
        body: bytes,
        buffers: Sequence[Buffer],
        tensors: Sequence[torch.Tensor],
        references: Sequence[Any],
        recorded: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(io.BytesIO(body), buffers=[bytearray(buffer) for buffer in buffers])
        self._tensors = tensors
        self._references = references
        self._recorded = recorded
        self._globals: dict[int, tuple[Any, _Globals]] = {}

    def persistent_load(self, index: int) -> torch.Tensor:
        """What a `TensorPickler` put in the place of a tensor."""
        return self._tensors[index] if index >= 0 else self._recorded[-1 - index]

    def read(self) -> Any:
        """The value, and nothing that keeps it."""
        try:
            return self.load()
        finally:
            self.memo = {}  # it holds methods of this very object: a circle, and with it all values
            torch_private.validate_sparse()

    def find_class(self, module: str, name: str) -> Any:
        if module == stand_ins.__name__:
            if name == "tensor":
                return self._tensors.__getitem__
            bound: dict[str, Callable[..., Any]] = {
                "recorded": self._recorded.__getitem__,
                "reference": self._references.__getitem__,
            }
            if name in bound:
                return bound[name]
        elif name == "_make_function" and module == cloudpickle.__name__:
            return self._make_function
        try:
            return super().find_class(module, name)
        except (AttributeError, ImportError) as error:
            failed = DecodeError(
                f"this worker has no {name!r} in module {module!r}, which the value needs: it must be defined on "
                f"both sides ({error})"
            )
            failed.lacks = f"{type(error).__name__}: {error}"
            raise failed from error

    def _make_function(self, code: Any, namespace: dict[str, Any], *rest: Any) -> Any:
        # The namespace is one object for all functions that shared theirs; so is what replaces it.
        known = self._globals.get(id(namespace))
        if known is None:
            known = self._globals[id(namespace)] = (namespace, _Globals(namespace))
        return cloudpickle._make_function(code, known[1], *rest)
