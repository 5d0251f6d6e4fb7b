"""Forms the process group of a worker, and ends collectives after the death of a member or an interrupt.

A collective waits in C++ until all other members have joined it, and ignores signals. To end a collective of gloo, this
module shuts down the connections of its process group (see `nbdist.cluster.worker.gloo`). To end a collective of NCCL,
it aborts the group's communicators (see `nbdist.cluster.worker.nccl`)::

    initialise ──> formed ──┬── a member dies: `_on_lost` ──> leaves all groups with the dead member
        ^                   ├── an interrupt: `break_off` ──> leaves the group in whose collective a thread waits
        │                   │                                 │
        │                   │      torch raises RuntimeError in the threads that wait; `translate` turns it, outside
        │                   │      of the user's own ``try``, into WorkerLost (a member died) or GroupError
        │                   └── a cell: ``destroy_process_group``
        ├─── a cell: ``init_process_group`` (`form_in_cell`) ─┤
        └─── `%dist_restart`: the process group forms again ──┘
             after an abort of NCCL, and after a cell that has destroyed it: by itself, once all workers are idle

To *leave* a group means to shut its connections in this process, and to abort its communicators. If an abort does not
return within 5 s, only the end of the process can end it, so the notebook restarts this worker
(`nbdist.cluster.mending`). A group that was left, or that formed before the present process group, stays unusable, and
so do DDP and FSDP wrappers that hold it. Other groups continue.

gloo forgets one kind of wait when a connection ends: the wait for a half-done transfer. A worker that leaves a group
ends these waits itself: `nbdist.cluster.worker.gloo_waits`. A limit: if a worker was sending to an interrupted worker,
it may continue to wait, because its group has other connections. An interrupt of the sending worker ends the wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.distributed_c10d import destroy_process_group as _destroy_process_group
from torch.distributed.distributed_c10d import init_process_group as _init_process_group  # not that of `default_group`

from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.hosts.group_board import BoardStore
from nbdist.cluster.processes.group_store import FolderStore, GroupStore
from nbdist.cluster.processes.process_memory import resident
from nbdist.cluster.processes.setup import AUTO, WorkerSetup, choose_backend, group_folder, record_socket
from nbdist.cluster.stands import Position
from nbdist.cluster.whereabouts import place
from nbdist.cluster.worker import flight_recorder, gloo, gpu, nccl, non_members, roots
from nbdist.cluster.worker.gloo_waits import CutTransfers
from nbdist.cluster.worker.record_server import RecordServer
from nbdist.code_places import is_torchs
from nbdist.errors import GroupError, NbdistError, RendezvousError, WorkerLost
from nbdist.rpc.asking import ask_each
from nbdist.signals import DeferredSignals
from nbdist.thread_frames import outwards, thread_frames
from nbdist.torch_private import groups_by_name, is_process_group_known, process_groups, restart_group_numbers

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent
    from nbdist.wire.messages import Record

_LOOK_EVERY = 0.05  # seconds between two checks, while a group forms, whether another worker has failed

# Seconds within which a worker learns of a death, after another survivor has shut its connections.
_DEATH_KNOWN_WITHIN = 1.0

# Seconds after a death for which forming groups of ``new_group`` are kept from waiting for the dead member.
_NEW_GROUP_WITHIN = 5.0

# The looks for cut transfers after connections were shut, and the seconds between two. A number of looks and not a time
# limit, because the process may be stopped for a while at that moment.
_LOOKS_FOR_CUT, _LOOK_FOR_CUT_EVERY = 40, 0.25

# Seconds for which destroyed process groups stay in memory: longer than gloo's threads need after a collective.
_KEPT_FOR = 1.0

_NOTEBOOK_ANSWERS_WITHIN = 2.0  # seconds for the notebook to answer that it will form the process group anew

_POLL = 0.01
# A part of the RPC agent's text about a death. It differs in each run, so the error of the user leaves it out.
_PROCESS = re.compile(r" \(process \d+ has ended\)")

# The texts of gloo's errors when a connection has been shut, at either end.
_GLOO_LEFT = re.compile(r"/gloo/.*(Connection closed|Connection reset|Broken pipe|not connected)", re.DOTALL)

_NO_GROUP = "Default process group has not been initialized"  # in torch's error where there is no process group
_GROUP_DESTROYED = "is not initialized in the world group map"  # in torch's error for a group that was destroyed

_BROKEN_OFF = (
    "an interrupt has broken this process group off, or a worker has destroyed it; `%dist_restart -p` forms it anew"
)
_NOT_YET = (
    "this worker has no process group: it is formed anew once all workers are idle, or by `%dist_restart -p`, which "
    "waits for running cells"
)
_DESTROYED = (
    "destroy_process_group has ended this worker's process group: it is formed anew once all workers are idle, or by "
    "dist.init_process_group() on all of them"
)
_FORMING_STOPPED = "an interrupt has ended the forming of the process group"
_ABORTED = "its process group was aborted, and forms anew once all workers are idle"
# Two reasons of a restart, which follow "was restarted, because".
_NOT_ABORTED = "an abort of NCCL's collectives did not return within 5 s"
_NOT_ENDED = "a collective of NCCL did not end, although a member had died and it was aborted"
_OLD = (
    "this process group is from before the last %dist_restart, or before the last worker joined, after which a new one "
    "has formed: make groups and device meshes again, and wrap models again in DistributedDataParallel or FSDP"
)

dist: Any = torch.distributed  # Any: torch does not declare what this module exports


class Collectives:
    """The process groups of this worker. The notebook may call the methods in `METHODS`, in a thread of the agent.

    Cells form and use the groups in the main thread; deaths and interrupts are handled in other threads. `_breaking` is
    held while connections are shut and while the group changes, so that none of the next group is shut.
    """

    METHODS = ("backend", "break_off", "histories", "note_broken", "place")

    def __init__(self) -> None:
        self._agent: Agent | None = None  # None before `follow`
        self._driver = ""  # the name of the notebook's agent
        self._store: GroupStore | None = None  # C++ does not keep the Python object alive, so this does
        self._formed = False  # True once the present process group has formed
        self._forming_since = 0  # by `time.time_ns`
        self._record_server = RecordServer()
        self._backend = "none"  # of the process group that formed last, as torch writes it
        self._forms_group = False  # False for a cluster with the backend "none"
        self._state_told: object = None  # the state of the flight recorder at the last `news`
        # By rank: the name of each lost member of the present group, and a text that says how it was lost.
        self._lost: dict[int, tuple[str, str]] = {}
        # The addresses of loops (`gloo.Loop`) of earlier groups, which live while an object holds the group.
        self._loops_before: set[bytes] = set()
        self._spans_hosts = False  # True if members of the present group may be on other hosts
        # When an interrupt has broken off a collective of the present group, by the ident of the waiting thread.
        self._broken: dict[int, float] = {}
        # The names of groups that were broken off on another worker, None for all, and that this worker leaves too when
        # its next cell begins.
        self._broken_elsewhere: list[str | None] = []
        self.generation = 0
        """The number of the present group, by `initialise`."""
        self._stop_forming = threading.Event()  # set when an interrupt ends the forming of the present group here
        self._breaking = threading.Lock()

    def follow(self, agent: Agent, told: WorkerSetup) -> None:
        """Let this worker's agent report members that die, and end collectives of calls that are interrupted.

        Called once, in the main thread, when the agent has started.
        """
        self._agent, self._driver, self._forms_group = agent, told.driver, told.backend != "none"
        nccl.follow()
        non_members.follow(told.name)
        agent.on_lost(self._on_lost)
        agent.stopping.break_off = self.break_off
        agent.named.publish("collectives", self, *self.METHODS)

    def form_in_cell(self, told: WorkerSetup, backend: str | None, **options: Any) -> None:
        """Form the process group anew with all other workers, whose code must call this, too: ``init_process_group``.

        If this fails, it fails on the other workers. The arguments and errors are those of `initialise`.
        """
        before = self.generation
        try:
            self.initialise(told, None, backend, **options)
        except BaseException as error:  # also an interrupt: the others would wait for this worker
            if self.generation != before:  # else this worker has not entered the group
                why = f"the process group did not form: {told.name}: {error or type(error).__name__}"
                self._ask_notebook("end_group", self.generation, why, wait=_NOTEBOOK_ANSWERS_WITHIN)
            raise

    def ask_for_group(self) -> None:
        """Let the notebook form the process group anew if a cell has destroyed it. Called at the end of each cell."""
        if self._forms_group and self._store is not None and not dist.is_initialized():
            # Wait for the answer: the notebook ends the cell after this, and must not send the next one to a worker
            # without a group.
            self._ask_notebook("form_group_anew", self.generation, wait=_NOTEBOOK_ANSWERS_WITHIN)

    def initialise(self, told: WorkerSetup, generation: int | None, backend: str | None = None, **options: Any) -> None:
        """Form the process group number ``generation`` with all other workers; destroy the previous group first.

        ``generation`` is None if code in a cell forms the group: then the notebook gives the number. ``backend`` is
        None for the cluster's; ``options`` are those of torch's ``init_process_group``. Waits for the others. Raises
        RendezvousError if another worker fails or the abort of the previous group does not return, WorkerLost if a
        member has died.
        """
        self._spans_hosts = told.secret is not None
        if generation is None:
            assert self._agent is not None
            # Else an interrupt might lose the number, without which the notebook forms no other group.
            with DeferredSignals():
                generation = self.generation = self._agent.at(self._driver, "mending").ask("enter_group", told.name)
        with self._breaking:
            if dist.is_initialized():
                # No wait in an old group can end well any more, and code that still holds one must get an error.
                all_of_them = bool(self._broken or self._lost)
                _shut([loop for loop in self._all_loops() if all_of_them or self._is_known(loop.address)])
                # `destroy_process_group` alone would wait for NCCL's unfinished collectives, and some may never end.
                if not self._abort(groups_by_name().values()):  # a call for another worker may still wait in one
                    raise RendezvousError(
                        f"{_NOT_ABORTED}: the notebook restarts this worker, and the group forms anew"
                    )
                destroy()
            self._loops_before = {loop.address for loop in gloo.loops(lambda address: False)}
            # The flight recorder has entries of earlier groups.
            self._formed, self._forming_since = False, time.time_ns()
            roots.forget()
            self._record_server.note_forming(record_socket(told.folder, told.name))
            self._broken.clear()
            self._broken_elsewhere.clear()
            self._stop_forming.clear()
            self._lost.clear()
            self._store, self.generation = self._open_store(told, generation), generation
            if timeout := options.get("timeout"):
                self._store.set_timeout(timeout)
        # Without `_breaking`: this waits for the other workers, and the threads that end the wait take the lock.
        with contextlib.ExitStack() as stack:
            if told.device.startswith("cuda"):
                stack.enter_context(torch.cuda.device(told.device))
            # torch counts the groups that a process makes, failed attempts too, and uses the count in the store's keys.
            # A worker that was started later has another count, so without this the workers would not find each other.
            restart_group_numbers()
            stack.enter_context(self._leaving_with(self._store, told.world_size))
            if self._agent is not None:
                # `_lose` finds a member's rank by the incarnation of its agent, also while the group forms.
                self._store.enter(self._agent.me.incarnation, told.rank)
            if self._spans_hosts:
                _follow_master(self._store, told)
            self._backend = backend or (agree_on_backend(self._store, told) if told.backend == AUTO else told.backend)
            if bound := nccl.gpu_to_bind(self._backend, told.device):
                options.setdefault("device_id", bound)
            _init_process_group(self._backend, store=self._store, rank=told.rank, world_size=told.world_size, **options)
        with self._breaking:
            self._formed = True
            for rank in list(self._lost):  # members that died while the group formed
                self._leave_groups_of(rank)

    @property
    def is_broken(self) -> bool:
        """True if an interrupt has broken off a present group, here or on another worker."""
        return bool(self._broken or self._broken_elsewhere)

    def backend(self) -> str:
        """Return the backend of this worker's process group, as torch writes it."""
        return self._backend

    def place(self) -> Position | None:
        """Return where the main thread stands, and whether this process is in a collective."""
        if (found := place()) is None:
            return None
        count, has_unfinished = flight_recorder.progress()
        return found._replace(instruction=(*found.instruction, count), memory=resident(), in_collective=has_unfinished)

    def histories(self) -> list[GroupHistory]:
        """Return what this worker has called in each of its process groups, since the default group has formed."""
        return flight_recorder.read(self._forming_since, places=True)

    def news(self) -> list[GroupHistory] | None:
        """Return the histories, without lines, if there are groups or collectives since the last call; else None."""
        state = flight_recorder.state()
        if state == self._state_told:
            return None
        self._state_told = state
        return flight_recorder.read(self._forming_since, places=False)

    def _open_store(self, told: WorkerSetup, generation: int) -> GroupStore:
        """Return the store for one forming of the group: files, or, for several hosts, the notebook's memory."""
        if told.secret is None or self._agent is None:
            return FolderStore(Path(told.folder, group_folder(generation)))
        return BoardStore(generation, partial(self._agent.at(told.driver, "boards").ask, "act"))

    @contextlib.contextmanager
    def _leaving_with(self, store: GroupStore, world_size: int) -> Iterator[None]:
        """End the forming of the group in the ``with`` block if another worker fails to form it."""
        formed = threading.Event()

        # A wait in the store raises by itself when another worker fails. But a process that is done with the store
        # waits in gloo for the connections of its peers, without a time limit: this thread makes them in the peers'
        # place.
        def watch() -> None:
            while store is self._store and not formed.wait(_LOOK_EVERY):
                if store.lost or self._stop_forming.is_set() or store.ended:
                    with self._breaking:  # else these might be connections to the next group, in its members' place
                        for loop in self._all_loops() if store is self._store else ():
                            gloo.connect_for_peers(loop, world_size)

        thread = threading.Thread(target=watch, name="nbdist-forming", daemon=True)
        try:
            thread.start()  # in the block: an interrupt may come while this waits for the thread to begin
            yield
            if why := _FORMING_STOPPED if self._stop_forming.is_set() else store.ended:
                raise RendezvousError(why)  # the group may consist of connections that `connect_for_peers` made
            if store.lost:
                raise WorkerLost(store.lost)
        except BaseException:  # also an interrupt: no group stays that has formed in part
            if dist.is_initialized():
                destroy()
            raise
        finally:
            formed.set()
            if thread.is_alive():  # else an interrupt came before it began, and `join` would raise
                thread.join()

    # -- a member dies ----------------------------------------------------------------------------------------------

    def _on_lost(self, record: Record, why: str) -> None:
        """Leave the groups of a lost worker, in a new thread: the agent, which calls this, must not wait."""
        threading.Thread(target=self._lose, args=(record, why), name="nbdist-leaving", daemon=True).start()

    def _lose(self, record: Record, why: str) -> None:
        """Shut the connections of the groups that contain a lost worker, and keep new groups from waiting for it.

        ``why`` follows the worker's name in the text of the WorkerLost. While the group still forms, only notes the
        loss.
        """
        with self._breaking:
            # Look for the incarnation, not for the name: a restarted worker of the same name is another member.
            rank = None
            with contextlib.suppress(NbdistError):  # the notebook, which may have the store, is lost as well
                rank = self._store.rank_of(record.incarnation) if self._store is not None else None
            if rank is None:
                return  # it is not a member of the present group
            self._lost[rank] = record.name, _PROCESS.sub("", why)
            if not self._formed:
                assert self._store is not None
                self._store.lost = self._say_lost()
                return
            self._leave_groups_of(rank)
        self._keep_new_groups_from_waiting()

    def _leave_groups_of(self, rank: int) -> None:
        """Shut the connections of each group that contains a dead member; the groups stay unusable."""
        assert self._store is not None
        self._store.lost = self._say_lost()
        groups = process_groups()
        # A group without a known name was made with a store of the user's own, or is forming now: leave it, too.
        _shut([loop for loop, name in self._named_loops() if name not in groups or rank in groups[name]])
        self._abort([group for name, group in groups_by_name().items() if rank in groups.get(name, ())])

    def _abort(self, groups: Iterable[Any], *, but: int | None = None) -> bool:
        """Abort NCCL's collectives of these process groups; return False if an abort did not return in time.

        Raises `nccl.CollectiveAborted` in threads that run cells or calls and wait for the GPU. The thread with the
        ident ``but``, which was interrupted, gets no error.
        """
        backends = [backend for group in groups for backend in nccl.abortable(group)]
        if not backends:
            return True
        told = dict[int, nccl.WaitingPlace]()
        if self._agent is not None:
            # Without a communicator the group has nothing on the GPU: only threads inside `torch.distributed`, where
            # NCCL makes it, can wait for the group.
            stopping, are_used = self._agent.stopping, any(map(nccl.is_used, backends))
            calls = stopping.threads()
            threads = {threading.main_thread().ident or 0, *calls.values()} - {but}
            told = nccl.waits([thread for thread in threads if thread is not None], collectives_only=not are_used)
            # Before the abort: after it, a thread could read what the memory holds, without an error.
            nccl.tell(told, {key: thread for key, thread in calls.items() if thread in told}, stopping.raise_in)
        done = nccl.abort(backends)
        if not done:
            self._ask_for_restart(_NOT_ABORTED)
        elif told:
            threading.Thread(target=self._restart_if_stuck, args=(told,), name="nbdist-stuck", daemon=True).start()
        return done

    def _restart_if_stuck(self, told: Mapping[int, nccl.WaitingPlace]) -> None:
        """Ask for a restart of this worker if a thread does not leave its collective after the abort."""
        # NCCL makes a communicator in a group's first collective, and waits there for all members. It cannot abort this
        # wait.
        if nccl.is_stuck(told):
            self._ask_for_restart(_NOT_ENDED)

    def _ask_for_restart(self, because: str) -> None:
        if self._agent is not None:
            self._ask_notebook("restart_worker", self._agent.me.name, self._agent.me.incarnation, because)

    def _ask_notebook(self, method: str, *arguments: object, wait: float = 0.0) -> None:
        """Call a method of the notebook's `Mending`; wait up to ``wait`` seconds for the answer."""
        with contextlib.suppress(NbdistError):  # the notebook is gone, or does not answer in time
            assert self._agent is not None
            asked = self._agent.at(self._driver, "mending").call(method, *arguments, timeout=wait or -1.0)
            if wait:
                asked.wait()

    def _keep_new_groups_from_waiting(self) -> None:
        """End the waits of groups that form by ``new_group``: they may wait for the dead member to connect."""
        deadline = time.monotonic() + _NEW_GROUP_WITHIN
        while time.monotonic() < deadline:
            with self._breaking:
                if not self._lost or self._store is None:
                    return  # the group has formed again meanwhile
                groups = process_groups()
                # torch does not list a group that still forms; nor an earlier one, which `_loops_before` has.
                unknown = [loop for loop, name in self._named_loops() if name not in groups]
                forming = [loop for loop in unknown if loop.address not in self._loops_before]
                for loop in forming:
                    gloo.connect_for_peers(loop, dist.get_world_size())
            if not forming:
                return
            time.sleep(_LOOK_EVERY)

    def _all_loops(self) -> list[gloo.Loop]:
        return gloo.loops(self._is_known)

    def _named_loops(self) -> list[tuple[gloo.Loop, str | None]]:
        """Return the loops of all groups, each with the group's name; None for one that the present store lacks."""
        store = self._store
        return [(loop, store.group_at(loop.address) if store is not None else None) for loop in self._all_loops()]

    def _is_known(self, address: bytes) -> bool:
        """Return whether the group whose gloo listens at this address formed here, through the present store."""
        return self._store is not None and self._store.group_at(address) is not None

    def _say_lost(self) -> str:
        who = "; ".join(f"{name} {why}" for name, why in self._lost.values())
        names = ",".join(name for name, _ in self._lost.values())
        return (
            f"{who}, and a process group with a lost member cannot be used any more\n"
            f"`%dist_restart {names}` starts {'it' if len(self._lost) == 1 else 'them'} again, and forms the process "
            "group anew once all workers are idle"
        )

    def translate(self, error: BaseException | None) -> WorkerLost | GroupError | None:
        """Return the error that explains torch's error of a collective, if nbdist knows the reason; else None.

        Waits up to `_DEATH_KNOWN_WITHIN` seconds for news of a death; if a member on another host does not answer,
        until that member is lost. Returns a WorkerLost that names the dead members, or a GroupError that says what has
        ended the group, or that there is none.
        """
        if self._agent is None or isinstance(error, NbdistError) or not isinstance(error, RuntimeError | ValueError):
            return None
        text = str(error)
        if isinstance(error, ValueError) and _NO_GROUP in text and not dist.is_initialized():
            return GroupError(_DESTROYED if self._formed else _NOT_YET) if self._forms_group else None
        of_nccl = isinstance(error, nccl.CollectiveAborted) or bool(nccl.LEFT.search(text))
        if self._store is None or not (of_nccl or _GROUP_DESTROYED in text or _GLOO_LEFT.search(text)):
            return None
        if _GROUP_DESTROYED in text or _is_of_old_group(error):
            return GroupError(_OLD)
        _wait_until(lambda: self._lost or self._broken, _DEATH_KNOWN_WITHIN)
        if not (self._lost or self._broken) and self._spans_hosts:
            self._wait_for_loss_elsewhere(self._agent)
        if not self._lost:
            # NCCL's own error says that its communicator was aborted.
            if of_nccl and not self._broken:
                return None
            return GroupError(_BROKEN_OFF if self._broken or not self._is_whole() else _OLD)
        lost = WorkerLost(self._say_lost())
        error.args = (text.partition(" This is typically caused by a remote worker")[0],)  # where gloo begins to guess
        lost.__cause__ = error
        return lost

    def _is_whole(self) -> bool:
        # While all present groups have all their connections, an error of gloo comes from an older group.
        groups = process_groups()
        counts = [(len(loop.connections), name) for loop, name in self._named_loops()]
        return min((count >= len(groups[name]) - 1 for count, name in counts if name in groups), default=False)

    def _wait_for_loss_elsewhere(self, agent: Agent) -> None:
        """Wait until a member on another host that does not answer is lost; return at once if all answer."""
        # The end of a gloo connection may be the first sign that a host has died. RPC reports the loss only after
        # `RpcBackendOptions.lost_after` seconds of silence.
        names = [each.name for each in agent.membership.others()]
        answers = ask_each(agent, _answer, dict.fromkeys(names, ()), timeout=_DEATH_KNOWN_WITHIN)
        silent = set(names) - answers.or_raise(but=NbdistError).keys()
        deadline = time.monotonic() + agent.options.lost_after + _DEATH_KNOWN_WITHIN
        while silent and not self._lost and time.monotonic() < deadline:
            time.sleep(_POLL)
            silent &= {each.name for each in agent.membership.others()}
        # A lost worker leaves `membership` first; `_lose`, in another thread, adds it to `_lost` a moment later. Wait
        # for that, so that the error names the worker.
        group, size = self._group_members(agent), dist.get_world_size()

        def is_clear() -> bool:
            return bool(self._lost) or sum(agent.member(each) is not None for each in group) >= size

        _wait_until(is_clear, _DEATH_KNOWN_WITHIN)

    def _group_members(self, agent: Agent) -> list[int]:
        """Return the incarnations of the living members of the present group, this worker's included."""
        with contextlib.suppress(NbdistError):  # the notebook, which may have the store, is lost as well
            return [
                record.incarnation
                for record in agent.membership.members()
                if self._store is not None and self._store.rank_of(record.incarnation) is not None
            ]
        return []

    # -- an interrupt -----------------------------------------------------------------------------------------------

    def break_off(self, thread: int | None = None) -> str:
        """End the collective in which a thread waits; return a text that says what was done, empty for nothing.

        Called in another thread when an interrupt has had no effect. Leaves the collective's group, and gloo's groups
        without a known name; all groups if the frames of the thread do not show the group, such as during a wait for
        the GPU. ``thread`` is the thread's ident; None for the main thread.
        """
        ident = threading.main_thread().ident or 0 if thread is None else thread
        if self._is_forming(ident):
            self._stop_forming.set()
            return _FORMING_STOPPED
        # A backward pass may compute for seconds before it averages gradients, and sees no signal before it ends: let
        # it come to its wait. Not with NCCL: a thread that waits for a GPU looks as one that computes.
        if not any(map(nccl.abortable, groups_by_name().values())) and not _comes_to_wait(ident):
            return ""
        with self._breaking:
            if not (dist.is_available() and dist.is_initialized()):
                return ""
            waits, group = _collective_of(ident)
            groups = [each for name, each in groups_by_name().items() if group in (name, None)]
            groups = [each for each in groups if any(map(nccl.is_used, nccl.abortable(each)))]
            if groups and not waits:
                waits, group = bool(nccl.waits([ident])), None
            if not waits:
                return ""
            left = [loop for loop, name in self._named_loops() if group is None or name in (group, None)]
            if not _shut(left) and not groups:
                return ""
            self._broken[ident] = time.monotonic()
            if not groups:
                self._tell_others(group)
                return "its process group was broken off; `%dist_restart -p` forms it anew"
            done, generation = self._abort(groups, but=ident), self.generation
        if done:
            # Wait for the answer: the notebook ends the cell after this, and must not send the next one to the old
            # group.
            self._ask_notebook("form_group_anew", generation, wait=_NOTEBOOK_ANSWERS_WITHIN)
        return _ABORTED if done else ""

    def _tell_others(self, group: str | None) -> None:
        # Else a member without a connection to this worker would wait in the group's next collective until its limit.
        if (agent := self._agent) is not None:
            for member in agent.membership.others():
                if member.name != self._driver:
                    agent.at(member.name, "collectives").cast("note_broken", self.generation, group)

    def note_broken(self, generation: int, group: str | None) -> None:
        """Note that another member has left a group, or all with None: the next cell here finds it broken off, too."""
        with self._breaking:
            if generation == self.generation and (group is None or group in process_groups()):
                self._broken_elsewhere.append(group)

    def leave_broken(self) -> None:
        """Leave the groups that were broken off on another worker. Called at the begin of each cell."""
        # And not at once: a cell that still waits in the group is about to be stopped, and must say where.
        if not self._broken_elsewhere:
            return
        with self._breaking:
            noted, self._broken_elsewhere = self._broken_elsewhere, []
            _shut([loop for loop, name in self._named_loops() if name in noted or None in noted])
            self._broken[0] = time.monotonic()  # of no thread here

    def was_broken_off(self, since: float) -> bool:
        """Return whether a collective of the main thread was broken off since a moment, by `time.monotonic`."""
        return self._broken.get(threading.main_thread().ident or 0, 0.0) > since

    def _is_forming(self, ident: int) -> bool:
        frames = outwards(thread_frames().get(ident))
        return any(frame.f_code is Collectives.initialise.__code__ for frame in frames)


def _wait_until(condition: Callable[[], object], within: float) -> None:
    """Wait until ``condition()`` is true, for ``within`` seconds at most."""
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL)


def destroy(group: Any = None) -> None:
    """Destroy process groups as torch's ``destroy_process_group`` does, and keep the objects for a second."""
    # Right after a collective, one of gloo's threads may still need the GIL, to release a tensor. If a DDP wrapper held
    # the group last, it would end the group meanwhile: it waits for that thread, and holds the GIL for ever.
    kept = list(groups_by_name().values())
    _destroy_process_group(group)
    timer = threading.Timer(_KEPT_FOR, kept.clear)
    timer.daemon = True
    timer.start()


def _follow_master(store: GroupStore, told: WorkerSetup) -> None:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT`` to those of rank 0's worker, which may have moved to another host."""
    if told.rank == 0:
        store.set("nbdist/master", f"{told.master_address} {told.master_port}")
    address, _, port = store.get("nbdist/master").decode().partition(" ")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)


def agree_on_backend(store: GroupStore, told: WorkerSetup) -> str:
    """Return the backend that all workers use. The worker of rank 0 chooses it, by the GPUs of all workers."""
    store.set(f"nbdist/gpu of {told.rank}", gpu.identity(told))
    if told.rank == 0:
        gpus = store.multi_get([f"nbdist/gpu of {rank}" for rank in range(told.world_size)])
        store.set("nbdist/backend", choose_backend([each or None for each in gpus]))
    return store.get("nbdist/backend").decode()


def _shut(loops: Sequence[gloo.Loop]) -> int:
    """Shut the connections of process groups, and end waits that gloo forgets; return how many were still open."""
    count = sum(map(gloo.shut, loops))
    # Also if no connection was open: gloo closes the connections to a dead member itself, and forgets cut transfers.
    threading.Thread(target=_end_cut_transfers, name="nbdist-cut-transfers", daemon=True).start()
    return count


def _end_cut_transfers() -> None:
    """End waits for transfers that were cut off halfway, for about 10 seconds; gloo would end them after 30 minutes."""
    cut = CutTransfers()
    for _ in range(_LOOKS_FOR_CUT):
        time.sleep(_LOOK_FOR_CUT_EVERY)
        cut.end()


def _answer() -> None:
    """Answer that this process lives, to `_wait_for_loss_elsewhere` of another member."""


def _is_of_old_group(error: BaseException) -> bool:
    """Return whether the frames of an error hold a destroyed group, or a DDP or FSDP wrapper with such a group."""
    # Some errors of torch do not say that the group is gone, such as those after a restart.
    for frame, _ in walk_tb(error.__traceback__):
        found = frame.f_locals
        wrapper = getattr(found.get("self"), "__dict__", {})  # of DDP or FSDP, if this is a method of one
        for group in (found.get("group"), wrapper.get("process_group")):
            if isinstance(group, dist.ProcessGroup) and not is_process_group_known(group):
                return True
    return False


def _comes_to_wait(ident: int) -> bool:
    def place() -> tuple[int, int] | None:
        frame = thread_frames().get(ident)
        return None if frame is None else (id(frame), frame.f_lasti)

    began = place()
    while place() == began:
        call = gloo.call_of(ident)
        time.sleep(_LOOK_EVERY)
        # Look twice: a thread that computes waits now and then for memory, or for the other threads of a product.
        if call[0] not in ("running", "-1") and gloo.call_of(ident) == call:
            return True
    return False


def _collective_of(ident: int) -> tuple[bool, str | None]:
    """Return whether a thread waits in a collective, and the name of the group; None where the group is unknown."""
    # A thread that waits in C++ is in a system call, and its innermost Python frame is the one that called into C++.
    frame = thread_frames().get(ident)
    if frame is None or gloo.call_of(ident)[0] == "running":
        return False, None
    if not is_torchs(frame.f_code.co_filename):
        return gloo.method_called(frame) == "wait", None  # ``wait`` of the handle of an asynchronous collective
    while frame is not None and is_torchs(frame.f_code.co_filename):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "group" in frame.f_locals:
            group = frame.f_locals["group"]
            return True, getattr(dist.group.WORLD if group is None else group, "group_name", None)
        frame = frame.f_back
    return True, None
