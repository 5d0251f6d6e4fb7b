"""The store at which the workers of one host form their process group: files in the run directory, nothing listens.

torch's own two candidates do not serve. `TCPStore` listens on every interface and believes everybody. `FileStore`
appends records to one file: a process killed in the middle of a record leaves half of it, and every reader then spins
for ever, holding the GIL. Here each key is a file of its own::

    group-7/              one folder for each forming of the group; the notebook makes it, and removes older ones
      lock                held while a key changes; the kernel frees the lock when its holder dies
      draft               the value being written; a rename makes it the key's file, so no file ever holds half a value
      key-3f0c…           one value, named by a hash of the key
      ended               only if the forming failed: why. Every wait in this store then ends with this text

A waiting process looks again every few milliseconds, without the GIL in between, so Ctrl-C ends its wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from nbdist.errors import RendezvousError, WorkerLost

__all__ = ["GroupStore", "end"]

dist: Any = torch.distributed  # which does not declare what it exports

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.005
"""Seconds between two looks for a key: the pauses grow, so that a long wait costs little."""

_REPLACED = "this process group's store has gone: the cluster has formed its process group anew, or ended"

_OF_GLOO = re.compile(r"(?:^|//)([^/]+)//cpu//\d+/\d+$")
"""The keys under which gloo tells the members of a group where this process listens; the group's name is in the key."""

_changing = threading.Lock()
"""Excludes the other threads of this process: a `lockf` lock excludes other processes only.

`flock` would exclude both, but a child forked in that moment would inherit the lock and keep it.
"""


class GroupStore(dist.Store):  # type: ignore[misc]  # dist is Any
    """A store of torch's kind in a folder of this user's own.

    torch calls the methods from C++ too, from any thread. A caller must keep a reference to the store for as long as a
    process group uses it: C++ keeps only its own half of the object alive. Queues and `list_keys` are not there, as
    torch cannot call them in a store written in Python.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._places: dict[str, bytes] = {}
        self.lost = ""
        """Why no group can form any more: a member has died. Every later operation fails with this text."""

    @property
    def ended(self) -> str:
        """Return why the forming of the group has failed; empty as long as it has not."""
        try:
            return (self._folder / "ended").read_text()
        except FileNotFoundError:
            return "" if self._folder.exists() else _REPLACED

    # -- members and groups -------------------------------------------------------------------

    def enter(self, incarnation: int, rank: int) -> None:
        """Note that this process, an agent of that incarnation, is a member of the process group."""
        self.set(f"nbdist/{incarnation:x}", str(rank))

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of an agent; None if that agent has not come to the forming of this group."""
        value = self._read(f"nbdist/{incarnation:x}")
        return None if value is None else int(value)

    def group_at(self, address: bytes) -> str | None:
        """Return torch's name of the group whose members connect to this process at an address; None if unknown."""
        named = (name for name, place in self._places.items() if address and address in place)
        return next(named, None)

    # -- reading ------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until there is one."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            self._await([key], deadline)
            value = self._read(key)
            if value is not None:  # else another process has deleted the key just now
                return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; wait until all are there."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value, without waiting."""
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value; DistStoreError after the timeout."""
        self._await(keys, time.monotonic() + (timeout or self.timeout).total_seconds())

    def num_keys(self) -> int:
        """Return how many keys have a value."""
        return sum(1 for _ in self._folder.glob("key-*"))

    # -- writing ------------------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Give a key a value."""
        with self._lock():
            self._write(key, _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Give several keys their values."""
        with self._lock():
            for key, value in zip(keys, values, strict=True):
                self._write(key, _bytes(value))

    def append(self, key: str, value: bytes | str) -> None:
        """Add bytes to the end of a key's value; a missing value counts as empty."""
        with self._lock():
            self._write(key, (self._read(key) or b"") + _bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's value, a decimal number, and return the sum; a missing value counts as 0."""
        with self._lock():
            total = int(self._read(key) or 0) + amount
            self._write(key, b"%d" % total)
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Give a key the desired value if it has the expected one; return the key's value then.

        A missing value counts as an empty one. Where another one was expected of a missing value, nothing is written
        and the expected value comes back, as from torch's stores.
        """
        with self._lock():
            found = self._read(key)
            if (found or b"") != _bytes(expected):
                return _bytes(expected) if found is None else found
            self._write(key, _bytes(desired))
        return _bytes(desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key and its value; return whether there was one."""
        with self._lock():
            try:
                self._file(key).unlink()
            except FileNotFoundError:
                return False
        return True

    # -- what torch asks besides --------------------------------------------------------------

    deleteKey = delete_key  # C++ asks for these two by their names in C++
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        """Say that `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> GroupStore:
        """Return this store itself, which several threads may use at once."""
        return self

    # -- files --------------------------------------------------------------------------------

    def _file(self, key: str) -> Path:
        return self._folder / f"key-{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def _read(self, key: str) -> bytes | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        if of_gloo := _OF_GLOO.search(key):
            self._places[of_gloo[1]] = value
        draft = self._folder / "draft"
        draft.write_bytes(value)
        draft.rename(self._file(key))

    def _await(self, keys: Sequence[str], deadline: float) -> None:
        missing, pause = list(keys), _FIRST_PAUSE
        while missing:
            if self._file(missing[-1]).exists():
                missing.pop()
                continue
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"nobody has set {', '.join(map(repr, missing))} in time")
            time.sleep(pause)
            pause = min(pause * 1.2, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        deadline = time.monotonic() + self.timeout.total_seconds()
        with _changing, self._open_lock() as file:
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # not waited for in the kernel: its holder may have been stopped
                    if time.monotonic() > deadline:
                        raise dist.DistStoreError("another process has kept the store locked all the time") from None
                    time.sleep(_FIRST_PAUSE)
            yield

    def _open_lock(self) -> Any:
        self._raise_if_ended()
        try:
            return open(self._folder / "lock", "wb")
        except FileNotFoundError:
            raise RendezvousError(_REPLACED) from None

    def _raise_if_ended(self) -> None:
        if self.lost:
            raise WorkerLost(self.lost)
        if why := self.ended:
            raise RendezvousError(why)


def end(folder: Path, why: str) -> None:
    """End every wait in the store of this folder, present and future, with a RendezvousError of this text."""
    draft = folder / "ending"
    draft.write_text(why)
    draft.rename(folder / "ended")


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
