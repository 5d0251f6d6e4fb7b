"""Prints the error of a function that failed for another worker to the standard error of the one that ran it.

torch does that, and people watch for it; nbdist sends the same text to the caller instead.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from nbdist import trace

__all__ = ["start"]


def start() -> None:
    """Print every such error from now on."""
    trace.subscribe(_print)


def _print(event: str, fields: dict[str, Any]) -> None:
    if event == "call.failed":
        text = f"On {fields['agent']}:\n{fields['error']!r}\n{fields['note']}"
        with contextlib.suppress(OSError, ValueError):  # the standard error may be closed
            print(text, file=sys.stderr, flush=True)
