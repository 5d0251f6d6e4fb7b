"""The process group of a worker: how it forms, forms again, and how its collectives end when they cannot go on.

A collective waits in C++, deaf to signals, until all other members have come. Two events end it all the same, by
shutting the connections of its process group (see `nbdist.cluster.gloo`)::

    a member dies      each survivor leaves all groups that contain the dead member; other groups go on
    an interrupt       the worker leaves the group of the collective in which a thread of its own waits

torch then raises a RuntimeError in every thread that waits. Outside of the user's own ``try`` that error becomes
WorkerLost if a member died, else GroupError: `translate`. A group that was left stays unusable until all groups are
formed anew. Then all groups from before are left for good, with the DDP and FSDP wrappers that hold them.

gloo forgets one kind of wait when a connection ends: for a transfer that is half done. A worker that leaves its group
fails those waits in gloo's place: `nbdist.cluster.gloo_waits`. A limit: another worker that was just sending to an
interrupted one may go on waiting, as its group has other connections. An interrupt of that worker ends its wait.
"""

from __future__ import annotations

import contextlib
import dis
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed

from nbdist.cluster import gloo
from nbdist.cluster.gloo_waits import CutTransfers
from nbdist.cluster.group_store import GroupStore
from nbdist.cluster.setup import WorkerSetup, group_folder
from nbdist.errors import GroupError, NbdistError, RendezvousError, WorkerLost
from nbdist.torch_private import is_process_group_known, process_groups, restart_group_numbers

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent
    from nbdist.wire.messages import Record

__all__ = ["break_off", "follow", "initialise", "translate"]

_LOOK_EVERY = 0.05
"""Seconds between two looks of a process that forms a group whether the forming has failed elsewhere."""

_NEWS_WITHIN = 1.0
"""Seconds within which a worker learns of a death, after a survivor that learned of it first has hung up."""

_NEW_GROUP_WITHIN = 5.0
"""Seconds for which a group that was just forming when a member died is kept from waiting for the dead member."""

_LOOKS_FOR_CUT, _LOOK_FOR_CUT_EVERY = 40, 0.25
"""How many times, and after how many seconds each, a process looks for cut transfers once connections were shut. A
number and no time limit, as a worker may stand still at that moment."""

_POLL = 0.01
_PROCESS = re.compile(r" \(process \d+ has ended\)")
_GLOO_LEFT = re.compile(r"/gloo/.*(Connection closed|Connection reset|Broken pipe|not connected)", re.DOTALL)
"""What gloo says where a connection has been shut, at either end."""

_TORCHS = os.path.dirname(torch.__file__) + os.sep
_NO_GROUP = "Default process group has not been initialized"
_NOT_THERE = "is not initialized in the world group map"
"""What torch says of a group that has been destroyed."""

_BROKEN_OFF = "an interrupt has broken this process group off; `%dist_restart -p` forms it anew"
_NOT_YET = (
    "this worker has no process group: it is formed anew once all workers are idle; `%dist_restart -p` forms it at once"
)
_OLD = (
    "this process group is from before the last %dist_restart, which has formed all anew: make it again with "
    "dist.new_group, and wrap models again in DistributedDataParallel or FSDP"
)

dist: Any = torch.distributed  # which does not declare what it exports
_agent: Agent | None = None
_store: GroupStore | None = None
"""The store of the process group, which needs it as long as it lives."""
_formed = False
_forms_group = False
"""Whether this worker's cluster has a process group at all."""
_lost: dict[int, str] = {}
"""What to say of each member that has died since the group formed, by rank."""
_loops_before: set[bytes] = set()
"""The addresses of loops that outlived their groups when the group was formed anew: whoever keeps a group, such as a
DDP wrapper or a traceback, keeps its loop."""
_broken = False
_breaking = threading.Lock()
"""Held while connections are shut, and while the group changes: they must not meet those of the next group."""


def follow(agent: Agent, backend: str) -> None:
    """Learn from this worker's agent which members of the process group die; ``backend`` is the group's, or none."""
    global _agent, _forms_group
    _agent, _forms_group = agent, backend != "none"
    agent.on_lost(_on_lost)
    agent.stopping.break_off = break_off


def initialise(told: WorkerSetup, generation: int) -> None:
    """Form the process group of this generation, after destroying the one before."""
    global _broken, _formed, _loops_before, _store
    with _breaking:
        if dist.is_initialized():
            # Nothing in them is waited for any more, and whoever still holds a group learns that it is over.
            all_of_them = bool(_broken or _lost)
            _shut([loop for loop in _loops() if all_of_them or _is_known(loop.address)])
            dist.destroy_process_group()
        _loops_before = {loop.address for loop in gloo.loops(lambda address: False)}
        _broken = _formed = False
        _lost.clear()
        _store = GroupStore(Path(told.folder, group_folder(generation)))
    with contextlib.ExitStack() as stack:
        if told.device.startswith("cuda"):
            stack.enter_context(torch.cuda.device(told.device))
        # An attempt that failed counts for the workers that made it, but not for a worker that was started since: they
        # would look for each other under different keys.
        restart_group_numbers()
        stack.enter_context(_leaving_with(_store, told.world_size))
        if _agent is not None:
            _store.enter(_agent.me.incarnation, told.rank)
        dist.init_process_group(told.backend, store=_store, rank=told.rank, world_size=told.world_size)
    with _breaking:
        _formed = True
        for rank in list(_lost):  # died since
            _leave_groups_of(rank)


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
                for loop in _loops():
                    gloo.connect_for_peers(loop, world_size)

    thread = threading.Thread(target=watch, name="nbdist-forming", daemon=True)
    thread.start()
    try:
        yield
        if store.ended:
            raise RendezvousError(store.ended)  # the connections may be of `connect_for_peers`
    finally:
        formed.set()
        thread.join()


# -- a member dies ----------------------------------------------------------------------------------------------


def _on_lost(record: Record, why: str) -> None:
    """Leave the groups of a worker that is lost; in a thread, as the agent's reader must not wait."""
    threading.Thread(target=_lose, args=(record, why), name="nbdist-leaving", daemon=True).start()


def _lose(record: Record, why: str) -> None:
    with _breaking:
        rank = _store.rank_of(record.incarnation) if _store is not None else None
        if rank is None:
            return  # it was no member of this group: it has no process group, or one from before
        _lost[rank] = f"{record.name} {_PROCESS.sub('', why)}"
        if not _formed:
            return  # the notebook, which learns of the death too, ends the forming
        _leave_groups_of(rank)
    _keep_new_groups_from_waiting()


def _leave_groups_of(rank: int) -> None:
    """Shut the connections of each group that contains a dead member."""
    assert _store is not None
    _store.lost = _say_lost()
    groups = process_groups()
    names = [(loop, _store.group_at(loop.address)) for loop in _loops()]
    # A group that is not known here was made with a store of the user's own, or forms just now.
    _shut([loop for loop, name in names if name not in groups or rank in groups[name]])


def _keep_new_groups_from_waiting() -> None:
    """End the forming of a group by the user's ``new_group``, which may wait for connections of the dead member."""
    deadline = time.monotonic() + _NEW_GROUP_WITHIN
    while time.monotonic() < deadline:
        with _breaking:
            if not _lost or _store is None:
                return  # the group has been formed anew
            groups = process_groups()
            unknown = [loop for loop in _loops() if _store.group_at(loop.address) not in groups]
            forming = [loop for loop in unknown if loop.address not in _loops_before]
            for loop in forming:
                gloo.connect_for_peers(loop, dist.get_world_size())
        if not forming:
            return
        time.sleep(_LOOK_EVERY)


def _loops() -> list[gloo.Loop]:
    return gloo.loops(_is_known)


def _is_known(address: bytes) -> bool:
    """Return whether this is the address of a group that this process group's store knows."""
    return _store is not None and _store.group_at(address) is not None


def _shut(loops: Sequence[gloo.Loop]) -> int:
    """Shut all connections of these loops, and end what then waits in vain; return how many connections there were."""
    count = sum(map(gloo.shut, loops))
    # Also without a connection to shut: gloo itself has closed those to the dead, and forgotten the cut transfers.
    threading.Thread(target=_end_cut_transfers, name="nbdist-cut-transfers", daemon=True).start()
    return count


def _end_cut_transfers() -> None:
    cut = CutTransfers()
    for _ in range(_LOOKS_FOR_CUT):
        time.sleep(_LOOK_FOR_CUT_EVERY)
        cut.end()


def _say_lost() -> str:
    who = "; ".join(_lost.values())
    return (
        f"{who}, and a process group with a dead member cannot go on\n"
        "`%dist_restart` starts dead workers again, and forms the process group anew once all workers are idle"
    )


def translate(error: BaseException | None) -> WorkerLost | GroupError | None:
    """Return the error that says why a collective of torch's failed, if nbdist knows; else None.

    A worker may meet another survivor's hanging up before its own agent has learned of the death: the agent gets a
    moment. Where nobody has died, an interrupt has broken the group off, here or on another worker.
    """
    if _agent is None or isinstance(error, NbdistError) or not isinstance(error, RuntimeError | ValueError):
        return None
    text = str(error)
    if isinstance(error, ValueError) and _NO_GROUP in text and not dist.is_initialized():
        return GroupError(_NOT_YET) if _forms_group else None
    if _store is None or not (_NOT_THERE in text or _GLOO_LEFT.search(text)):
        return None
    if _NOT_THERE in text or _is_of_old_group(error):
        return GroupError(_OLD)
    deadline = time.monotonic() + _NEWS_WITHIN
    while not (_lost or _broken) and time.monotonic() < deadline:
        time.sleep(_POLL)
    if not _lost:
        return GroupError(_BROKEN_OFF)
    lost = WorkerLost(_say_lost())
    lost.__cause__ = error
    return lost


def _is_of_old_group(error: BaseException) -> bool:
    """Return whether a group that torch's functions were called with has been destroyed since it was made."""
    tb = error.__traceback__
    while tb is not None:
        found = tb.tb_frame.f_locals
        wrapper = getattr(found.get("self"), "__dict__", {})  # DDP's or FSDP's
        for group in (found.get("group"), wrapper.get("process_group")):
            if isinstance(group, dist.ProcessGroup) and not is_process_group_known(group):
                return True
        tb = tb.tb_next
    return False


# -- an interrupt -----------------------------------------------------------------------------------------------


def break_off(thread: int | None = None) -> str:
    """End the collective in which a thread waits, if it does; return what was done, in words.

    ``thread`` is the thread's ident; None for the main thread. Called in another thread, when an interrupt has had no
    effect. Only the group of that collective is left, where the thread's frames tell which group that is; else all.
    """
    global _broken
    ident = threading.main_thread().ident if thread is None else thread
    with _breaking:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        waits, group = _collective_of(ident or 0)
        if not waits:
            return ""
        name_of = _store.group_at if _store is not None else lambda _: None
        left = [loop for loop in _loops() if group is None or name_of(loop.address) in (group, None)]
        if not _shut(left):
            return ""
        _broken = True
    return "its process group was broken off; `%dist_restart -p` forms it anew"


def _collective_of(ident: int) -> tuple[bool, str | None]:
    """Return whether a thread waits in torch's C++ code, and the name of the collective's group where it is known."""
    frame = sys._current_frames().get(ident)
    thread = next((thread for thread in threading.enumerate() if thread.ident == ident), None)
    if frame is None or thread is None or gloo.system_call(thread.native_id or 0)[:1] == ["running"]:
        return False, None
    if not frame.f_code.co_filename.startswith(_TORCHS):
        return _method_called(frame) == "wait", None  # of the handle of an asynchronous collective
    while frame is not None and frame.f_code.co_filename.startswith(_TORCHS):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "group" in frame.f_locals:
            group = frame.f_locals["group"]
            return True, getattr(dist.group.WORLD if group is None else group, "group_name", None)
        frame = frame.f_back
    return True, None


def _method_called(frame: FrameType) -> str:
    """Return the name of the attribute that a frame has loaded last: of the method that it calls."""
    name = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = str(instruction.argval)
    return name
