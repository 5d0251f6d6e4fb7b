"""`RemoteLauncher`: what launchers have in common whose workers run on other hosts. See `nbdist.cluster.hosts`.

A subclass makes keepers come: a person starts them (`JoinLauncher`), or a scheduler does. A worker that is asked for
waits here until a keeper has room for it. The worker of rank 0 is placed first: its host is the ``MASTER_ADDR`` of all.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nbdist.cluster.hosts import keeper
from nbdist.cluster.hosts.group_board import Boards, serve_boards
from nbdist.cluster.hosts.hub import Hub, KeeperMember
from nbdist.cluster.kernels.relay import Parcel, Relay
from nbdist.cluster.processes.launchers.contract import OnEnd, StartedWorker
from nbdist.cluster.processes.probe import ANSWER_WITHIN, Probe
from nbdist.cluster.processes.run_directory import make_folder
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.processes.worker_processes import Processes
from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.rpc.futures import Future as RpcFuture

if TYPE_CHECKING:
    from nbdist.cluster.processes.group_store import GroupStores
    from nbdist.cluster.spec import Spec

__all__ = ["RemoteLauncher"]

_STARTS_WITHIN = 600.0
"""Seconds for a keeper to start a worker. `Lifecycle` has a shorter limit, the user's."""
_ENDS_WITHIN = 10.0
"""Seconds for all keepers to end their workers."""


class _Wanted(NamedTuple):
    """A worker that has been asked for and has no keeper yet."""

    setup: WorkerSetup
    connection: dict[str, Any]
    environment: dict[str, str]
    started: Future[StartedWorker]


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
        self._lock = threading.RLock()
        self._wanted: dict[str, _Wanted] = {}
        self._placed: dict[str, KeeperMember] = {}
        """The keeper of each worker that lives, or that its keeper starts."""
        self._relays: dict[str, Relay] = {}
        self._words: dict[str, str] = {}
        self._master: tuple[str, int] | None = None
        """The address and the port of ``env://`` for all workers, on the host of rank 0."""
        self._prepared: dict[int, Future[None]] = {}
        """By incarnation of a keeper: the future of its imports of the modules to preload."""
        self._folder = make_folder()
        # It runs no worker. It removes the run directory if this process is killed.
        self._warden = Processes(self._folder, lambda name, code: None, fork=False)
        self._boards = Boards()
        try:
            self.hub = Hub(
                host,
                self._folder,
                spec.ports,
                on_arrival=self._place,
                on_gone=self._on_gone,
                on_end=self._on_worker_end,
                on_parcels=self._on_parcels,
            )
        except BaseException:
            self._warden.close()
            raise
        serve_boards(self._boards)

    # -- the contract -------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The run directory on this host, with the sockets at which kernels seem to answer; `close` removes it."""
        return self._folder

    @property
    def rpc(self) -> Mapping[str, Any]:
        """The options by which this process's agent joins the RPC world: the members meet at the hub."""
        return {"init_method": self.hub.meeting, "secret": self.hub.secret, "host": self.hub.host}

    @property
    def group_stores(self) -> GroupStores:
        """The stores at which the workers form their process groups: in this process's memory, by RPC."""
        return self._boards

    def preload(self, modules: Sequence[str]) -> Future[None]:
        """Let each keeper import modules before its first worker. The future is done; errors come with the worker."""
        self._modules = tuple(modules)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[StartedWorker]:
        """Start a worker as soon as a keeper has room for it; return a future."""
        connection = json.loads(Path(setup.connection_file).read_text())
        started: Future[StartedWorker] = Future()
        self._want(_Wanted(setup, connection, dict(environment), started))
        return started

    def _want(self, wanted: _Wanted) -> None:
        """Give a worker to a keeper as soon as one has room for it."""
        with self._lock:
            self._wanted[wanted.setup.name] = wanted
        self._provide()
        self._place()

    def _provide(self) -> None:
        """Make keepers come for the workers in `_wanted` that have none. A person does that, or a subclass."""

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended or its host cannot be reached. Does not wait."""
        self._tell(name, keeper.signal_worker, name, number)

    def probe(self, name: str) -> Future[Probe]:
        """Ask a worker's host about the worker's process; return the future of the answer."""
        found: Future[Probe] = Future()
        asked = self._tell(name, keeper.probe_worker, name, timeout=2 * ANSWER_WITHIN)
        if asked is None:
            found.set_result(Probe())
        else:
            asked.then(lambda done: _pass_on(done, found))
        return found

    def advice(self) -> str:
        """Return what a person can do so that more workers start; a subclass knows more."""
        return ""

    def last_words(self, name: str) -> str:
        """Return the end of what a worker wrote to standard error outside of cells, which its keeper has sent."""
        return self._words.get(name, "")

    def close(self) -> int:
        """Let all keepers end their workers and themselves; remove the run directory.

        Returns how many workers are on hosts that have not answered. Their keepers end them once they find that this
        process has gone.
        """
        with self._lock:
            members, wanted, relays = list(self.hub.members), list(self._wanted.values()), list(self._relays.values())
            self._wanted.clear()
            self._relays.clear()
        for each in wanted:
            each.started.cancel()
        ending = [(member, self.hub.call(member, keeper.end, timeout=_ENDS_WITHIN)) for member in members]
        left = 0
        for member, end in ending:
            try:
                end.wait()
            except WorkerLost:
                pass  # it has ended before its answer went out
            except Exception:
                with self._lock:
                    left += sum(placed is member for placed in self._placed.values())
        serve_boards(None)
        self.hub.close()
        for relay in relays:
            relay.close()
        self._warden.close()
        return left

    # -- placing ------------------------------------------------------------------------------

    def _place(self) -> None:
        """Give the workers that are asked for to keepers that have room, the worker of rank 0 first. Does not wait."""
        with self._lock:
            for wanted in sorted(self._wanted.values(), key=lambda each: each.setup.rank):
                if self._master is None and wanted.setup.rank != 0:
                    return  # until the worker of rank 0 has its place
                member = self._with_room_for(wanted.setup)
                if member is None:
                    return
                name = wanted.setup.name
                del self._wanted[name]
                self._placed[name] = member
                member.workers.add(name)
                threading.Thread(
                    target=self._start_on, args=(member, wanted), name=f"nbdist-start-{name}", daemon=True
                ).start()

    def _with_room_for(self, setup: WorkerSetup) -> KeeperMember | None:
        """Return the keeper for a worker: the one that it had, else the first with room; None if there is none."""
        with self.hub.lock:
            had = [member for member in self.hub.members if setup.name in member.workers]
            free = [member for member in self.hub.members if len(member.workers) < member.room]
        return next(iter([*had, *free]), None)

    def _start_on(self, member: KeeperMember, wanted: _Wanted) -> None:
        """Start a worker by its keeper, and settle its future. In a thread of its own, because it waits."""
        name = wanted.setup.name
        try:
            self._prepare(member)
            if self._master is None:
                self._master = member.address, self.hub.call(member, keeper.free_port).wait()
                self._place()  # the others
            address, port = self._master
            setup = msgspec.structs.replace(wanted.setup, master_address=address, master_port=port)
            ports = {
                key.removesuffix("_port"): value for key, value in wanted.connection.items() if key.endswith("_port")
            }

            def carry(batch: list[Parcel]) -> None:
                self.hub.call(member, keeper.deliver, name, batch, timeout=0).wait()

            with self._lock:
                earlier = self._relays.pop(name, None)
            if earlier is not None:
                earlier.close()
            relay = Relay.before_notebook(wanted.connection["ip"], ports, carry)
            with self._lock:
                self._relays[name] = relay
            asked = self.hub.call(
                member,
                keeper.start_worker,
                setup.encode(),
                wanted.connection,
                wanted.environment,
                timeout=_STARTS_WITHIN,
            )
            place = asked.wait()
        except BaseException as error:
            with self._lock:
                self._placed.pop(name, None)
            if isinstance(error, WorkerLost) and member not in self.hub.members:
                self._want(wanted)  # the keeper was lost just now: another one may have room
            elif wanted.started.set_running_or_notify_cancel():
                wanted.started.set_exception(error)
        else:
            if wanted.started.set_running_or_notify_cancel():
                wanted.started.set_result(place)

    def _prepare(self, member: KeeperMember) -> None:
        """Let a keeper import the modules to preload, once. Raises UsageError if it cannot."""
        with self._lock:
            first = member.record.incarnation not in self._prepared
            done = self._prepared.setdefault(member.record.incarnation, Future())
        if first:
            try:
                if self._modules:
                    self.hub.call(member, keeper.preload, self._modules, timeout=_STARTS_WITHIN).wait()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        done.result()

    # -- what keepers say ---------------------------------------------------------------------

    def _on_parcels(self, name: str, batch: list[Parcel]) -> None:
        """Pass messages of a worker's kernel on to the notebook."""
        relay = self._relays.get(name)
        if relay is not None:
            relay.deliver(batch)

    def _on_worker_end(self, name: str, how: int | str, words: str) -> None:
        """Note that a worker has ended, as its keeper reports."""
        with self._lock:
            self._words[name] = words
            if self._placed.pop(name, None) is None:
                return  # its keeper was lost before
        self._on_end(name, how)

    def _on_gone(self, member: KeeperMember, why: str) -> None:
        """Note that a keeper is lost, and its workers with it. Called by the hub's agent, so another thread does it."""

        def lose() -> None:
            with self._lock:
                names = [name for name, placed in self._placed.items() if placed is member]
                for name in names:
                    del self._placed[name]
                    self._words[name] = ""
            for name in names:
                self._on_end(name, f"is lost: its keeper on {member.host} {why}")
            self._provide()

        threading.Thread(target=lose, name="nbdist-keeper-lost", daemon=True).start()

    def _tell(self, name: str, function: Any, *arguments: Any, timeout: float = -1.0) -> RpcFuture[Any] | None:
        """Call a function in the keeper of a worker; None if the worker has none, or its keeper is gone."""
        member = self._placed.get(name)
        if member is None:
            return None
        try:
            return self.hub.call(member, function, *arguments, timeout=timeout)
        except NbdistError:
            return None


def _pass_on(done: RpcFuture[Any], to: Future[Any]) -> None:
    """Settle a future of Python's with the outcome of a future of RPC's that is done."""
    try:
        to.set_result(done.value())
    except BaseException as error:
        to.set_exception(error)
