"""Attack the store of a world as another user of this machine, who knows the port but not the secret.

A program of its own: ``stranger.py PORT``. It reads one command a line, and answers each with one line:

====== ==================================================================================================
keys   write keys under the names that torch and nbdist use: ``written``
forge  wait for a list of members, and put a member of the stranger's own into it as rank 1: ``forged``
keep   remember the list of members that the store has now: ``kept``
replay put the remembered list in place of the present one, 20 times: ``replayed``
calls  say whether anybody has connected to the address of the forged member: ``nobody called``
====== ==================================================================================================
"""

from __future__ import annotations

import base64
import os
import socket
import sys
import time
from datetime import timedelta

import msgspec
import torch.distributed as dist

from nbdist.channel.process_watch import started_at
from nbdist.channel.secret import Secret
from nbdist.ids import new_incarnation
from nbdist.rpc.world import meeting
from nbdist.rpc.world.roster import _KEY, _Document
from nbdist.wire.messages import VERSION, Record

NOBODY = 65534
PATIENCE = 60.0
"""Seconds to wait for a store, or for a list of members in it."""


def become_nobody() -> None:
    """Give up the rights of root, where this program has them; torch is imported by then."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


class Stranger:
    """Somebody who knows the port of a store."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._secret = Secret(b"a secret of the stranger's own", shared_off_host=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._kept = ""

    def keys(self) -> str:
        store = self._store()
        for rank in range(3):
            for key in (f"default_pg/0//{rank}", f"default_pg/0//cpu//rank_{rank}", f"0/{rank}", f"worker{rank}"):
                store.set(key, b"\x80\x04N.")
                store.set(f"nbdist/{key}", b"\x80\x04N.")
        store.add("init/", 1)
        store.add("store_based_barrier_key:1", 1)
        return "written"

    def forge(self) -> str:
        while True:
            text, document = self._document()
            theirs = (document.gathering or document.formed)[0]
            if self._put(text, _Document(formed=[theirs, self._like(theirs)])):  # else it has changed meanwhile
                return "forged"

    def _like(self, record: bytes) -> bytes:
        """Return a sealed record of a worker1 at the stranger's address, which is otherwise like another's."""
        _, inner = msgspec.msgpack.decode(record[32:], type=tuple[int, bytes])
        member = msgspec.msgpack.decode(inner, type=Record)
        own = msgspec.structs.replace(
            member,
            name="worker1",
            id=1,
            incarnation=new_incarnation(),
            addresses=[f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"],
            pid=os.getpid(),
            started=started_at(os.getpid()),
        )
        return self._secret.sign(msgspec.msgpack.encode((VERSION, msgspec.msgpack.encode(own))))

    def keep(self) -> str:
        self._kept, _ = self._document()
        return "kept"

    def replay(self) -> str:
        store = meeting.prefixed(self._store())
        for _ in range(20):
            present = self._document()[0]
            store.compare_set(_KEY, present, self._kept)
            time.sleep(0.01)
        return "replayed"

    def calls(self) -> str:
        try:
            self._listener.accept()
        except BlockingIOError:
            return "nobody called"
        return "somebody called"

    def _put(self, before: str, document: _Document) -> bool:
        """Put a list of members in place of the one from before; return whether that was still there."""
        text = base64.b64encode(msgspec.msgpack.encode(document)).decode()
        return meeting.prefixed(self._store()).compare_set(_KEY, before, text).decode() == text

    def _document(self) -> tuple[str, _Document]:
        """Wait for a list of members, and return it, as text and decoded."""
        store, deadline = meeting.prefixed(self._store()), time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            text = store.compare_set(_KEY, "", "").decode()
            if text:
                return text, msgspec.msgpack.decode(base64.b64decode(text), type=_Document)
            time.sleep(0.002)
        raise TimeoutError("there is no list of members")

    def _store(self) -> dist.TCPStore:
        limit = timedelta(seconds=PATIENCE)
        return dist.TCPStore("127.0.0.1", self._port, None, False, limit, wait_for_workers=False)


def main() -> None:
    become_nobody()
    stranger = Stranger(int(sys.argv[1]))
    print("here", flush=True)
    for line in sys.stdin:
        print(getattr(stranger, line.strip())(), flush=True)


if __name__ == "__main__":
    main()
