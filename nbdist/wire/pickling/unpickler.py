"""Rebuilds the values that `nbdist.wire.pickling.pickler` has pickled."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist import torch_private
from nbdist.errors import DecodeError
from nbdist.wire.pickling import classes, names, stand_ins
from nbdist.wire.tensors import Buffer


class _Globals(dict[str, Any]):
    """The globals of a function that came by value. Other names are looked up in ``__main__`` here."""

    def __missing__(self, name: str) -> Any:
        for module in names.MAIN_NAMES:
            namespace = getattr(sys.modules.get(module), "__dict__", {})
            if name in namespace:
                return namespace[name]
        raise KeyError(name)


class Unpickler(pickle.Unpickler):
    """Rebuilds the value of one message."""

    def __init__(
        self,
        body: bytes,
        buffers: Sequence[Buffer],
        tensors: Sequence[torch.Tensor],
        references: Sequence[Any],
        recorded: Sequence[torch.Tensor] = (),
    ) -> None:
        """Prepare to `read` ``body``, which refers to ``tensors``, ``references`` and ``recorded`` by their indices.

        ``buffers`` has the large buffers that the pickler put beside the body, in its order.
        """
        # Writable copies: an array on a bytes object could not be changed.
        super().__init__(io.BytesIO(body), buffers=[bytearray(buffer) for buffer in buffers])
        self._tensors = tensors
        self._references = references
        self._recorded = recorded
        # The globals that were made for functions, by the id of the dict that they replace, which is kept so that no
        # other object gets its id.
        self._globals: dict[int, tuple[Any, _Globals]] = {}

    def read(self) -> Any:
        """Return the value. Afterwards, this object does not refer to it. Call this only once."""
        try:
            return self.load()
        finally:
            self.memo = {}  # it has methods of this object: the reference cycle would keep all values alive
            # Torch checks sparse tensors after loading, and keeps a list of them until it is asked.
            torch_private.validate_sparse()

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names, or what this class puts in its place. May raise DecodeError."""
        if module == stand_ins.__name__:
            if name == "tensor":
                return self._tensors.__getitem__
            if name == "recorded":
                return self._recorded.__getitem__
            if name == "reference":
                return self._references.__getitem__
        # cloudpickle's functions would put the sender's globals, and attributes of classes, over those of this process.
        elif module == cloudpickle.__name__:
            if name == "_make_function":
                return self._make_function
            if name == "_class_setstate":
                return classes.fill_any
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return partial(classes.make, super().find_class(module, name))
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
        """Return a function that came by value, for which cloudpickle's function of that name takes these arguments."""
        # Functions that share their globals have one namespace here, too, so its replacement must be one object.
        if (known := self._globals.get(id(namespace))) is None:
            known = self._globals[id(namespace)] = (namespace, _Globals(namespace))
        return cloudpickle._make_function(code, known[1], *rest)
