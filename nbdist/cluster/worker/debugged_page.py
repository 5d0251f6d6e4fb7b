"""`DebuggedPage`: names a worker's cells as JupyterLab does, whose debugger is turned to the worker."""

from __future__ import annotations

import threading
from typing import Any

from ipykernel.compiler import get_file_name


class DebuggedPage:
    """Names a cell's code after the whole text of the page's cell, after which the page names its breakpoints."""

    METHODS = ("follow", "leave")

    def __init__(self, shell: Any) -> None:
        self._compiler = shell.compile
        self._text = ""

    def follow(self, text: str) -> None:
        """Name code that stands at the end of this text after it. Further calls replace the text."""
        self._text = text
        self._compiler.get_code_name = self._name  # hides the class's own method
        # debugpy stops all threads that it traces. Those of the agent must run, or the worker would seem to be dead.
        vars(threading)["Thread"].pydev_do_not_trace = True
        vars(threading.main_thread())["pydev_do_not_trace"] = False

    def leave(self) -> None:
        """Name code as without a debugger."""
        vars(self._compiler).pop("get_code_name", None)

    def _name(self, raw: str, transformed: str, number: int) -> str:
        if raw.strip() and self._text.rstrip().endswith(raw.strip()):
            return str(get_file_name(self._text))
        return str(type(self._compiler).get_code_name(self._compiler, raw, transformed, number))
