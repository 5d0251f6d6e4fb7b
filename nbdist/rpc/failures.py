"""Errors on their way from the worker where they arose to the cell that caused them (G8).

An error travels as itself, with a note that holds the remote traceback, trimmed to the user's frames, and
the worker's name. Where it cannot be pickled, or its class is not to be had on the other side, a
RemoteError with the same text takes its place.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import nbdist
from nbdist.errors import NbdistError, RemoteError
from nbdist.wire import codec
from nbdist.wire.messages import Payload

__all__ = ["Failure", "describe", "on_error", "on_text", "rebuild"]

_OURS = str(Path(nbdist.__file__).parent)
_TORCHS = tuple(str(Path(torch.__file__).parent / package) for package in ("futures", "autograd"))
"""What stands between our frames and the user's."""

_rewriters: list[Callable[[str, str], str]] = []


def on_text(rewrite: Callable[[str, str], str]) -> None:
    """Have ``rewrite(text, worker)`` applied to every remote traceback that leaves or reaches this process."""
    if rewrite not in _rewriters:
        _rewriters.append(rewrite)


_translators: list[Callable[[BaseException, str], BaseException]] = []


def on_error(translate: Callable[[BaseException, str], BaseException]) -> None:
    """Have ``translate(error, worker)`` return what is raised here for each error that arose on another worker."""
    if translate not in _translators:
        _translators.append(translate)


def _rewrite(text: str, worker: str) -> str:
    for rewrite in _rewriters:
        text = rewrite(text, worker)
    return text


Failure = tuple[str, str, str, tuple[bytes, list[bytes]] | None]
"""Class name, text, note, and the encoded error where it can travel."""


def describe(error: BaseException, worker: str, function: str) -> Failure:
    """What to send for ``error``, which arose on ``worker``."""
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    note = f"raised on {worker}, in {function}:\n{_rewrite(_user_traceback(error), worker)}"
    travels = None
    if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt are meant for the process they arose in
        with contextlib.suppress(NbdistError):
            encoded = codec.encode(error, by_value=True)
            travels = msgspec.msgpack.encode(encoded.payload), [bytes(frame) for frame in encoded.frames]
    return name, _text(error), note.rstrip(), travels


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"(its text could not be had: {failed!r})"


def _user_traceback(error: BaseException) -> str:
    described = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    queue: list[Any] = [described]
    while queue:
        part = queue.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        kept = [frame for frame in part.stack if not frame.filename.startswith((_OURS, *_TORCHS))]
        part.stack[:] = kept
        queue += [part.__cause__, part.__context__]
        part.__notes__ = None
    return "".join(described.format())


def rebuild(failure: Failure) -> BaseException:
    """The error to raise on the caller's side."""
    name, text, note, travelled = failure
    error: BaseException = RemoteError(f"{name}: {text}" if text else name)
    if travelled is not None:
        with contextlib.suppress(NbdistError):
            found = codec.decode(msgspec.msgpack.decode(travelled[0], type=Payload), travelled[1])
            if isinstance(found, BaseException):
                error = found
    worker = note.removeprefix("raised on ").partition(",")[0]
    error.add_note(_rewrite(note, worker))
    for translate in _translators:
        error = translate(error, worker)
    return error
