"""Completes options and workers in the lines of magics, and the workers' names in code for workers.

Names come from the kernel of the first target worker if it answers within 0.2 s. If it is busy, they are the names that
it sent after its last cell: completion never waits for a worker that computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.examination.imported_files import noted
from nbdist.cluster.jupyter.versions import Completions
from nbdist.cluster.spec import OPTIONS
from nbdist.magics.lines import READERS
from nbdist.magics.place import RemoteCode, find_remote_code

_VALUES = {each.flags[-1].removeprefix("--"): each.known_values for each in OPTIONS.values() if each.known_values}
_VALUE = re.compile(rf".*\s--({'|'.join(_VALUES)})[ =]\s*[\w.-]*")
_MAGIC_LINE = re.compile(r"\s*(%%?\w+)\b")
# A call whose first argument, a worker's name, is being typed at the cursor.
_CALLED = re.compile(
    r"\b(?:rpc_sync|rpc_async|remote|RemoteModule|get_worker_info)"
    r"\(\s*(?:(?:to|remote_device|worker_name)\s*=\s*)?[\"']([\w.-]*)$"
)
_MAGIC = re.compile(r"\s*%+\w*")
_WORD = re.compile(r"[^\s,=\[]*$")
_NAME = re.compile(r"\w*$")


def complete(shell: Any, text: str, cursor: int) -> Completions:
    """Return the completions at a place in the text of a cell of ``shell``; ``cursor`` counts characters.

    The result is empty where the text is not for this completer; IPython then completes alone.
    """
    before = text[:cursor]
    # First: also in code for workers, where no worker need be asked for the workers' names.
    if (called := _CALLED.search(before)) is not None and Cluster.current is not None:
        names = [name for name in [*_workers(), Cluster.current.driver] if name.startswith(called[1])]
        return Completions(names, called[1], "worker", alone=True)
    if (place := find_remote_code(text, cursor)) is not None:
        return _remote_code(place)
    line = before.rpartition("\n")[2]
    asked = _MAGIC_LINE.match(line)
    if asked is None or (reader := READERS.get(asked[1])) is None:
        return Completions()
    magic, options = asked[1], reader.options
    if reader.takes_targets:
        words = [*_variables(shell, magic), *_workers(), "all", *options]
        return _words(line, words, alone=magic.startswith("%%") or line.rpartition(" ")[2].startswith("-"))
    value = _VALUE.fullmatch(line)
    return _words(line, _VALUES[value[1]] if value is not None else options)


def _variables(shell: Any, magic: str) -> list[str]:
    if magic == "%dist_reload":
        return sorted(noted)
    if magic == "%dist_push":
        hidden = shell.user_ns_hidden
        return [name for name in list(shell.user_ns) if not name.startswith("_") and name not in hidden]
    if magic in ("%dist_pull", "%dist_diff", "%dist_compare") and Cluster.current is not None:
        return sorted({name for worker in Cluster.current.workers for name in worker.names})
    return []


def _words(before: str, words: Iterable[str], *, alone: bool = True) -> Completions:
    """Complete the last word of ``before``; with ``alone``, IPython adds no completions of its own."""
    begun = _WORD.search(before)[0]  # type: ignore[index]
    found = [word for word in words if word.startswith(begun)]
    if not found or _MAGIC.fullmatch(before):  # the magic's own name is not complete yet
        return Completions()
    return Completions(found, begun, "magic", alone)


def _remote_code(place: RemoteCode) -> Completions:
    if (worker := place.first_target()) is None:
        return Completions()
    code, cursor = place.code, place.cursor
    if (found := place.ask(worker, "complete_request")) is not None:
        matches = found["matches"]
        fragment = code[found["cursor_start"] : cursor] if found["cursor_end"] >= cursor else ""
    else:
        # The worker is busy or silent: complete the names that it sent after its last cell.
        fragment = _NAME.search(code[:cursor])[0]  # type: ignore[index]
        # Those names are variables, and none is an attribute of what stands before the dot.
        attribute = code[: cursor - len(fragment)].endswith(".")
        matches = [] if attribute else [name for name in worker.names if name.startswith(fragment)]
    return Completions(matches, fragment, "instance", alone=True)


def _workers() -> list[str]:
    return Cluster.current.names if Cluster.current is not None else []
