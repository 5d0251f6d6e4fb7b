"""Functions that fork, or use `multiprocessing`, while they hold a tensor that came in shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys

import torch

_held: torch.Tensor | None = None


def _sum(number: int) -> float:
    assert _held is not None
    return float(_held.sum()) + number


def _sum_of(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def pool(tensor: torch.Tensor, method: str) -> tuple[list[float], float]:
    """Return what the processes of a pool make of a tensor, and its sum here afterwards."""
    global _held
    _held = tensor
    try:
        with multiprocessing.get_context(method).Pool(2) as made:
            found = made.map(_sum, range(3)) if method == "fork" else []
            return found + made.map(_sum_of, [tensor, tensor]), float(tensor.sum())
    finally:
        _held = None


def fork(tensor: torch.Tensor, then: str) -> tuple[int, float]:
    """Return the status of a forked process that comes back from the function or drops the tensor, and the sum here."""
    pid = os.fork()
    if not pid:
        if then == "returns":
            return 0, 0.0
        if then == "raises":
            raise ValueError("in the forked process")
        if then == "exits":
            sys.exit(3)
        del tensor
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), float(tensor.sum())


def keep_in_child(tensor: torch.Tensor) -> int:
    """Return the end of a pipe: the process that was forked holds the tensor until the pipe is closed."""
    global _held
    _held = tensor
    go_out, go_in = os.pipe()
    answer_out, answer_in = os.pipe()
    if not os.fork():
        os.close(go_in)
        os.read(go_out, 1)
        os.write(answer_in, str(float(tensor.sum())).encode())
        os._exit(0)
    os.close(go_out)
    os.close(answer_in)
    _held = None
    _pipes[:] = [go_in, answer_out]
    return os.getpid()


_pipes: list[int] = []


def sum_in_child() -> float:
    """Return the sum of the tensor that the process of `keep_in_child` holds."""
    go_in, answer_out = _pipes
    os.close(go_in)
    found = float(os.read(answer_out, 100))
    os.close(answer_out)
    os.wait()
    return found
