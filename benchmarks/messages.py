"""Counts the messages that the agents of nbdist send. It runs apart from the rounds, whose times it would change."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import Case

_SETTLE = 0.3
"""Seconds after the last operation in which deletions and acknowledgements that go alone are still counted."""

_plain: dict[type, Callable[..., None]] = {}
_sent = itertools.count()


def begin() -> None:
    """Count what this process sends from now on."""
    global _sent
    from nbdist.channel.local_link import LocalLink
    from nbdist.channel.zeromq_links import ZeroMqLink

    sent = _sent = itertools.count()
    for link in (LocalLink, ZeroMqLink):
        plain = _plain[link] = link.send

        def send(self: Any, frames: Any, kind: str, plain: Callable[..., None] = plain) -> None:
            next(sent)  # of a count, which is one step for all threads
            plain(self, frames, kind)

        link.send = send  # type: ignore[method-assign]


def end() -> int:
    """Stop counting; return how many messages this process has sent since `begin`."""
    for link, plain in _plain.items():
        link.send = plain  # type: ignore[attr-defined]
    _plain.clear()
    return next(_sent)


def counter(rpc: Any, workers: Sequence[str]) -> Callable[[Case, int], float]:
    """Return a function that runs a case and returns the messages of all agents for one operation."""

    def count(case: Case, operations: int) -> float:
        for worker in workers:
            rpc.rpc_sync(worker, begin)
        begin()
        case(operations)
        time.sleep(_SETTLE)
        sent: int = end() + sum(rpc.rpc_sync(worker, end) for worker in workers)
        return (sent - len(workers)) / operations  # each worker has counted its answer to `begin`

    return count
