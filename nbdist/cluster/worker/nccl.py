"""Aborts NCCL's communicators in a worker, and ends the waits for their collectives.

A collective of NCCL runs on the GPU. The thread that begins it waits later, in the first call that needs the GPU's
result: ``t.item()``, ``t.cpu()``, ``torch.cuda.synchronize()``. These calls wait in C++, and ignore signals. Only an
abort of the communicator, from another thread, ends them::

    a thread waits for the GPU               the thread that aborts
    ──────────────────────────               ──────────────────────
    t.item()                                 `waits`: does it stay at one instruction?
       ┊                                     a member died: `tell`, so that the thread gets a CollectiveAborted
       ┊ <──── the GPU is free ───────────── `abort`: ``Backend.abort`` of each backend, in a thread of its own
    raises KeyboardInterrupt (interrupt)        │
    or CollectiveAborted (death)                └─ not back within `_ABORTS_WITHIN`: False; the worker must restart

After an abort torch reports no error to the waiting thread: its call returns whatever the memory holds. So `tell`
raises an error in the thread, before the thread can read the value.

torch has a function ``_abort_process_group``, but it also forgets all groups. Then errors could not say why a group is
gone, and groups without the dead member would be lost, too. So `abort` calls the backends itself.
"""

from __future__ import annotations

import _thread
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed

from nbdist.cluster.worker import gloo
from nbdist.code_places import is_nbdists, is_pythons, is_torchs, is_users
from nbdist.thread_frames import outwards, thread_frames

# Environment variables that keep torch's watchdog of NCCL, a thread for each group, from ending a worker. torch reads
# each of them when it makes a process group, the last one when it makes the first group.
_ENVIRONMENT = {
    # The watchdog does nothing about a failed collective. By default it ends the process, a minute later; torch's
    # `_abort_process_group` asks for this value.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The watchdog of one worker does not ask the other workers' watchdogs for reports, after which they would end their
    # processes.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Even without a report, the watchdog blocks the group's list of collectives for four times this number of ms.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    # A watchdog that gets no answer from the GPU for 8 minutes does not end the process: the user may interrupt it.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # An error of CUDA fails the cell, and does not end the process from the watchdog's thread.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # From torch 2.15 on, "nccl" would mean "nccl2", which was never run with nbdist, and has a watchdog of its own.
    "TORCH_DIST_USE_NCCL2": "0",
}

_ABORTS_WITHIN = 5.0  # seconds; NCCL itself would wait for the group's time limit, 10 minutes

# Seconds for a thread to leave its collective after an abort. gloo may need 10 of them for a cut transfer.
_ENDS_WITHIN = 15.0

_LOOKS, _LOOK_EVERY = 3, 0.03  # looks at a thread, and the seconds between two

# The system call ``sched_yield`` on x86-64 and ARM. CUDA waits with it if processes outnumber cores.
_YIELDS = ("24", "124")

# torch's methods that wait for the GPU, or for a collective.
_WAITING_METHODS = ("cpu", "cuda", "item", "numpy", "synchronize", "to", "tolist", "wait")

# The number under which Python calls `_raise_in_cell` in the main thread. The system never sends this signal.
_LEAVE_SIGNAL = signal.SIGRTMAX - 4

LEFT = re.compile(r"NCCL communicator was aborted|remote process exited|setting up NCCL communicator")
"""The texts of torch's errors after an abort, or after the death of a member."""


# The text of torch's error after an interrupt in the group's store, where NCCL's members first meet.
_INTERRUPTED = re.compile(r"setting up NCCL communicator.*KeyboardInterrupt", re.DOTALL)


# The idents of the threads that run calls for other agents, by call: see `nbdist.rpc.calls.stopping`.
_Calls = Mapping[tuple[int, int], int]


class WaitingPlace(NamedTuple):
    """The place at which a thread waits in C++."""

    frame: int  # the id of the innermost frame
    instruction: int  # the offset in the frame's code
    in_collective: bool  # inside a function of `torch.distributed`


class CollectiveAborted(RuntimeError):
    """A thread's wait for the GPU ended only because a collective of NCCL was aborted: a member of its group has died.

    At the end of the cell, nbdist turns this error into WorkerLost. A user's ``except RuntimeError`` catches it, as it
    catches gloo's errors.
    """

    def __init__(self) -> None:
        super().__init__("a collective of NCCL was aborted: what this call would have returned is not its result")


def set_environment() -> None:
    """Set the variables that keep torch's watchdog from ending this process."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # what the user has set stays


def follow() -> None:
    """Install the signal handler by which `tell` raises an error in the main thread. Call once, in that thread."""
    signal.signal(_LEAVE_SIGNAL, _raise_in_cell)


def gpu_to_bind(backend: str, device: str) -> torch.device | None:
    """Return the GPU that must be named when a process group forms; None if there is none, or none need be named."""
    # torch's "nccl2" connects while the group forms, to the GPU number ``LOCAL_RANK`` unless another is named. The
    # older backend takes the GPU of the first tensor.
    names = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    newer = names & {"nccl2", "nccl-lazy"} or ("nccl" in names and os.environ.get("TORCH_DIST_USE_NCCL2") != "0")
    has_newer = hasattr(torch.distributed, "ProcessGroupNCCL2")
    return torch.device(device) if has_newer and newer and device.startswith("cuda") else None


# -- aborting ---------------------------------------------------------------------------------------------------


def abortable(group: Any) -> list[Any]:
    """Return the backends of a process group whose ``abort`` ends collectives: all backends but gloo's."""
    gloos = getattr(torch.distributed, "ProcessGroupGloo", ())
    # A group that is written in Python has no backends.
    found = [group._get_backend(device) for device in group._device_types] or [group]
    # With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, torch wraps each backend, and the wrapper does not pass an abort on.
    plain = [getattr(backend, "wrapped_pg", backend) for backend in found]
    each_once = {id(backend): backend for backend in plain}.values()
    return [backend for backend in each_once if not isinstance(backend, gloos)]


def is_used(backend: Any) -> bool:
    """Return whether a backend has a communicator, which NCCL makes for the group's first collective."""
    return bool(getattr(backend, "_is_initialized", lambda: True)())  # True for a backend that does not tell


def abort(backends: Sequence[Any]) -> bool:
    """Abort all collectives of these backends; return whether this was done within `_ABORTS_WITHIN` seconds.

    An abort that raises an error counts as done. A second abort of a backend is harmless.
    """
    threads = [
        threading.Thread(target=_abort, args=(backend,), name="nbdist-aborting", daemon=True) for backend in backends
    ]
    # All at the same time: the abort of one communicator may have to wait until the kernels of the others have left the
    # GPU.
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ABORTS_WITHIN
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:  # torch's, of any class: nothing more can be done, so the abort counts as done
        print(f"nbdist: the abort of a process group failed: {error}", file=sys.__stderr__)


# -- finding threads that wait ----------------------------------------------------------------------------------


def waits(idents: Iterable[int], *, collectives_only: bool = False) -> dict[int, WaitingPlace]:
    """Return the places of the threads that wait in C++ for the GPU or a collective, or compute in C++, by ident.

    ``idents`` are the threads to look at; with ``collectives_only``, only those inside a function of
    `torch.distributed` count. Takes about 0.1 s. A thread that computes in C++ looks the same as one that waits for a
    GPU, since CUDA waits by polling.
    """
    found = {ident: place for ident in idents if (place := _place(ident)) is not None}
    for _ in range(_LOOKS - 1):
        time.sleep(_LOOK_EVERY)
        found = {ident: place for ident, place in found.items() if _place(ident) == place}
    return {ident: place for ident, place in found.items() if place.in_collective or not collectives_only}


def is_stuck(places: Mapping[int, WaitingPlace]) -> bool:
    """Return whether a thread stays for `_ENDS_WITHIN` seconds in the collective where `waits` has found it."""
    deadline = time.monotonic() + _ENDS_WITHIN
    left = {ident: place for ident, place in places.items() if place.in_collective}
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
        left = {ident: place for ident, place in left.items() if _place(ident) == place}
    return bool(left)


def _place(ident: int) -> WaitingPlace | None:
    frame = thread_frames().get(ident)
    thread = next((thread for thread in threading.enumerate() if thread.ident == ident), None)
    if frame is None or thread is None:
        return None
    file = frame.f_code.co_filename
    if is_pythons(file) or is_nbdists(file) or not _runs_user_code(frame):
        return None
    call = gloo.system_call(thread.native_id or 0)
    # It runs or yields although this thread holds the GIL, or it is in code that waits for a collective or the GPU.
    if not (call[0] in ("running", *_YIELDS) or is_torchs(file) or gloo.method_called(frame) in _WAITING_METHODS):
        return None
    return WaitingPlace(id(frame), frame.f_lasti, _is_in_collective(frame))


def _is_in_collective(frame: FrameType | None) -> bool:
    collectives = torch.distributed.distributed_c10d.__file__
    return any(each.f_code.co_filename == collectives for each in outwards(frame))


def _runs_user_code(frame: FrameType | None) -> bool:
    return any(is_users(each.f_code.co_filename) for each in outwards(frame))


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether torch's error came from an interrupt while NCCL's members met in the group's store."""
    # torch catches the store's KeyboardInterrupt there, and raises a RuntimeError with its text.
    return isinstance(error, RuntimeError) and bool(_INTERRUPTED.search(str(error)))


# -- raising errors in them -------------------------------------------------------------------------------------


def tell(idents: Collection[int], calls: _Calls, raise_in: Callable[[type[BaseException], _Calls], object]) -> None:
    """Raise CollectiveAborted in these threads when they return from C++; call this before `abort`.

    ``calls`` are the calls for other workers that run in some of these threads. ``raise_in(error, calls)`` raises an
    error in the threads of calls.
    """
    if threading.main_thread().ident in idents:
        _thread.interrupt_main(_LEAVE_SIGNAL)  # type: ignore[arg-type]  # any number will do
    raise_in(CollectiveAborted, calls)


def _raise_in_cell(number: int, frame: FrameType | None) -> None:
    """Raise CollectiveAborted in the main thread if it runs the user's code, or torch's code for it."""
    # If torch has raised an error of its own, the main thread may be in IPython by now, which shows torch's error.
    if frame is not None and not _is_shown(frame) and _runs_user_code(frame):
        raise CollectiveAborted


def _is_shown(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_nbdists(file) or "/IPython/" in file or "/ipykernel/" in file
