"""The origin of a node: which module, and which line of the user's code, made it.

`nbdist.autograd.graph.noting` puts the note into ``node.metadata``, the dictionary in which torch's anomaly mode keeps
its own notes, so the note lives as long as the node.

Torch's function modes do not see a user's ``torch.autograd.Function``, so its node has no note. `origin_of` returns
the line of its backward instead.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from typing import Any, NamedTuple

from nbdist.autograd.graph.edges import Node
from nbdist.code_places import NBDIST, TORCH, shown_name
from nbdist.thread_frames import outwards

ORIGIN_KEY = "nbdist.origin"  # in ``node.metadata``: its `NodeOrigin`; None if the node was made where nothing is noted
# Frames of these folders and files are skipped on the way to the line that made a node. Those of installed packages are
# not, though `nbdist.code_places.is_users` does not count them as the user's: a line inside of transformers tells the
# operations of a model apart, and the user's one call of the model does not. Besides, every operation looks at its
# frames, and one comparison is faster than that function.
_FRAMES_SKIPPED = (
    TORCH,
    NBDIST,
    threading.__file__,  # the outermost frame of a thread that runs one of torch's functions for a call
)


class NodeOrigin(NamedTuple):
    """The place in the user's code that made a node; all fields are empty if it is not known."""

    module: str | None = None  # whose forward made it, by its path from the class of the outermost module: `Net.fc1`
    file: str = ""  # in a graph that travels, `shown_name` of it, as only this worker knows a cell's number
    number: int = 0
    text: str = ""  # of the line, if its source is known on the worker that made the node; or why there is no line

    @property
    def line(self) -> str | None:
        """The place as text, ``model.py:12: return x.exp()``, without the code if that is unknown; or None."""
        if not self.file:
            return self.text or None
        where = f"{shown_name(self.file)}:{self.number}"
        text = self.text or linecache.getline(self.file, self.number).strip()
        return f"{where}: {text}" if text else where


def origin_of(node: Node) -> NodeOrigin:
    """Return the noted origin of a node; for a user's own Function, the line of its ``backward``; else an empty one."""
    found: NodeOrigin | None = node.metadata.get(ORIGIN_KEY)
    if found is None:
        backward: Any = getattr(getattr(node, "_forward_cls", None), "backward", None)
        code = getattr(inspect.unwrap(backward) if backward is not None else None, "__code__", None)
        if code is not None and not code.co_filename.startswith(_FRAMES_SKIPPED):
            file, number = code.co_filename, code.co_firstlineno
            while (text := linecache.getline(file, number).strip()).startswith("@"):  # a decorator
                number += 1
            return NodeOrigin(None, shown_name(file) if text else file, number, text)
    if found is not None and found.text:  # else the notebook may know the line
        return found._replace(file=shown_name(found.file))
    return found or NodeOrigin()


def users_line() -> tuple[str, int, str]:
    """Return the file, number and text of the line at which the calling thread is, outside of nbdist and torch."""
    for frame in outwards(sys._getframe(1)):
        file, number = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(_FRAMES_SKIPPED):
            # With the globals, by which linecache also finds the source of a module that was loaded from no file.
            return file, number, linecache.getline(file, number, frame.f_globals).strip()
    return "", 0, ""
