"""Notes the root of each collective that has one: the member from which, or to which, all values go.

torch's flight recorder does not know the root. All functions of ``torch.distributed`` with a ``src`` or ``dst`` look up
its rank in the group; here this is noted, just before torch issues the collective. A broadcast that C++ issues, such as
DDP's, is not seen.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any, NamedTuple

from nbdist.torch_private import watch_roots

_FUNCTIONS = frozenset(("broadcast", "scatter", "reduce", "gather"))  # also those of objects call these
_KEPT = 2000  # torch's recorder keeps as many collectives

_noted: deque[tuple[tuple[str, int, str], Root]] = deque(maxlen=_KEPT)


class Root(NamedTuple):
    """The root of a collective that was about to be issued."""

    rank: int  # in the group
    at: int  # by `time.time_ns`


def follow() -> None:
    """Begin to note. Call once, before the first group."""
    watch_roots(_note)


def forget() -> None:
    """Drop what was noted: the process group forms anew, and its collectives are numbered from 1 again."""
    _noted.clear()


def noted() -> dict[tuple[str, int, str], Root]:
    """Return the last root of each collective, by the group's name, the number, and the kind.

    If a group has two backends, its number may be another collective's, which was issued before the root was noted.
    """
    return dict(list(_noted))  # a copy: the main thread may call more


def _note(function: str, group: Any, rank: int) -> None:
    if function in _FUNCTIONS:
        # An error would be the user's: of a group that the worker is not in, or whose backend numbers nothing.
        with contextlib.suppress(Exception):
            key = group.group_name, group._get_sequence_number_for_group() + 1, function
            _noted.append((key, Root(rank, time.time_ns())))
