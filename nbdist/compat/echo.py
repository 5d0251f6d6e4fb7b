"""Prints the error of a called function on the worker that ran it, on standard error, as torch does.

nbdist itself only sends the error to the caller.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from nbdist import trace


def start() -> None:
    """From now on, print the error of each function that fails here. `nbdist.compat.install` calls this once."""
    trace.subscribe(_print)


def _print(event: str, fields: dict[str, Any]) -> None:
    if event == "call.failed":
        text = f"On {fields['agent']}:\n{fields['error']!r}\n{fields['note']}"
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(text, file=sys.stderr, flush=True)
