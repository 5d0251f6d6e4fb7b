"""`RemoteLauncher`: the common part of the launchers whose workers run on other hosts. See `nbdist.cluster.hosts`.

A *keeper* is a process on another host that starts and ends the workers there. A person starts keepers
(`JoinLauncher`), or a subclass lets a scheduler start them. A worker that must start waits here until a keeper has room
for it. The worker of rank 0 is placed first: its host is the ``MASTER_ADDR`` of all workers that start from then on.
The life of a start (`_Start`)::

    wanted ── a keeper has room ──> placed ── its process runs ──> running ── it ends, or its keeper is lost ──> over
      ^                               │                               (calls `on_end`)
      └─── its keeper was lost ───────┤
                                      └── it cannot start (the future fails) ──────────────────────────────────> over

A caller that cancels the future of a start gives the start up: if its process runs already, or starts later, the
process is killed. Only the thread that takes a start out of `placed` reports its end or starts it again, so each
happens once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from nbdist.cluster.hosts.code_copy import pack
from nbdist.cluster.hosts.group_board import Boards
from nbdist.cluster.hosts.hub import Hub, KeeperMember
from nbdist.cluster.jupyter.relay import Relay
from nbdist.cluster.jupyter.waiting_output import Parcel
from nbdist.cluster.processes.launchers.contract import GIVEN_UP, OnEnd, StartedWorker
from nbdist.cluster.processes.probe import ANSWER_WITHIN, Probe
from nbdist.cluster.processes.run_directory import make_folder, remove_folder
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.processes.worker_processes import Processes
from nbdist.cluster.spec import Spec
from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.rpc.asking import ask_each
from nbdist.rpc.futures import Future as RpcFuture
from nbdist.rpc.named import call_method

_STARTS_WITHIN = 600.0  # seconds for a keeper to start a worker; `Lifecycle` applies the user's limit, usually shorter
_ENDS_WITHIN = 10.0  # seconds for all keepers to end their workers


class _Start:
    """One start of a worker: its setup, its keeper, and its progress."""

    def __init__(self, setup: WorkerSetup, connection: dict[str, Any], environment: dict[str, str]) -> None:
        self.setup, self.name = setup, setup.name
        self.connection = connection
        self.environment = environment
        self.future: Future[StartedWorker] = Future()
        self.asked = time.monotonic()  # when `RemoteLauncher.start` was called
        self.member: KeeperMember | None = None  # the keeper that starts the worker; None while no keeper has room
        self.runs = False  # True once the worker's process runs
        # The exit code of the process, or a text, if the keeper reported its end before its start; else None.
        self.how: int | str | None = None

    def fail(self, error: BaseException) -> bool:
        """Fail the start's future; return False if the start was given up."""
        if is_wanted := self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
        return is_wanted


class RemoteLauncher:
    """The common part of launchers for other hosts. See `Launcher` for its methods."""

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        """Open the entrance of the cluster. Raises UsageError if the spec does not name this host's address."""
        host = spec.host or os.environ.get("NBDIST_HOST")
        if host is None:
            raise UsageError(
                "workers on other hosts need an address at which they reach this one: name it with --host ADDRESS, "
                "Cluster(host=...) or NBDIST_HOST"
            )
        self.spec = spec
        self._on_end = on_end
        self._modules: tuple[str, ...] = ()
        self._lock = threading.RLock()  # taken before the hub's lock, never after it
        self.wanted: dict[str, _Start] = {}  # the starts that have no keeper, by the worker's name
        self._missed: set[str] = set()  # the workers whose last start was given up before a keeper had room
        # New workers that start to join a running cluster: they do not wait for another keeper if their own is lost.
        self._joining: set[str] = set()
        self.on_arrival: Callable[[], object] = lambda: None
        """Called when a keeper has joined, after it got the workers that waited for a keeper. Must be quick."""
        # The starts that have a keeper, and whose process runs or may still start, by the worker's name.
        self.placed: dict[str, _Start] = {}
        self._relays: dict[str, Relay] = {}
        self._words: dict[str, str] = {}
        # ``MASTER_ADDR`` and ``MASTER_PORT`` of the workers that start now; None while rank 0 waits for a keeper.
        self._master: tuple[str, int] | None = None
        # `_master` before rank 0 was restarted; used again if rank 0 starts on the same host.
        self._last_master: tuple[str, int] | None = None
        self._packed = -math.inf, b""  # when Python files were last packed, and their archive
        self._packing = threading.Lock()
        self.is_closing = False
        """True once the cluster ends, or has ended."""
        self.group_stores = Boards()
        """The stores with which workers form their process groups: in this process's memory, reached by RPC."""
        with contextlib.ExitStack() as undo:
            self.folder = make_folder()
            """The run directory on this host. Relays listen at its sockets in place of the kernels."""
            undo.callback(remove_folder, self.folder)
            # This zygote (a process that starts workers) starts none. It removes the run directory if this process
            # is killed.
            self._warden = Processes(self.folder, fork=False)
            undo.callback(self._warden.close)
            self.hub = Hub(
                host,
                self.folder,
                spec.ports,
                on_arrival=self._on_arrival,
                on_gone=self._on_gone,
                on_end=self._on_worker_end,
                on_parcels=self._on_parcels,
            )
            self.rpc = {"init_method": self.hub.meeting, "secret": self.hub.secret, "host": host}
            """The options with which this process's agent joins the RPC world, whose members meet at the hub."""
            undo.pop_all()

    # -- the contract -------------------------------------------------------------------------

    def preload(self, modules: Sequence[str]) -> Future[None]:
        """Let each keeper import modules before it starts its first worker."""
        self._modules = tuple(modules)
        done: Future[None] = Future()
        # At once: if an import fails, the starts of that keeper's workers fail.
        done.set_result(None)
        return done

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[StartedWorker]:
        """Start a worker as soon as a keeper has room for it; return a future."""
        connection = json.loads(Path(setup.connection_file).read_text())
        start = _Start(setup, connection, dict(environment))
        start.future.add_done_callback(lambda _: self._forget_if_given_up(start))
        self._want(start)
        return start.future

    def _want(self, start: _Start) -> None:
        """Give a start to a keeper as soon as one has room for it."""
        with self._lock:
            if self.is_closing:
                start.future.cancel()
                return
            self.wanted[start.name] = start
            self._missed.discard(start.name)
            if start.setup.rank == 0 and self._master is not None:
                self._last_master, self._master = self._master, None
                # Until it has a place, the others wait: their ``MASTER_ADDR`` is its host.
        self._provide()
        self._place()

    def _forget_if_given_up(self, start: _Start) -> None:
        if start.future.cancelled():
            with self._lock:
                if self.wanted.get(start.name) is not start:
                    return  # it has a keeper: `_start_on` kills its process
                del self.wanted[start.name]
                self._has_no_place(start)
            self._on_end(start.name, GIVEN_UP)
            self._place()

    def _has_no_place(self, start: _Start) -> None:
        """Note that a start is over, and that no keeper had room for it. The caller holds the lock."""
        self._missed.add(start.name)
        self._restore_master(start)

    def _refuse(self, start: _Start, error: BaseException) -> None:
        """End a start with an error, because no keeper will come for it. The caller holds the lock."""
        del self.wanted[start.name]
        self._has_no_place(start)
        start.fail(error)

    def _restore_master(self, start: _Start) -> None:
        with self._lock:
            if start.setup.rank == 0 and self._master is None:
                self._master = self._last_master

    def _on_arrival(self) -> None:
        """Start workers that wait for a keeper, because one has joined. Must be quick."""
        self._place()
        self.on_arrival()

    def _provide(self) -> None:
        """Start keepers for the workers in `wanted`. Does nothing here: a person starts keepers, or a subclass."""

    def _release(self, member: KeeperMember) -> None:
        """Free the resources of a lost keeper, such as its Ray actor. Does nothing here. A subclass's may wait."""

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended or its host cannot be reached. Does not wait."""
        self._tell(name, "signal", name, number)

    def probe(self, name: str) -> Future[Probe]:
        """Ask a worker's host about the worker's process; return the future of the answer."""
        found: Future[Probe] = Future()
        if (asked := self._tell(name, "probe", name, timeout=2 * ANSWER_WITHIN)) is None:
            found.set_result(Probe())
        else:
            asked.then(lambda done: _pass_on(done, found))
        return found

    def advice(self) -> str:
        """Return a text that tells the user how to start missing workers. Empty here; a subclass may return one."""
        return ""

    def _missing(self) -> int:
        """Return the number of workers for which no keeper has had room."""
        with self._lock:
            return len(self.wanted) + len(self._missed)

    def last_words(self, name: str) -> str:
        """Return the last text that a worker wrote to standard error outside of cells, which its keeper has sent."""
        return self._words.get(name, "")

    def close(self) -> int:
        """Let all keepers end their workers and themselves; remove the run directory."""
        with contextlib.ExitStack() as steps:  # every step runs, also after Ctrl-C
            steps.callback(self._warden.close)
            steps.callback(self._close_relays)
            steps.callback(self.hub.close)
            self.hub.revoke()
            with self._lock:
                self.is_closing = True
                members, starts = list(self.hub.members), [*self.wanted.values(), *self.placed.values()]
                self.wanted.clear()
            for start in starts:
                start.future.cancel()
            asked = {member.record.name: ("keeper", "end") for member in members}
            ended = ask_each(self.hub.agent, call_method, asked, timeout=_ENDS_WITHIN, label="keeper.end")
            # A lost keeper has ended before it could send its answer. Without another answer, its workers may live.
            silent = {name for name, error in ended.errors.items() if not isinstance(error, WorkerLost)}
            with self._lock:
                placed = [start.member for start in self.placed.values()]
        # Their keepers end these once they notice that this process has gone.
        return sum(member is not None and member.record.name in silent for member in placed)

    def _close_relays(self) -> None:
        with self._lock:
            relays, self._relays = list(self._relays.values()), {}
        for relay in relays:
            relay.close()

    # -- placing ------------------------------------------------------------------------------

    def _place(self) -> None:
        """Start the workers in `wanted` for which a keeper has room, the worker of rank 0 first. Does not wait."""
        with self._lock:
            if self.is_closing:
                return
            for start in sorted(self.wanted.values(), key=lambda each: each.setup.rank):
                if self._master is None and start.setup.rank != 0:
                    return  # until the worker of rank 0 has its place
                if start.name in self.placed:
                    continue  # the worker's earlier start was given up, but its process has not ended
                if (member := self._keeper_for(start.setup)) is None:
                    continue
                del self.wanted[start.name]
                self.placed[start.name] = start
                start.member = member
                member.workers.add(start.name)
                threading.Thread(
                    target=self._start_on, args=(member, start), name=f"nbdist-start-{start.name}", daemon=True
                ).start()

    def _keeper_for(self, setup: WorkerSetup) -> KeeperMember | None:
        """Return a worker's keeper: the one that it had, else the first with room; None if no keeper has room."""
        with self.hub.lock:
            members = [member for member in self.hub.members if self._suits(member, setup)]
        had = [member for member in members if setup.name in member.workers]
        return next(iter([*had, *(member for member in members if len(member.workers) < member.room)]), None)

    def _suits(self, member: KeeperMember, setup: WorkerSetup) -> bool:
        """Return whether a keeper may have this worker, if it has room."""
        return True

    def _start_on(self, member: KeeperMember, start: _Start) -> None:
        """Let a keeper start a worker, and settle the start's future. Runs in a thread of its own, because it waits."""
        name = start.name
        try:
            self._send_code(member, start.asked)
            self._prepare(member)
            if start.setup.rank == 0:
                self._set_master(member)
            address, port = self._master or ("", 0)
            setup = msgspec.structs.replace(start.setup, master_address=address, master_port=port)

            def carry(batch: list[Parcel]) -> None:
                self.hub.call(member, "deliver", name, batch, timeout=0).wait()

            with self._lock:
                earlier = self._relays.pop(name, None)
            if earlier is not None:
                earlier.close()
            relay = Relay.before_notebook(start.connection, carry)
            with self._lock:
                self._relays[name] = relay
            arguments = setup.encode(), start.connection, start.environment
            place = self.hub.call(member, "start", *arguments, timeout=_STARTS_WITHIN).wait()
        except BaseException as error:  # the keeper's, RPC's, those of packing code: a caller waits for the future
            is_lost = isinstance(error, WorkerLost) and self.hub.has_lost(member)
            was_mine = self._take_out(start)
            if was_mine and is_lost and name not in self._joining and not start.future.cancelled():
                self._want(start)  # another keeper may have room
                return
            self._restore_master(start)
            if not is_lost:  # the worker's process may run, or may still start
                with contextlib.suppress(NbdistError):
                    self.hub.call(member, "signal", name, signal.SIGKILL)
            if not start.fail(error) and (was_mine or start.how is not None):  # else `_lose` calls `_on_end`
                self._on_end(name, GIVEN_UP)
            self._place()
            return
        with self._lock:
            start.runs = start.future.set_running_or_notify_cancel()
            how = start.how
        if start.runs:
            start.future.set_result(place)
            if how is not None:
                self._on_end(name, how)
        elif how is None:  # given up: `_on_worker_end` takes it out
            self._tell(name, "signal", name, signal.SIGKILL)
        else:
            self._on_end(name, GIVEN_UP)
        if self.hub.has_lost(member):  # `_lose` may have run before `runs` was set
            self._lose(member, "is lost")

    def _set_master(self, member: KeeperMember) -> None:
        """Choose the address and port of ``env://`` on the host of rank 0; start the workers that wait for them."""
        master = self._last_master
        if master is None or master[0] != member.address:
            master = member.address, self.hub.call(member, "free_port").wait()
        with self._lock:
            self._master = master
        self._place()

    def _take_out(self, start: _Start) -> bool:
        """Take a start out of `placed`; return False if another thread has done that."""
        with self._lock:
            if self.placed.get(start.name) is not start:
                # Another thread reports its end, or starts it again.
                return False
            del self.placed[start.name]
            return True

    def send_code(self) -> None:
        """With ``--sync-code``, send the hosts of workers the Python files of the working directory as they are now."""
        since = time.monotonic()
        for start in list(self.placed.values()):
            if start.member is not None:
                with contextlib.suppress(NbdistError):  # its keeper is gone: its worker is lost
                    self._send_code(start.member, since)

    def _send_code(self, member: KeeperMember, since: float) -> None:
        """Send a keeper the Python files of the working directory, unless it has the same files already."""
        if not self.spec.sync_code:
            return
        with member.sending_code:
            packed = self._pack_code(since)
            digest = hashlib.sha256(packed).digest()
            if member.code != digest:
                self.hub.call(member, "take_code", packed, timeout=_STARTS_WITHIN).wait()
                member.code = digest

    def _pack_code(self, since: float) -> bytes:
        """Return an archive of the Python files of the working directory as they were at a moment after ``since``."""
        with self._packing:
            if self._packed[0] < since:  # else workers that start together share it, and get the same code
                self._packed = time.monotonic(), pack(Path.cwd())
            return self._packed[1]

    def _prepare(self, member: KeeperMember) -> None:
        """Let a keeper import the modules to preload, once."""
        if not self._modules:
            return
        with self._lock:
            if member.prepared is None:
                member.prepared = self.hub.call(member, "preload", self._modules, timeout=_STARTS_WITHIN)
        member.prepared.wait()

    # -- reports of keepers -------------------------------------------------------------------

    def _on_parcels(self, name: str, batch: list[Parcel]) -> None:
        if (relay := self._relays.get(name)) is not None:
            relay.deliver(batch)

    def _on_worker_end(self, name: str, how: int | str, words: str) -> None:
        with self._lock:
            if (start := self.placed.pop(name, None)) is None:
                return  # its keeper was lost before
            self._words[name] = words
            if not (start.runs or start.future.cancelled()):
                start.how = how  # `_start_on` has not received the answer yet that the worker has started
                return
        self._tell_end(start, how)
        self._place()  # the next start of the worker may have waited for this

    def _on_gone(self, member: KeeperMember, why: str) -> None:
        """Note that a keeper is lost, and its workers with it."""
        # The hub's agent calls this, and must not wait.

        def lose() -> None:
            self._release(member)
            self._lose(member, why)
            self._provide()
            self._place()

        threading.Thread(target=lose, name="nbdist-keeper-lost", daemon=True).start()

    def _lose(self, member: KeeperMember, why: str) -> None:
        """End the starts of a lost keeper whose futures are done. A second call does nothing."""
        with self._lock:
            # For the others, `_start_on` still waits for the keeper's answer, and handles the loss.
            lost = [start for start in self.placed.values() if start.member is member and start.future.done()]
            for start in lost:
                del self.placed[start.name]
                self._words[start.name] = ""
        for start in lost:
            self._tell_end(start, f"is lost: its keeper on {member.host} {why}")

    def _tell_end(self, start: _Start, how: int | str) -> None:
        """Tell the cluster that a worker's process has ended, or that a start was given up and has no process."""
        self._on_end(start.name, how if start.runs else GIVEN_UP)

    def _tell(self, name: str, method: str, *arguments: Any, timeout: float = -1.0) -> RpcFuture[Any] | None:
        """Call a method of the keeper of a worker; None if the worker has none, or its keeper is gone."""
        start = self.placed.get(name)
        with contextlib.suppress(NbdistError):
            if start is not None and start.member is not None:
                return self.hub.call(start.member, method, *arguments, timeout=timeout)
        return None


def _pass_on(done: RpcFuture[Any], to: Future[Any]) -> None:
    try:
        to.set_result(done.value())
    except BaseException as error:  # the keeper's, whatever it is, for whoever waits for the answer
        to.set_exception(error)
