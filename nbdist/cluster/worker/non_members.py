"""Warns of a collective in a process group that this worker is not in, at the user's line: torch names its own."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from nbdist.cluster.whereabouts import say_place
from nbdist.torch_private import take_over_warning_of_group

_shown: dict[Any, Any] = {}  # the lines of which Python has warned: as a rule, once of each


def follow(worker: str) -> None:
    """Make torch call this module where it would warn. ``worker`` is this worker's name."""

    def warn(operation: str) -> None:
        # The user's line; `stacklevel` would count torch's frames.
        call, line = say_place(sys._getframe(1)) or (f"dist.{operation}()", "nbdist")
        file, _, number = line.rpartition(":")
        text = f"{worker} is not in the group of this {call}, and takes no part in it"
        warnings.warn_explicit(text, UserWarning, file or line, int(number or 0), registry=_shown)

    take_over_warning_of_group(warn)
