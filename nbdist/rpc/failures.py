"""Brings an error from the worker where it arose to the cell that caused it.

The error travels itself, with a note that names the worker and has the remote traceback, trimmed to the user's frames.
If it cannot be pickled, or its class is missing on the caller's side, a RemoteError with the same text takes its place.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from nbdist.code_places import is_nbdists, is_torchs
from nbdist.errors import NbdistError, RemoteError
from nbdist.wire import codec
from nbdist.wire.messages import Payload

_rewriters: list[Callable[[str, str], str]] = []


def on_text(rewrite: Callable[[str, str], str]) -> None:
    """Apply ``rewrite(text, worker)`` to every remote traceback that this process sends or receives.

    ``worker`` is where the error arose. Registering the same function twice has no effect.
    """
    if rewrite not in _rewriters:
        _rewriters.append(rewrite)


_translators: list[Callable[[BaseException, str], BaseException]] = []


def on_error(translate: Callable[[BaseException, str], BaseException]) -> None:
    """Let ``translate(error, worker)`` replace each error from another worker before it is raised here.

    Registering the same function twice has no effect.
    """
    if translate not in _translators:
        _translators.append(translate)


def _rewrite(text: str, worker: str) -> str:
    for rewrite in _rewriters:
        text = rewrite(text, worker)
    return text


Failure = tuple[str, str, str, tuple[bytes, list[bytes]] | None]
"""An error as it travels: class name, text, note, and the encoded error, None if it cannot be encoded."""


def describe(error: BaseException, worker: str, function: str) -> Failure:
    """Return the description to send of ``error``, which arose on ``worker`` in ``function``."""
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    note = f"raised on {worker}, in {function}:\n{_rewrite(_user_traceback(error), worker)}"
    travels = None
    # Not SystemExit and KeyboardInterrupt, which must not end the caller's process.
    if isinstance(error, Exception):
        # Not only EncodeError: an error whose class raises SystemExit while it is pickled must be an answer, too
        # (test_an_error_whose_class_raises_whatever_is_asked_of_it_is_an_answer). Then its name and text travel.
        with contextlib.suppress(Exception, SystemExit):
            encoded = codec.encode(error, by_value=True)
            travels = msgspec.msgpack.encode(encoded.payload), [bytes(frame) for frame in encoded.frames]
    return name, text_of_error(error), note.rstrip(), travels


def text_of_error(error: BaseException) -> str:
    """Return ``str(error)``; if that raises anything, even SystemExit, return a text that says what it raised."""
    try:
        return str(error)
    except (Exception, SystemExit) as failed:  # without the repr of `failed`, which may raise as well
        return f"(its __str__ raised {type(failed).__name__})"


def _user_traceback(error: BaseException) -> str:
    """Format an error's traceback, those of its causes and of a group's members, without the frames of nbdist."""
    described = traceback.TracebackException.from_exception(error)
    described.__notes__ = None  # they belong to the error itself
    seen: set[int] = set()
    queue: list[Any] = [described]
    while queue:
        part = queue.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        # Frames of installed packages stay: they tell how the function failed.
        part.stack[:] = [frame for frame in part.stack if not _is_between(frame.filename)]
        queue += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return "".join(described.format())


def _is_between(file: str) -> bool:
    # Frames of these files only lie between those of the user's functions, and say nothing about them.
    return is_nbdists(file) or is_torchs(file, "futures", "autograd")


def rebuild(failure: Failure) -> BaseException:
    """Return the error to raise on the caller's side: the original one or a RemoteError, with a note of the worker."""
    name, text, note, travelled = failure
    error: BaseException = RemoteError(f"{name}: {text}" if text else name)
    if travelled is not None:
        with contextlib.suppress(NbdistError):  # its class may be missing here
            found = codec.decode(msgspec.msgpack.decode(travelled[0], type=Payload), travelled[1])
            if isinstance(found, BaseException):
                error = found
    worker = note.removeprefix("raised on ").partition(",")[0]
    error.add_note(_rewrite(note, worker))
    for translate in _translators:
        error = translate(error, worker)
    return error
