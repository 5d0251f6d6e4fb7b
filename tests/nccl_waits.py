"""Cells that wait for a collective of NCCL, and what waits for them: for the stand-in and for the real NCCL."""

import time

LIMIT = 40
"""Seconds for what a test waits for."""
MARK = "open(f'{folder}/{rank}', 'w').close()\n"
"""Says, in the cluster's variable ``folder``, that a worker has come to the line below."""


def reach(folder, *ranks, then=0.3):
    """Wait until these workers are at the line after their marks, and in it, which takes ``then`` seconds at most."""
    deadline = time.monotonic() + LIMIT
    while not all((folder / str(rank)).exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(then)  # from the mark into the wait: of that nothing tells


def wait_for(cell, limit=LIMIT):
    """Wait for a cell's end, and return its error."""
    deadline = time.monotonic() + limit
    while not cell.done:
        assert time.monotonic() < deadline, f"{cell} stands still"
        time.sleep(0.01)
    return cell.error()
