"""Turns torch's error of a collective into WorkerLost, where the error leaves the user's code and a member has died.

There are two such places: the end of a cell, and the end of a function that runs for a call. Inside of the user's own
``try`` the error stays torch's.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

import torch

from nbdist.cluster.collectives import translate
from nbdist.errors import WorkerLost

__all__ = ["install", "raise_translated"]

_TORCHS = os.path.dirname(torch.__file__) + os.sep


def raise_translated(error: RuntimeError) -> None:
    """Raise WorkerLost from torch's error if a dead member is the reason for it; else return."""
    lost = translate(error)
    if lost is not None:
        raise lost from error


def install(shell: Any) -> None:
    """Have cells of a shell fail with WorkerLost where a dead member is the reason for torch's error."""
    plain_run, plain_show = shell.run_code, shell.showtraceback
    translated: tuple[Any, Any] = None, None

    async def run_code(code: Any, result: Any = None, **options: Any) -> Any:
        nonlocal translated
        failed = await plain_run(code, result, **options)
        if result is not None and translated[0] is not None and result.error_in_exec is translated[0]:
            result.error_in_exec = translated[1]
        translated = None, None
        return failed

    def showtraceback(exc_tuple: Any = None, *args: Any, **options: Any) -> Any:
        nonlocal translated
        if options.get("running_compiled_code"):
            error = exc_tuple[1] if exc_tuple is not None else sys.exception()
            lost = translate(error)
            if error is not None and lost is not None:
                translated = error, lost
                lost.__traceback__ = _up_to_torch(error.__traceback__)
                exc_tuple = WorkerLost, lost, lost.__traceback__
        return plain_show(exc_tuple, *args, **options)

    shell.run_code, shell.showtraceback = run_code, showtraceback


def _up_to_torch(tb: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback before torch was entered: the rest is shown with torch's error, the cause."""
    if tb is None or tb.tb_frame.f_code.co_filename.startswith(_TORCHS):
        return None
    return TracebackType(_up_to_torch(tb.tb_next), tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
