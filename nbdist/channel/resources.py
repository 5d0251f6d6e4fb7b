"""Explains which resource of the system (open files, disk space, memory) is used up, and what to do about it.

The kernel's own text, such as "[Errno 24] Too many open files", names neither the limit nor a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from nbdist.errors import NbdistError, ResourceError

USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.ENOBUFS})
"""The error numbers with which the kernel reports that a resource is used up."""


def in_words(number: int, path: str = "") -> str:
    """Return a text that names the used-up resource (files, disk, memory), its limit, and what to do.

    ``number`` is the error number from `USED_UP` that the kernel reported. ``path`` is the file or directory of the
    failed operation, if it is known.
    """
    where = f" ({path})" if path else ""
    if number == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process has {limit} files open, its limit; close some, or raise the limit (ulimit -n)"
    if number == errno.ENFILE:
        return "all processes of this machine together have as many files open as it allows; close some"
    if number == errno.EFBIG:
        return f"a file{where} would become larger than this process may write; raise the limit (ulimit -f)"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk{where} is full; free some space, or set NBDIST_RUNTIME_DIR to a directory on another disk"
    return "this machine has no memory left; end something that uses much of it"


def explain(error: BaseException) -> str:
    """Return the text of `in_words` if a resource is used up, else the error's own text."""
    number = _error_number(error)
    return in_words(number, _path_of(error)) if number else str(error)


@contextlib.contextmanager
def refusals_in_words(doing: str) -> Iterator[None]:
    """Replace an error of the block with ResourceError if a resource is used up; other errors pass through.

    ``doing`` says what failed, such as "cannot watch other processes"; the message begins with it. The old error is the
    new error's cause, and both have the same ``errno``.
    """
    try:
        yield
    except ResourceError:
        raise
    except Exception as error:  # whatever the block raises: libraries report a used-up resource by errors of their own
        number = _error_number(error)
        if not number:
            raise
        raise _used_up(doing, number, _path_of(error)) from error


@contextlib.contextmanager
def full_disk_in_words(path: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Replace an error of nbdist in the block with ResourceError if the disk of ``path`` is full now.

    ``doing`` says what failed; the message begins with it. Use this function where another process failed: on a full
    disk, that process could not write down why it ended.
    """
    try:
        yield
    except NbdistError as error:
        if isinstance(error, ResourceError) or not _is_full(path):
            raise
        raise _used_up(doing, errno.ENOSPC, os.fspath(path)) from error


def _used_up(doing: str, number: int, path: str) -> ResourceError:
    used_up_and_remedy = in_words(number, path)
    failure = ResourceError(f"{doing}: {used_up_and_remedy}")
    failure.errno = number
    return failure


def _is_full(path: str | os.PathLike[str]) -> bool:
    """Return whether the disk of ``path`` has no free space or no free inodes."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return not found.f_bavail or (found.f_files > 0 and not found.f_favail)


def require_files(count: int, doing: str) -> None:
    """Raise ResourceError unless this process can open ``count`` more files. The message begins with ``doing``.

    Call this before a library that aborts the whole process if it gets no file, such as ZeroMQ when it starts a thread.
    """
    opened: list[int] = []
    try:
        with refusals_in_words(doing):
            opened.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
    finally:
        for file in opened:
            os.close(file)


def _error_number(error: BaseException) -> int:
    """Return the kernel's error number if a resource is used up (`USED_UP`); else 0."""
    number = getattr(error, "errno", None)
    if number is None and isinstance(error, NbdistError):  # its text may be about another process; its cause is not
        return _error_number(error.__cause__) if error.__cause__ is not None else 0
    if number is None:  # errors of torch's stores and of ZeroMQ's wrappers have only the kernel's text
        text = str(error)
        number = next((each for each in USED_UP if os.strerror(each) in text), 0)
    return number if number in USED_UP else 0


def _path_of(error: BaseException) -> str:
    path = getattr(error, "filename", None)
    return path if isinstance(path, str) else ""
