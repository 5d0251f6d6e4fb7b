"""Parses a target, which names workers: ``0``, ``0,2``, ``[0-2]``, ``0:2``, ``::2``, ``-1``, ``all``, ``worker1``.

One parser reads the notations of several notebook tools, and never evaluates the text. A target that names no worker of
the cluster is an error that lists the workers: a cell must not run on fewer workers than its author meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdist.errors import UnknownWorker, UsageError

_ALL = ("", "all", "*", ":")
_BRACKETS = re.compile(r"\s*(\[[^\[\]]*\]|[^\[\],]*)(\s*,\s*(\[[^\[\]]*\]|[^\[\],]*))*\s*")
_NUMBER = re.compile(r"[+-]?[0-9]+")
_RANGE = re.compile(r"([0-9]+)\s*-\s*([0-9]+)")
_SLICE = re.compile(r"([+-]?[0-9]+)?\s*:\s*([+-]?[0-9]+)?\s*(?::\s*([+-]?[0-9]+)?)?")
_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)


def parse_targets(text: str, names: Sequence[str]) -> list[int]:
    """Return the ranks that ``text`` names among the workers called ``names``, each once, in the order given.

    ::

        0   -1        one rank, from the end if negative
        0,2  [0,1]    several
        0-2  [0-2]    from 0 to 2, both included
        0:2  ::2      as Python slices a list; a bound beyond the list is an error
        worker1       by name
        [0-1],worker3 several of these
        all  :  *     every worker, as does an empty text

    Raises:
        UsageError: The text cannot be parsed, or names no worker.
        UnknownWorker: The cluster has no such worker.

    Example:
        >>> parse_targets("-1,0-1", ["worker0", "worker1", "worker2"])
        [2, 0, 1]
    """
    if not _BRACKETS.fullmatch(text):
        raise UsageError(f"the brackets of {text.strip()!r} do not match; write [0,2] or [0-2]")
    inner = text.replace("[", "").replace("]", "").strip()
    if text.strip() == "[]":
        raise UsageError("[] names no worker; write a rank, such as 0, or all")
    if inner in _ALL:
        return list(range(len(names)))
    ranks = (rank for part in inner.split(",") for rank in _parse_one(part.strip(), text.strip(), names))
    return list(dict.fromkeys(ranks))


def means_all(targets: object) -> bool:
    """Return whether targets mean all workers, also those that join later: None, or a text such as ``all`` or ``:``."""
    if not isinstance(targets, str):
        return targets is None
    if targets.strip() == "[]" or not _BRACKETS.fullmatch(targets):
        return False
    return targets.replace("[", "").replace("]", "").strip() in _ALL


def means_one(targets: object) -> bool:
    """Return whether targets are one rank or one name, and not a list, a range or a slice, even of one worker."""
    text = targets.strip() if isinstance(targets, str) else ""
    return isinstance(targets, int) or (text != "all" and bool(_NUMBER.fullmatch(text) or _NAME.fullmatch(text)))


def _parse_one(part: str, text: str, names: Sequence[str]) -> Sequence[int]:
    """Return the ranks that ``part`` names, a piece between commas of the target ``text``."""
    if part in _ALL and part:
        return range(len(names))
    if _NUMBER.fullmatch(part):
        return [_rank(int(part), names)]
    if match := _RANGE.fullmatch(part):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise UsageError(f"the range {part!r} counts downwards; write the lower rank first: {last}-{first}")
        return range(_rank(first, names), _rank(last, names) + 1)
    if match := _SLICE.fullmatch(part):
        return _slice(part, match, names)
    if part in names:
        return [names.index(part)]
    if _NAME.fullmatch(part):
        raise UnknownWorker(f"there is no worker {part!r}; {_which_workers(names)}")
    raise UsageError(
        f"{text!r} is not a target: write a rank (0, -1), several (0,2), a range (0-2 with its end, 0:2 without), "
        "a name, or all"
    )


def _slice(part: str, match: re.Match[str], names: Sequence[str]) -> Sequence[int]:
    start, stop, step = (int(group) if group is not None else None for group in match.groups())
    if step == 0:
        raise UsageError(f"the step of the slice {part!r} must not be 0")
    for bound in (start, stop):
        # Python would cut the bound: a cell must not run on fewer workers than its author meant.
        if bound is not None and not -len(names) <= bound <= len(names):
            raise UnknownWorker(f"{part!r} goes beyond the last worker; {_which_workers(names)}")
    if not (ranks := range(len(names))[start:stop:step]):
        raise UsageError(f"the slice {part!r} names no worker; {_which_workers(names)}")
    return ranks


def _rank(number: int, names: Sequence[str]) -> int:
    """Return a rank counted from 0; a negative number counts from the end."""
    if not -len(names) <= number < len(names):
        raise UnknownWorker(f"there is no worker with rank {number}; {_which_workers(names)}")
    return number % len(names)


def _which_workers(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"there is {names[0]} alone, with rank 0"
    shown = f"{names[0]} … {names[-1]}" if len(names) > 4 else ", ".join(names)
    return f"there are {shown}, with ranks 0 to {len(names) - 1}"
