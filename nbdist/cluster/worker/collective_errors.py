"""Turns torch's error of a failed collective into WorkerLost or GroupError, where the error leaves the user's code.

There are two such places: the end of a cell (`install`), and the end of a function that runs for a call
(`raise_translated`). Inside the user's own ``try``, the error stays torch's.

At the end of a cell, an interrupt also gets a text that says where it has stopped the cell. In a cell with ``await``
the interrupt is a CancelledError.
"""

from __future__ import annotations

import sys
import time
from asyncio import CancelledError
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nbdist.cluster.whereabouts import say_where
from nbdist.cluster.worker import gpu, nccl, wrapped_models
from nbdist.cluster.worker.collectives import Collectives
from nbdist.code_places import is_torchs
from nbdist.errors import GroupError, NbdistError, WorkerLost


def raise_translated(collectives: Collectives, error: RuntimeError | ValueError) -> None:
    """Raise the error that says why a collective failed, if nbdist knows; else return."""
    _explain(error)
    if (said := collectives.translate(error)) is not None:
        raise said from (None if isinstance(said, GroupError) else error)


def _explain(error: BaseException | None) -> None:
    gpu.explain(error)
    wrapped_models.explain(error)


def install(shell: Any, collectives: Collectives) -> None:
    """Make the cells of a shell fail with WorkerLost or GroupError if that is the reason for torch's error.

    Replaces two methods of the shell: ``showtraceback``, which shows the error and sends it to the notebook, and
    ``run_code``, whose result keeps it.
    """
    plain_run, plain_show = shell.run_code, shell.showtraceback
    translated: tuple[Any, Any] = None, None  # torch's error, and the error in its place
    began = 0.0

    async def run_code(code: Any, result: Any = None, **options: Any) -> Any:
        nonlocal began, translated
        began = time.monotonic()
        try:
            failed = await plain_run(code, result, **options)
        except KeyboardInterrupt as error:
            # Where C++ code ends with an error, Python may raise the interrupt only here, in IPython's code.
            if error.__context__ is None:
                raise
            if result is not None:
                result.error_in_exec = error
            error.__traceback__ = error.__context__.__traceback__
            shell.showtraceback((type(error), error, error.__traceback__), running_compiled_code=True)
            failed = True
        if result is not None and translated[0] is not None and result.error_in_exec is translated[0]:
            result.error_in_exec = translated[1]
        translated = None, None
        return failed

    def showtraceback(exc_tuple: Any = None, *args: Any, **options: Any) -> Any:
        nonlocal translated
        if options.get("running_compiled_code"):
            error = exc_tuple[1] if exc_tuple is not None else sys.exception()
            _explain(error)
            said = collectives.translate(error)  # first: it waits until this process knows what has ended them
            if error is not None and (nccl.is_interrupt(error) or has_lost_interrupt(error, said)):
                translated = error, KeyboardInterrupt()
                translated[1].__context__, translated[1].__suppress_context__ = error, True
                error, said = translated[1].with_traceback(error.__traceback__), None
            if error is not None and type(error) in (KeyboardInterrupt, CancelledError):
                exc_tuple = _say_where_stopped(error, collectives)
            if error is not None and said is not None:
                translated = error, said
                said.__traceback__ = _up_to_torch(error.__traceback__)
                return _show_without_cause(plain_show, said, *args, **options)
        return plain_show(exc_tuple, *args, **options)

    def has_lost_interrupt(error: BaseException, said: NbdistError | None) -> bool:
        # In a backward pass inside of another one, torch makes a text of the inner error. Python then raises the
        # interrupt in torch's code, which clears it.
        handled = isinstance(error.__context__, KeyboardInterrupt)  # and that code has used the group afterwards
        return isinstance(said, GroupError) and not handled and collectives.was_broken_off(began)

    shell.run_code, shell.showtraceback = run_code, showtraceback


def _show_without_cause(show: Callable[..., Any], said: WorkerLost | GroupError, *args: Any, **options: Any) -> Any:
    """Show ``said`` by ``show``, the shell's own `showtraceback`, with the first line of torch's error below it."""
    # torch's frames are left out: every worker of a group would show its own copy of these frames, which say nothing
    # about the user's code. The error object keeps torch's error as its cause.
    said.__suppress_context__ = True
    cause, said.__cause__ = said.__cause__, None
    if cause is not None:
        said.add_note(f"torch's error was {type(cause).__name__}: {str(cause).partition(chr(10))[0]}")
    try:
        return show((type(said), said, said.__traceback__), *args, **options)
    finally:
        said.__cause__ = cause


def _say_where_stopped(
    error: BaseException, collectives: Collectives
) -> tuple[type[BaseException], BaseException, Any]:
    """Give an interrupt the text "stopped in ...", unless it has a text; return it as `sys.exc_info` does."""
    of_torch = collectives.translate(error.__context__) is not None
    # If Python raises the interrupt in a ``with`` on torch's error's way up, that error knows the call that waited.
    tb = error.__context__.__traceback__ if of_torch and error.__context__ is not None else error.__traceback__
    if not error.args and (where := say_where(tb) or say_where(error.__traceback__)):
        error.args = (f"stopped in {where}",)
    # The interrupt has caused torch's error: IPython shows neither that error nor torch's frames.
    if of_torch:
        error.__suppress_context__ = True
        error.__traceback__ = _up_to_torch(error.__traceback__)
    return type(error), error, error.__traceback__


def _up_to_torch(tb: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback before the first frame of torch."""
    if tb is None or is_torchs(tb.tb_frame.f_code.co_filename):
        return None
    return TracebackType(_up_to_torch(tb.tb_next), tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
