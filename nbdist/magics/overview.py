"""Lists the magics by the question that a user has: what `%dist?` shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["overview"]

_BY_QUESTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("How do I start and end workers?", ("%dist_init", "%dist_restart", "%dist_shutdown", "%dist_reset")),
    ("How do I run code on workers?", ("%%remote", "%remote", "%%distributed", "%%rank", "%dist_mode", "%sync")),
    ("How do values get there and back?", ("%dist_push", "%dist_pull", "%remote")),
    ("It hangs: where does each worker stand?", ("%dist_panel", "%dist_status", "%dist_debug", "%dist_restart")),
    ("It is slow: what takes the time?", ("%%timeline", "%%watch", "%dist_panel")),
    ("It runs out of memory: what is held, and by whom?", ("%dist_memory", "%dist_free")),
    ("It is wrong, or NaN: where does it begin?", ("%%watch", "%dist_diff")),
    ("It failed: what did a worker say?", ("%dist_log",)),
)
_HINTS = {
    "It hangs: where does each worker stand?": "Stop interrupts what the cell runs; -t SECONDS does it by itself.",
    "It failed: what did a worker say?": "`%debug` in a cell of `%%remote worker1` looks around where worker1 failed.",
}
_OTHERS = "And:"


def overview(said: Mapping[str, str]) -> str:
    """Return the magics by question, one a line with the first line of its docstring.

    ``said`` has the docstring of each magic by its name, such as ``%%watch``. A magic of no question comes last.
    """
    grouped = {name for _, names in _BY_QUESTION for name in names}
    groups = [*_BY_QUESTION, (_OTHERS, tuple(sorted(set(said) - grouped - {"%dist"})))]
    width = max(map(len, said), default=0)
    lines = ["The magics of nbdist, by question; a magic and `?`, such as %dist_init?, says how it is written."]
    for question, names in groups:
        found = [name for name in names if name in said]
        hint = _HINTS.get(question)
        if found or hint:
            lines += ["", question]
            lines += [f"  {name:<{width}}  {said[name].strip().partition(chr(10))[0]}" for name in found]
            lines += [f"  {hint}"] if hint else []
    return "\n".join(lines)
