"""Lets objects release, in a forked process, what belongs to their parent."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

_objects: weakref.WeakSet[Any] = weakref.WeakSet()

call_forked = _objects.add
"""Call the method ``forked()`` of an object in each process that is forked while the object lives."""


def _after_fork() -> None:
    for each in list(_objects):
        with contextlib.suppress(Exception):  # whatever it is, the child must release the others
            each.forked()


os.register_at_fork(after_in_child=_after_fork)
