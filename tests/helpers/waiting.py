"""Waits for what no event tells: looks until something is so, and fails where it does not come about in time."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 60.0
"""Seconds, for each wait that names no other limit."""
MARK = "open(f'{folder}/{rank}', 'w').close()\n"
"""A line of a cell: says, in the cluster's variable ``folder``, that a worker has come to the line below."""


def wait_until(look: Callable[[], Any], what: object = None, *, equals: Any = None, within: float = LIMIT) -> Any:
    """Call ``look`` until it returns what ``equals``, or if that is None, anything true; return what it returned.

    After ``within`` seconds, the error says that ``what`` did not come, and what was there in its place.
    """
    deadline = time.monotonic() + within
    while not (seen := look()) if equals is None else (seen := look()) != equals:
        expected = "" if equals is None else f", not {equals!r}"
        assert time.monotonic() < deadline, f"{what or look} did not come in {within:g} s: it is {seen!r}{expected}"
        time.sleep(0.01)
    return seen


def wait_for_error(cell: Any, within: float = LIMIT) -> BaseException | None:
    """Wait until a cell of a `Cluster` has ended; return its error, if it has one."""
    wait_until(lambda: cell.done, cell, within=within)
    return cell.error()


def wait_for_file(path: Path) -> bytes:
    """Wait until a file is there; return its contents."""
    wait_until(path.exists, path)
    return path.read_bytes()


def wait_for_marks(folder: Path, *names: object, then: float = 0.3) -> None:
    """Wait until these workers have left files, as by `MARK`, and ``then`` seconds until they wait in the next line."""
    wait_until(lambda: {*map(str, names)}.issubset(os.listdir(folder)), f"one of the marks {names}")
    time.sleep(then)  # nothing tells that a worker has come from the mark into its wait
