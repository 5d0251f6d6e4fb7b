"""The process group of a worker: how it forms, forms again, and how a wait in it is broken off.

A collective waits in C++, deaf to signals, until all others have come; Ctrl-C must end it all the same. Gloo has no
way to cancel. But its connections can be shut down, which fails whatever waits for them: they are the sockets that
gloo's own thread polls.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed

from nbdist.cluster.setup import WorkerSetup

__all__ = ["break_off", "initialise"]

_LOOP = "gloo_tcp_loop"
_EPOLL_WAITS = ("232", "281", "441", "22")  # epoll_wait, epoll_pwait, epoll_pwait2 on x86-64; epoll_pwait on ARM
_TRIES = 100
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)

dist: Any = torch.distributed  # which does not declare what it exports
_broken = False
_breaking = threading.Lock()


def initialise(told: WorkerSetup, generation: int) -> None:
    """Form the process group of that generation; one from before is given up."""
    global _broken
    with _breaking:  # what shuts connections must not meet those of the new group
        if dist.is_initialized():
            if _broken:
                shut_connections()  # so that nothing in it is still waited for
            dist.destroy_process_group()
        _broken = False
    if "gloo" in told.backend and told.master_address == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.ExitStack() as stack:
        if told.device.startswith("cuda"):
            stack.enter_context(torch.cuda.device(told.device))
        store = dist.TCPStore(told.master_address, told.store_port, is_master=False)
        store = dist.PrefixStore(f"group {generation}", store)  # a generation must not find the keys of another
        dist.init_process_group(told.backend, store=store, rank=told.rank, world_size=told.world_size)


def break_off() -> str:
    """Break off the collective in which the main thread waits, if it does; what was done, in words.

    Called in another thread, when an interrupt has had no effect.
    """
    global _broken
    with _breaking:
        if not (dist.is_available() and dist.is_initialized() and _main_thread_waits_in_torch()):
            return ""
        if not shut_connections():
            return ""
        _broken = True
    return "its process group was broken off; `%dist_restart --process-group` forms it anew"


def _main_thread_waits_in_torch() -> bool:
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__)):
        return False
    return _system_call(main.native_id or 0)[:1] != ["running"]


def shut_connections() -> int:
    """Shut down all connections of gloo; how many there were."""
    shut = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if (task / "comm").read_text().strip() != _LOOP:
                continue
            poller = _polled_by(int(task.name))
            watched = Path(f"/proc/self/fdinfo/{poller}").read_text()
            for number in _WATCHED.findall(watched):
                shut += _shut(int(number))
    return shut


def _polled_by(task: int) -> int:
    """The file with which a thread that polls does so; it is not in the call all the time."""
    for _ in range(_TRIES):
        call = _system_call(task)
        if call[0] in _EPOLL_WAITS:
            return int(call[1], 16)
        time.sleep(0.001)
    raise ValueError("the thread does not poll")


def _system_call(task: int) -> list[str]:
    """The system call in which a thread is, and its arguments; ``running`` if in none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{task}/syscall").read_text().split()
    return ["unknown"]


def _shut(number: int) -> int:
    file = os.dup(number)
    try:
        copy = socket.socket(fileno=file)
    except OSError:  # a pipe
        os.close(file)
        return 0
    with copy:
        try:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return 0  # gloo ends the process if it cannot accept
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or not connected
            return 0
    return 1
