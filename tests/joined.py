"""Clusters whose workers join from hosts that `other_hosts` made, for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from other_hosts import Host, wait_for_file

import nbdist

__all__ = ["cluster_on", "until"]


@contextlib.contextmanager
def cluster_on(others: Sequence[Host], address: str, folder: Path, **options: Any) -> Iterator[nbdist.Cluster]:
    """A cluster with a worker on each of these hosts, which reach this machine at ``address``."""
    file = folder / "invitation.json"

    def start() -> None:
        text = wait_for_file(file)
        for other in others:
            other.start("-m", "nbdist", "worker", "--connect", "-", stdin=text)

    threading.Thread(target=start, daemon=True).start()
    with nbdist.Cluster(len(others), launcher="join", host=address, invitation=str(file), **options) as cluster:
        yield cluster


def until(happened: Callable[[], object], within: float = 20.0) -> None:
    """Wait until ``happened()`` is true; fail after ``within`` seconds."""
    deadline = time.monotonic() + within
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
