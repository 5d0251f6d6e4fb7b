"""Strangers, one after the other, at the TCP ports of a cluster: ``stranger_crowd.py``, a program of its own.

It reads one JSON object: ``doors`` (each with ``address``, ``key``, ``socket``, ``message`` and ``recorded``),
``count``, ``per_second`` and ``open``, the most connections that it holds open at a time. At the end it prints one: the
strangers of each kind, and how many of the slow ones the doors have turned away.

Each stranger comes once, to the next door, and is of the next of these kinds:

============ ===============================================================================================
kind         what it does
============ ===============================================================================================
keyless      speaks ZeroMQ without any key, and sends a call, as an agent would
wrong key    knows the public key of the door, has a key pair of its own, and sends a call
foreign key  is a member of another cluster, and sends a call
garbage      sends random bytes
broken       begins as ZeroMQ with CURVE does, and goes on with random bytes
replay       sends what a member sent to this door once, from the first byte of its connection to the last
oversized    begins as ZeroMQ with CURVE does, then announces a frame of 2^62 bytes and sends a part of it
slow         sends a byte now and then and reads nothing, until its connection is closed
============ ===============================================================================================

Strangers that the door does not turn away stay open until too many are. The crowd must not be what makes members slow,
so it comes at a given rate and gives way to all other processes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import Counter, deque
from itertools import count as numbers
from typing import Any

import zmq

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE".ljust(64, b"\0")
"""How ZeroMQ begins a connection with CURVE."""
KINDS = ("keyless", "wrong key", "foreign key", "garbage", "broken", "replay", "oversized", "slow")


class Crowd:
    """Strangers that come, and those of them that are still there."""

    def __init__(self, most_open: int) -> None:
        self._context = zmq.Context()
        self._context.max_sockets = 4 * most_open
        self._sockets: deque[zmq.Socket[bytes]] = deque()
        self._raw: deque[socket.socket] = deque()
        self._slow: deque[socket.socket] = deque()
        self._most = most_open // 3
        self.came: Counter[str] = Counter()

    def come(self, kind: str, door: dict[str, str]) -> None:
        """Have one stranger come to a door."""
        self.came[kind] += 1
        if kind in ("keyless", "wrong key", "foreign key"):
            self._speak(kind, door)
            return
        host, _, port = door["address"].removeprefix("tcp://").rpartition(":")
        raw = socket.create_connection((host, int(port)), timeout=10)
        raw.setblocking(False)
        with contextlib.suppress(OSError):  # the door has closed, or reads no more
            raw.sendall(
                {
                    "garbage": os.urandom(300),
                    "broken": GREETING + os.urandom(300),
                    "replay": base64.b64decode(door["recorded"]),
                    "oversized": GREETING + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(100_000),
                    "slow": GREETING[:1],
                }[kind]
            )
        self._keep(raw, self._slow if kind == "slow" else self._raw)

    def _speak(self, kind: str, door: dict[str, str]) -> None:
        """Come with ZeroMQ, and send a call."""
        sock = self._context.socket(getattr(zmq, door["socket"]))
        sock.linger = 0
        sock.reconnect_ivl = -1  # each stranger comes once
        if kind != "keyless":
            sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
            sock.curve_serverkey = door["key"].encode() if kind == "wrong key" else zmq.curve_keypair()[0]
        sock.connect(door["address"])
        with contextlib.suppress(zmq.Again):
            sock.send(base64.b64decode(door["message"]), zmq.NOBLOCK)
        self._sockets.append(sock)
        if len(self._sockets) > self._most:
            self._sockets.popleft().close(0)

    def _keep(self, raw: socket.socket, among: deque[socket.socket]) -> None:
        """Keep a connection open, and close the oldest one if there are too many."""
        among.append(raw)
        if len(among) > self._most:
            among.popleft().close()

    def dribble(self) -> None:
        """Have each slow stranger send one more byte, and forget those that were turned away."""
        for raw in list(self._slow):
            try:
                raw.send(b"\0")
            except BlockingIOError:
                pass
            except OSError:
                self._slow.remove(raw)
                raw.close()
                self.came["slow, turned away"] += 1

    def drop_closed(self) -> None:
        """Close the connections that the doors have closed."""
        poller = select.poll()
        by_number = {raw.fileno(): raw for raw in self._raw}
        for number in by_number:
            poller.register(number, select.POLLIN | select.POLLRDHUP)
        for number, events in poller.poll(0):
            if events & ~select.POLLIN:
                self._raw.remove(by_number[number])
                by_number[number].close()

    def go(self) -> None:
        """Close all connections."""
        self._context.destroy(0)
        for raw in (*self._raw, *self._slow):
            raw.close()


def main() -> None:
    os.nice(19)
    wanted: dict[str, Any] = json.loads(sys.stdin.read())
    crowd, began = Crowd(wanted["open"]), time.monotonic()
    doors = wanted["doors"]
    for number in numbers():
        if number == wanted["count"]:
            break
        crowd.come(KINDS[number % len(KINDS)], doors[number // len(KINDS) % len(doors)])
        if number % 50 == 49:
            crowd.dribble()
            crowd.drop_closed()
        time.sleep(max(0.0, began + number / wanted["per_second"] - time.monotonic()))
    crowd.go()
    print(json.dumps(crowd.came | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
