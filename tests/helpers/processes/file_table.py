"""A full file table, as `ulimit -n` makes one: what tests of this process's behaviour in it need."""

import contextlib
import os
import resource


@contextlib.contextmanager
def full(room=0):
    """Leave this process room for so many more files, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(len(os.listdir("/proc/self/fd")) + room + 1) if not _is_open(number)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
