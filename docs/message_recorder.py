"""Writes down the messages of an instrumented copy of nbdist; `make_messages.py` puts this file into that copy."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "recorded")
_MOST = 20
"""The texts of one message that a process writes down: more would not make a better example."""

_written: Counter[tuple[str, str]] = Counter()


def record(kind: str, template: str, text: str) -> str:
    """Write down a message with its place, the module and the function that made it, and return its text.

    Each process has a file of its own. A process that can open no file, as some tests want it, writes nothing.
    """
    if _written[kind, template] < _MOST:
        _written[kind, template] += 1
        frame = sys._getframe(1)
        place = f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
        line = json.dumps({"kind": kind, "template": template, "place": place, "text": text}) + "\n"
        try:
            file = os.open(os.path.join(FOLDER, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
        except OSError:
            pass
    return text
