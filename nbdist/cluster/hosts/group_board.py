"""The store at which workers of several hosts form their process group: in the notebook's memory, reached by RPC.

So the store is encrypted like all RPC, and no other socket listens. A worker that waits for a key asks again and again,
with pauses, so that no thread of the notebook waits for the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.cluster.processes.group_store import REPLACED, GroupStore
from nbdist.errors import RendezvousError, UsageError
from nbdist.rpc.named import NotOffered


class Boards:
    """The boards of one cluster, keys with values: one for each generation of its process group.

    The notebook's agent publishes them as ``boards``. Any thread may use them.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, bytes]] = {}
        self._ended: dict[int, str] = {}
        self._lock = threading.Lock()

    def make(self, generation: int) -> None:
        """Make the board of a new generation."""
        with self._lock:
            self._values[generation] = {}

    def end(self, generation: int, why: str) -> None:
        """Make every present and future wait at a board raise RendezvousError with the text ``why``."""
        with self._lock:
            self._ended[generation] = why

    def remove(self, generation: int) -> None:
        """Remove a board, if there is one."""
        with self._lock:
            self._values.pop(generation, None)
            self._ended.pop(generation, None)

    def act(self, generation: int, operation: str, *arguments: Any) -> Any:
        """Do one operation of a `BoardStore` and return its result. Raises RendezvousError if the board has ended."""
        with self._lock:
            values = self._values.get(generation)
            ended = REPLACED if values is None else self._ended.get(generation, "")
            if operation == "ended":
                return ended
            if ended or values is None:
                raise RendezvousError(ended)
            match operation, *arguments:
                case "read", key:
                    return values.get(key)
                case ("num_keys",):
                    return len(values)
                case "set", key, value:
                    values[key] = value
                case "multi_set", pairs:
                    values.update(pairs)
                case "append", key, value:
                    values[key] = values.get(key, b"") + value
                case "add", key, amount:
                    total = int(values.get(key, b"0")) + amount
                    values[key] = b"%d" % total
                    return total
                case "compare_set", key, expected, desired:
                    found = values.get(key)
                    if (found or b"") != expected:
                        # As torch's own stores answer.
                        return expected if found is None else found
                    values[key] = desired
                    return desired
                case "delete_key", key:
                    return values.pop(key, None) is not None
                case _:
                    raise UsageError(f"a board has no operation {operation!r}")
        return None


class BoardStore(GroupStore):
    """The store of one generation of a process group, at a board in the notebook."""

    _first_pause, _longest_pause = 0.002, 0.05  # longer than for a folder: each look is a call

    def __init__(self, generation: int, act: Callable[..., Any]) -> None:
        """Use the board of a generation. ``act`` calls `Boards.act` in the notebook."""
        super().__init__()
        self._generation = generation
        self._act = act

    def _do(self, operation: str, *arguments: Any) -> Any:
        try:
            return self._act(self._generation, operation, *arguments)
        except NotOffered:  # the cluster has ended
            raise RendezvousError(REPLACED) from None

    def _write(self, operation: str, *arguments: Any) -> Any:
        self._raise_if_ended()  # the board does not know of a member that has died
        return self._do(operation, *arguments)

    @property
    def ended(self) -> str:
        """Return why the group failed to form, or that the board is gone; empty if all is well."""
        return str(self._do("ended"))

    def _read(self, key: str) -> bytes | None:
        value: bytes | None = self._do("read", key)
        return value

    def num_keys(self) -> int:
        """Return how many keys have a value."""
        return int(self._do("num_keys"))

    def set(self, key: str, value: bytes | str) -> None:
        """Give a key a value; an earlier one is replaced."""
        self._note_place(key, _bytes(value))
        self._write("set", key, _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Give several keys their values, all at once."""
        self._write("multi_set", {key: _bytes(value) for key, value in zip(keys, values, strict=True)})

    def append(self, key: str, value: bytes | str) -> None:
        """Add bytes to the end of a key's value; a missing value counts as empty."""
        self._write("append", key, _bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's value, a decimal number, and return the sum; a missing value counts as 0."""
        return int(self._write("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Give a key the desired value if its value is the expected one; return the value that the key has afterwards.

        A missing value counts as empty.
        """
        value: bytes = self._write("compare_set", key, _bytes(expected), _bytes(desired))
        return value

    def delete_key(self, key: str) -> bool:
        """Remove a key and its value; return whether there was one."""
        return bool(self._write("delete_key", key))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
