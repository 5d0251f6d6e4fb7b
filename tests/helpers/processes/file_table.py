"""A full file table, as `ulimit -n` makes one: what tests of this process's behaviour in it need."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def full(room: int = 0) -> Iterator[Callable[[], None]]:
    """Leave this process room for so many more files, and no others; yields what makes room for one more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(len(os.listdir("/proc/self/fd")) + room + 1) if not _is_open(number)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], hard))

    def one_more() -> None:
        now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now + 1, hard))

    try:
        yield one_more
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
