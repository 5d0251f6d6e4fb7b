"""Undoes what was begun if the code that follows fails.

::

    with undone_by(launcher.close):  # the zygote would stay
        launcher.preload(modules)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def undone_by(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call ``undo`` if the block raises anything, Ctrl-C too; the error then goes on."""
    try:
        yield
    except BaseException:
        undo(*arguments)
        raise
