"""`GroupStore`: the store through which workers form their process group; `FolderStore` keeps it in files of one host.

torch's own two stores for several processes are not used. `TCPStore` listens on every interface and trusts everybody
who connects. `FileStore` appends records to one file: a process that is killed within a record leaves half of it, and
every reader then spins without end, holding the GIL. Here nothing listens, and each key is a file of its own::

    group-7/              one folder for each generation of the group; the notebook makes it, and removes older ones
      lock                held while a key changes; the system frees the lock when its holder dies
      draft               the value being written; a rename makes it the key's file, so no file ever holds half a value
      key-3f0c…           one value, named by a hash of the key
      ended               only if the group failed to form: why. Every wait in this store then ends with this text

A waiting process looks for its keys every few milliseconds and sleeps in between, so Ctrl-C ends its wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed

from nbdist.cluster.processes.setup import group_folder
from nbdist.errors import RendezvousError, WorkerLost

dist: Any = torch.distributed  # Any: torch does not declare what this module exports

REPLACED = "the store of this process group has been removed: the cluster has formed a new process group, or has ended"

# The keys under which gloo stores the address at which this process listens for a group, with that group's name.
_OF_GLOO = re.compile(r"(?:^|//)([^/]+)//cpu//\d+/\d+$")

# Excludes the other threads of this process, because a `lockf` lock excludes other processes only. `flock` would
# exclude both, but a child that is forked at that moment would inherit the lock and keep it.
_changing = threading.Lock()


class GroupStore(dist.Store):  # type: ignore[misc]  # dist is Any
    """A `torch.distributed.Store` of the workers of one cluster, for one process group.

    A subclass stores the keys and values. torch calls the methods from C++ too, in any thread. Keep a reference to the
    store for as long as a process group uses it: C++ keeps only its own half of the object alive. Queues and
    `list_keys` are missing, because torch cannot call these in a store written in Python.

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

    def _read(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""
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
        """Return torch's name of the group for which gloo listens at an address in this process; None if unknown.

        ``address`` is the beginning of a C ``sockaddr``, as `gloo.Loop.address` has it.
        """
        named = (name for name, place in self._places.items() if address and address in place)
        return next(named, None)

    def _note_place(self, key: str, value: bytes) -> None:
        if of_gloo := _OF_GLOO.search(key):
            self._places[of_gloo[1]] = value

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
        """Return the values of several keys; each of them may wait for the store's timeout."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value, without waiting."""
        return all(self._read(key) is not None for key in keys)

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

    # -- questions of torch about the store itself --------------------------------------------

    def deleteKey(self, key: str) -> bool:
        """Remove a key, as `delete_key` does."""
        return bool(self.delete_key(key))

    def getNumKeys(self) -> int:
        """Return how many keys have a value, as `num_keys` does."""
        return int(self.num_keys())

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

    @property
    def ended(self) -> str:
        """Return why the group failed to form, or that the folder is gone; empty if all is well."""
        try:
            return (self._folder / "ended").read_text()
        except FileNotFoundError:
            return "" if self._folder.exists() else REPLACED

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value, without waiting."""
        return all(self._file(key).exists() for key in keys)

    def num_keys(self) -> int:
        """Return how many keys have a value."""
        return sum(1 for _ in self._folder.glob("key-*"))

    # -- writing ------------------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Give a key a value, in place of an earlier one."""
        with self._lock():
            self._write(key, _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Give several keys their values. Readers may see some of the values before the others."""
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
        """Give a key the desired value if its value is the expected one; return the value that the key has afterwards.

        A missing value counts as empty.
        """
        with self._lock():
            found = self._read(key)
            if (found or b"") != _bytes(expected):
                return _bytes(expected) if found is None else found  # as torch's own stores answer
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

    # -- files --------------------------------------------------------------------------------

    def _file(self, key: str) -> Path:
        # The name is a hash, as keys may have any characters and any length.
        return self._folder / f"key-{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def _read(self, key: str) -> bytes | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        """Replace the file of a key. The caller holds the lock."""
        self._note_place(key, value)  # for `group_at`
        draft = self._folder / "draft"
        draft.write_bytes(value)
        draft.rename(self._file(key))  # atomic: a reader has the old value or the new one, never half

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        deadline = time.monotonic() + self.timeout.total_seconds()
        with _changing, self._open_lock() as file:
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # polled, as an endless wait in lockf could not time out
                    if time.monotonic() > deadline:
                        raise dist.DistStoreError(
                            "another worker has held the lock of the process group's store for the whole timeout; "
                            "it may have been stopped: see %dist_status"
                        ) from None
                    time.sleep(self._first_pause)
            yield

    def _open_lock(self) -> Any:
        """Return the open lock file, not locked yet."""
        self._raise_if_ended()
        try:
            return open(self._folder / "lock", "wb")
        except FileNotFoundError:
            raise RendezvousError(REPLACED) from None


class GroupStores(Protocol):
    """The notebook's side of the stores of process groups, one for each generation of the group."""

    def make(self, generation: int) -> None:
        """Make the store of a new generation."""
        ...

    def end(self, generation: int, why: str) -> None:
        """Make every present and future wait in a store raise RendezvousError with the text ``why``."""
        ...

    def remove(self, generation: int) -> None:
        """Remove a store. Does nothing if there is none of that generation."""
        ...


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
        draft = folder / "ending"  # not "draft", which a worker may be writing: the lock is not taken here
        draft.write_text(why)
        draft.rename(folder / "ended")

    def remove(self, generation: int) -> None:
        """Remove a folder, if there is one."""
        shutil.rmtree(self._folder / group_folder(generation), ignore_errors=True)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
