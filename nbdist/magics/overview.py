"""Makes the text of `%dist`: all magics, grouped by the question that they answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nbdist.columns import aligned

BY_QUESTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "How do I start and end workers?",
        ("%dist_init", "%dist_invite", "%dist_restart", "%dist_shutdown", "%dist_reset"),
    ),
    ("How do I run code on workers?", ("%%remote", "%remote", "%%distributed", "%%rank", "%dist_mode", "%sync")),
    ("How do values get there and back?", ("%dist_push", "%dist_pull", "%remote")),
    ("It hangs: where does each worker stand?", ("%dist_stacks", "%dist_panel", "%dist_status", "%dist_restart")),
    ("It is slow: what takes the time?", ("%%timeline", "%%watch", "%dist_panel", "%dist_doctor")),
    ("It runs out of memory: what is held, and by whom?", ("%dist_memory", "%dist_free")),
    ("It is wrong, or NaN: where does it begin?", ("%%watch", "%dist_diff", "%dist_compare")),
    ("It failed: what did a worker say?", ("%dist_debug", "%dist_break", "%dist_log")),
    ("I edited a file: how do workers get the new code?", ("%dist_reload", "%dist_diff")),
)
# A line below the magics of a question.
_HINTS = {
    "It hangs: where does each worker stand?": "The stop button interrupts a cell; -t SECONDS does so after that time.",
    "I edited a file: how do workers get the new code?": "With IPython's %autoreload, workers follow by themselves.",
    "It failed: what did a worker say?": "`breakpoint()` on a worker, in a cell or a call, opens pdb in the input box.",
}
_OTHERS = "And:"  # the heading of the magics that belong to no question


def overview(said: Mapping[str, str]) -> str:
    """Return the magics by question, one in a line, each with the first line of its docstring.

    ``said`` has the docstring of each magic by the magic's name, such as ``%%watch``. Magics without a question come
    last.
    """
    grouped = {name for _, names in BY_QUESTION for name in names}
    groups = [*BY_QUESTION, (_OTHERS, tuple(sorted(set(said) - grouped - {"%dist"})))]
    told = aligned([(name, text.strip().partition("\n")[0]) for name, text in said.items()])
    line_of = dict(zip(said, told, strict=True))
    lines = ["The magics of nbdist, by question. A question mark shows a magic's options, as in %dist_init?."]
    for question, names in groups:
        found = [name for name in names if name in said]
        hint = _HINTS.get(question)
        if found or hint:
            lines += ["", question]
            lines += [f"  {line_of[name]}" for name in found]
            lines += [f"  {hint}"] if hint else []
    return "\n".join(lines)
