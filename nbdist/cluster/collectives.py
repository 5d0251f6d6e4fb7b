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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed

from nbdist.cluster.group_store import GroupStore
from nbdist.cluster.setup import WorkerSetup, group_folder
from nbdist.errors import RendezvousError
from nbdist.torch_private import count_groups_from_zero

__all__ = ["break_off", "initialise"]

_LOOP = "gloo_tcp_loop"
_EPOLL_WAITS = ("232", "281", "441", "22")  # epoll_wait, epoll_pwait, epoll_pwait2 on x86-64; epoll_pwait on ARM
_TRIES = 100
_LOOK_EVERY = 0.05
"""Seconds between two looks of a process that forms a group whether the forming has failed elsewhere."""
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)

dist: Any = torch.distributed  # which does not declare what it exports
_store: GroupStore | None = None
"""The store of the process group, which needs it as long as it lives."""
_broken = False
_breaking = threading.Lock()


def initialise(told: WorkerSetup, generation: int) -> None:
    """Form the process group of this generation, after destroying the one before."""
    global _broken, _store
    with _breaking:  # what shuts connections must not meet those of the new group
        if dist.is_initialized():
            if _broken:
                shut_connections()  # so that nothing in it is still waited for
            dist.destroy_process_group()
        _broken = False
    with contextlib.ExitStack() as stack:
        if told.device.startswith("cuda"):
            stack.enter_context(torch.cuda.device(told.device))
        count_groups_from_zero()
        _store = GroupStore(Path(told.folder, group_folder(generation)))
        stack.enter_context(_leaving_with(_store, told.world_size))
        dist.init_process_group(told.backend, store=_store, rank=told.rank, world_size=told.world_size)


@contextlib.contextmanager
def _leaving_with(store: GroupStore, world_size: int) -> Iterator[None]:
    """Have this process's forming end, too, if the forming ends because another worker failed.

    A wait in the store ends by itself. But a process whose part in the store is done waits in gloo for the connections
    of its peers, without a limit and deaf to signals. A second thread makes these connections in the peers' place.
    """
    formed = threading.Event()

    def watch() -> None:
        while not formed.wait(_LOOK_EVERY):
            if store.ended:
                connect_for_peers(world_size)

    thread = threading.Thread(target=watch, name="nbdist-forming", daemon=True)
    thread.start()
    try:
        yield
        if store.ended:
            raise RendezvousError(store.ended)  # the connections may be of `connect_for_peers`
    finally:
        formed.set()
        thread.join()


def connect_for_peers(world_size: int) -> None:
    """Connect to every listener of gloo's in this process as each of its peers would, and hang up.

    Whoever connects first says for which peer, in 8 bytes, and is believed; an answered wait finds a closed connection.
    """
    for number in _gloo_files():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as listener:
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            for rank in range(world_size):
                with socket.create_connection(listener.getsockname()[:2], timeout=1) as peer:
                    peer.sendall(rank.to_bytes(8, sys.byteorder))


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
    """Shut down all connections of gloo; return how many there were."""
    return sum(map(_shut, _gloo_files()))


def _gloo_files() -> Iterator[int]:
    """Yield the files that gloo's threads poll: its connections, and the sockets where it listens."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if (task / "comm").read_text().strip() != _LOOP:
                continue
            poller = _polled_by(int(task.name))
            watched = Path(f"/proc/self/fdinfo/{poller}").read_text()
            yield from map(int, _WATCHED.findall(watched))


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
