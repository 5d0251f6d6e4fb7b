"""`GroupStore`: the store through which workers form their process group; `FolderStore` keeps it in files of one host.

torch's own two stores for several processes are not used. `TCPStore` listens on every interface and trusts everybody
who connects. `FileStore` does not survive a process that is killed in the middle of a write
(`nbdist.channel.locked_file`). Here nothing listens, and each key is a file of its own::

    group-7/              one folder for each generation of the group; the notebook makes it, and removes older ones
      lock                held while a key changes; the system frees the lock when its holder dies
      draft               the value being written; a rename makes it the key's file, so no file ever holds half a value
      key-3f0c…           one value, named by a hash of the key
      ended               only if the group failed to form: why. Every wait in this store then ends with this text

A waiting process looks for its keys every few milliseconds and sleeps in between, so Ctrl-C ends its wait.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed

from nbdist.channel.locked_file import locked, write_whole
from nbdist.cluster.processes.setup import group_folder
from nbdist.errors import RendezvousError, UsageError, WorkerLost

dist: Any = torch.distributed  # Any: torch does not declare what this module exports

REPLACED = "the store of this process group has been removed: the cluster has formed a new process group, or has ended"

# The keys under which gloo stores the address at which this process listens for a group, with that group's name.
_OF_GLOO = re.compile(r"(?:^|//)([^/]+)//cpu//\d+/\d+$")


class _Files:
    """The values of keys, each in a file of its own, as a dict has them. Only the holder of the lock changes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: str) -> Path:
        # The name is a hash, as keys may have any characters and any length.
        return self._folder / f"key-{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def get(self, key: str) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def __setitem__(self, key: str, value: bytes) -> None:
        write_whole(self.path(key), value, self._folder / "draft")

    def pop(self, key: str, default: None) -> bytes | None:
        value = self.get(key)
        self.path(key).unlink(missing_ok=True)
        return value

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob("key-*"))


def operate(values: dict[str, bytes] | _Files, operation: str, *arguments: Any) -> Any:
    """Do one operation of a `GroupStore` on the values of its keys; return the result. The caller holds the lock."""
    match operation, *arguments:
        case "read", key:
            return values.get(key)
        case ("num_keys",):
            return len(values)
        case "set", pairs:
            for key, value in pairs.items():
                values[key] = value
        case "append", key, value:
            values[key] = (values.get(key) or b"") + value
        case "add", key, amount:
            total = int(values.get(key) or 0) + amount
            values[key] = b"%d" % total
            return total
        case "compare_set", key, expected, desired:
            present = values.get(key)
            if (present or b"") != expected:
                return expected if present is None else present  # as torch's own stores answer
            values[key] = desired
            return desired
        case "delete_key", key:
            return values.pop(key, None) is not None
        case _:
            raise UsageError(f"a board has no operation {operation!r}")
    return None


class GroupStore(dist.Store):  # type: ignore[misc]  # dist is Any
    """A `torch.distributed.Store` of the workers of one cluster, for one process group.

    A subclass does `operate` on the values of the keys. torch calls the methods from C++ too, in any thread. Keep a
    reference to the store for as long as a process group uses it: C++ keeps only its own half of the object alive.
    Queues and `list_keys` are missing, because torch cannot call these in a store written in Python.

    Waits for a missing key and writes raise RendezvousError as soon as the group cannot form or the store is gone, and
    WorkerLost as soon as a member has died. A wait raises DistStoreError after the store's timeout.
    """

    # Seconds between two looks for a key: the pauses grow, so that a long wait costs little.
    _first_pause, _longest_pause = 0.0005, 0.005

    def __init__(self) -> None:
        super().__init__()
        # The addresses that gloo has stored of this process's listeners, by the name of the group.
        self._places: dict[str, bytes] = {}
        self.lost = ""
        """The text of the WorkerLost that waits and writes raise once a member has died; empty before."""

    # -- a subclass defines these -------------------------------------------------------------

    @property
    def ended(self) -> str:
        """Return why the group failed to form, or that the store is gone; empty if all is well."""
        raise NotImplementedError

    def _do(self, operation: str, *arguments: Any) -> Any:
        """Do one operation of `operate`. For operations that write, only `_change` calls this."""
        raise NotImplementedError

    # -- members and groups -------------------------------------------------------------------

    def enter(self, incarnation: int, rank: int) -> None:
        """Store this process's rank under the incarnation of its RPC agent, for `rank_of` in other workers."""
        self.set(f"nbdist/{incarnation:x}", str(rank))

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of the process whose agent has this incarnation; None if it has not entered this group."""
        value = self._read(f"nbdist/{incarnation:x}")
        return None if value is None else int(value)

    def group_at(self, address: bytes) -> str | None:
        """Return torch's name of the group for which gloo listens at an address in this process; None if unknown."""
        # ``address`` is the beginning of a C ``sockaddr``, as `gloo.Loop.address` has it.
        # A copy, made in one operation: another thread may form a group now.
        named = (name for name, place in list(self._places.items()) if address and address in place)
        return next(named, None)

    # -- reading ------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until there is one."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            self._await([key], deadline)
            if (value := self._read(key)) is not None:  # else another process has deleted the key just now
                return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; each of them may wait for the store's timeout."""
        return [self.get(key) for key in keys]

    def _read(self, key: str) -> bytes | None:
        value: bytes | None = self._do("read", key)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value, without waiting."""
        return all(self._read(key) is not None for key in keys)

    def num_keys(self) -> int:
        """Return how many keys have a value."""
        return int(self._do("num_keys"))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value, by default for the store's timeout at most."""
        self._await(keys, time.monotonic() + (timeout or self.timeout).total_seconds())

    def _await(self, keys: Sequence[str], deadline: float) -> None:
        missing, pause = list(keys), self._first_pause
        while missing:
            if self.check(missing[-1:]):
                missing.pop()
                continue
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"no worker has set {', '.join(map(repr, missing))} in the process group's store "
                    "within its timeout: one is busy or has failed, see %dist_status"
                )
            time.sleep(pause)  # in Python, so that Ctrl-C ends the wait, also one that C++ makes
            pause = min(pause * 1.2, self._longest_pause)

    def _raise_if_ended(self) -> None:
        if self.lost:
            raise WorkerLost(self.lost)
        if why := self.ended:
            raise RendezvousError(why)

    # -- writing ------------------------------------------------------------------------------

    def _change(self, operation: str, *arguments: Any) -> Any:
        """Do an operation that writes, atomically: no other process or thread changes a value meanwhile."""
        self._raise_if_ended()
        return self._do(operation, *arguments)

    def set(self, key: str, value: bytes | str) -> None:
        """Give a key a value, in place of an earlier one."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Give several keys their values. Readers of a `FolderStore` may see some of the values before the others."""
        pairs = {key: _bytes(value) for key, value in zip(keys, values, strict=True)}
        for key, value in pairs.items():
            if of_gloo := _OF_GLOO.search(key):
                self._places[of_gloo[1]] = value  # for `group_at`
        self._change("set", pairs)

    def append(self, key: str, value: bytes | str) -> None:
        """Add bytes to the end of a key's value; a missing value counts as empty."""
        self._change("append", key, _bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's value, a decimal number, and return the sum; a missing value counts as 0."""
        return int(self._change("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Give a key the desired value if its value is the expected one; return its value afterwards."""
        # A missing value counts as empty.
        return bytes(self._change("compare_set", key, _bytes(expected), _bytes(desired)))

    def delete_key(self, key: str) -> bool:
        """Remove a key and its value; return whether there was one."""
        return bool(self._change("delete_key", key))

    # -- questions of torch about the store itself --------------------------------------------

    deleteKey, getNumKeys = delete_key, num_keys  # torch's C++ calls them by these names

    def has_extended_api(self) -> bool:
        """Return True: this store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> GroupStore:
        """Return this store itself, because several threads may use it at once."""
        return self


class FolderStore(GroupStore):
    """The store of workers that are all on one host, in a folder that only this user can enter.

    Writing takes a lock that excludes all threads and processes, so `append`, `add` and `compare_set` are atomic.
    Writing raises DistStoreError if the lock is not free within the store's timeout. Readers take no lock.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files = _Files(folder)

    @property
    def ended(self) -> str:
        """Return why the group failed to form, or that the folder is gone; empty if all is well."""
        try:
            return (self._folder / "ended").read_bytes().decode()
        except FileNotFoundError:
            return "" if self._folder.exists() else REPLACED

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value, without waiting."""
        return all(self._files.path(key).exists() for key in keys)

    def _do(self, operation: str, *arguments: Any) -> Any:
        return operate(self._files, operation, *arguments)

    def _change(self, operation: str, *arguments: Any) -> Any:
        self._raise_if_ended()  # before the wait for the lock, and without it
        try:
            with locked(self._folder / "lock", self.timeout.total_seconds()):
                return self._do(operation, *arguments)
        except FileNotFoundError:
            raise RendezvousError(REPLACED) from None
        except TimeoutError:
            raise dist.DistStoreError(
                "another worker has held the lock of the process group's store for the whole timeout; "
                "it may have been stopped: see %dist_status"
            ) from None


class GroupStores(Protocol):
    """The notebook's side of the stores of process groups, one for each generation of the group."""

    def make(self, generation: int) -> None:
        """Make the store of a new generation."""

    def end(self, generation: int, why: str) -> None:
        """Make every present and future wait in a store raise RendezvousError with the text ``why``."""

    def remove(self, generation: int) -> None:
        """Remove a store. Does nothing if there is none of that generation."""


class Folders:
    """The folders of the stores of a cluster whose workers are all on this host, in the run directory ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, generation: int) -> None:
        """Make the folder of a new generation, which only this user can enter."""
        (self._folder / group_folder(generation)).mkdir(mode=0o700)

    def end(self, generation: int, why: str) -> None:
        """Make every wait in a store raise RendezvousError with the text ``why``, which replaces an earlier text."""
        folder = self._folder / group_folder(generation)
        # Not "draft", which a worker may be writing: the lock is not taken here.
        write_whole(folder / "ended", why.encode(), folder / "ending")

    def remove(self, generation: int) -> None:
        """Remove a folder, if there is one."""
        shutil.rmtree(self._folder / group_folder(generation), ignore_errors=True)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
