"""`RayLauncher`: workers that a Ray cluster places. Ray chooses the hosts, and gives each worker its GPUs.

::

    this process                   a host of Ray's
    RayLauncher ── ray.remote ──> actor ── starts ──> keeper (`python -m nbdist worker`) ── starts ──> worker
         │ <────────────────── RPC ───────────────────> │

There is one actor for each worker, and one placement group for all workers. The actor only starts the keeper, the
process that starts the worker, and waits for the keeper's end. The keeper ends with the actor, even if Ray kills the
actor with SIGKILL. When a keeper is lost, the launcher kills its actor, and the next start of the worker asks Ray for
another actor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nbdist.amounts import counted
from nbdist.cluster.hosts.hub import KeeperMember
from nbdist.cluster.hosts.launchers.ray_actor import RayActor, address_of_this_node
from nbdist.cluster.hosts.launchers.ray_room import wait_for_room
from nbdist.cluster.hosts.launchers.remote import RemoteLauncher
from nbdist.cluster.processes.launchers.contract import OnEnd
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.spec import Spec
from nbdist.cluster.undoing import undone_by
from nbdist.errors import ResourceError, UsageError

_ROOM_WITHIN = 30.0  # seconds to wait for Ray to have room for all workers, without the user's timeout
# The number of tries to start a Ray on this machine, and the seconds for each: Ray takes 15 on two idle cores.
_TRIES, _STARTS_WITHIN = 2, 60
_INVITED_FOR = 600.0  # seconds for which the invitation that an actor gets is valid
_USUAL_TIMEOUT = 120.0  # a cluster's default timeout, in seconds
_HEAD_ANSWERS_WITHIN = 3.0  # seconds for Ray's head to accept a connection
_LEAVES_WITHIN = 5.0  # seconds for Ray to free the room of a cluster that ends
# The most actors to ask for, one after another, for one start of a worker, if they die before their keeper joins.
_ACTORS_TRIED = 3


_starting = threading.Lock()  # held while a Ray starts here: `_small_agent` replaces a function of Ray's meanwhile


class RayLauncher(RemoteLauncher):
    """The launcher for Ray. See `Launcher` for its methods."""

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        """Find Ray, or start it, and reserve room for all workers."""
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "the launcher ray needs Ray, which is not installed: pip install 'nbdist[ray]', on all hosts"
            ) from error
        self._ray: Any = ray
        self.actors: dict[str, _Placed] = {}  # of each worker that has one, by the worker's name
        # By worker's name: how many of its actors have died one after another before their keeper joined.
        self._died: Counter[str] = Counter()
        self._group: Any = None
        self._disconnects = _connect(ray, spec)  # True if this launcher has connected this process to Ray
        with undone_by(self._leave_ray):  # a Ray that was started here would stay
            super().__init__(replace(spec, host=spec.host or address_of_this_node()), on_end)
        with undone_by(self.close):  # Ray would keep the room
            self._reserve(spec)

    def _reserve(self, spec: Spec) -> None:
        """Reserve room for all workers, or for none. Raises ResourceError if Ray has no room for all in time."""
        from ray.util.placement_group import placement_group

        if (gpus := spec.gpus_per_worker) is None:
            gpus = 1 if self._ray.cluster_resources().get("GPU", 0) >= spec.count else 0
        self._needs = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}
        self._group = placement_group([self._needs] * spec.count, strategy=spec.placement.upper())
        within = spec.timeout if spec.timeout != _USUAL_TIMEOUT else _ROOM_WITHIN
        wait_for_room(self._ray, self._group, self._needs, spec.count, within)

    def _provide(self) -> None:
        """Ask Ray for an actor for each worker that waits for a keeper and has none."""
        with self._lock:
            starts = [start for name, start in self.wanted.items() if name not in self.actors and not self.is_closing]
            if not starts:
                return
            lost = self._lost_head()  # if it is lost, to ask would block, and after 60 s Ray would end us
            for start in starts:
                if lost:
                    error = ResourceError(
                        f"Ray cannot start {start.name}: {lost}. End this cluster now, %dist_shutdown: Ray ends the "
                        "processes that stay connected to it. Then start another cluster"
                    )
                    self._refuse(start, error)
                else:
                    self.make_actor(start.setup)

    def _lost_head(self) -> str:
        """Return why Ray's head, the process that keeps Ray's tables, cannot be reached; "" if it can be."""
        try:
            host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_ANSWERS_WITHIN).close()
        except OSError as error:
            return f"its head at {host}:{port} cannot be reached ({error})"
        except Exception as error:  # Ray raises errors of many classes
            return f"this process is not connected to it ({error})"
        return ""

    def _keeper_for(self, setup: WorkerSetup) -> KeeperMember | None:
        """Return the keeper that the worker's own actor has started, once that has joined."""
        if (placed := self.actors.get(setup.name)) is None:
            return None
        with self.hub.lock:
            came = next((member for member in self.hub.members if member.token == placed.token), None)
        if came is not None:
            self._died.pop(setup.name, None)
        return came

    def make_actor(self, setup: WorkerSetup) -> None:
        """Let Ray start an actor for a worker; the actor's keeper will join later. The caller holds the lock."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        invitation = self.hub.invite(_INVITED_FOR, 1)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=setup.rank)
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0), "max_restarts": 0}
        actor = self._ray.remote(RayActor).options(scheduling_strategy=strategy, **options).remote()
        placed = self.actors[setup.name] = _Placed(actor, invitation.token)
        ended = actor.run.remote(msgspec.json.encode(invitation))
        threading.Thread(
            target=self._watch, args=(setup.name, placed, ended), name=f"nbdist-ray-{setup.name}", daemon=True
        ).start()

    def _watch(self, name: str, placed: _Placed, ended: Any) -> None:
        """Wait for the end of an actor's `RayActor.run`. If its keeper never joined, fail the start of the worker."""
        why, died = "its keeper has ended, see Ray's worker logs", False
        try:
            self._ray.get(ended)
        except Exception as error:  # Ray raises errors of many classes
            died = isinstance(error, self._ray.exceptions.RayActorError)
            why = str(error).strip().partition("\n")[0].rstrip(".")
        with self._lock:
            if self.actors.get(name) is not placed or placed.token in self.hub.came:
                # Its keeper was lost, or the cluster ends; or the keeper has joined, and the hub notices its end.
                return
            del self.actors[name]
            self._died[name] += died
            # Ray takes half a minute to notice that a node is frozen or cut off, and still places actors there, which
            # die when Ray notices. So an actor that has died is replaced.
            again = died and self._died[name] < _ACTORS_TRIED and name in self.wanted
            if not again:
                self._died.pop(name, None)  # the next restart may try as often
                if (start := self.wanted.get(name)) is not None:
                    self._refuse(start, ResourceError(f"Ray has not started {name}: {why}. Restart it to try again"))
        self._kill(placed)
        if again:
            self._provide()

    def _kill(self, placed: _Placed) -> None:
        # Also frees the actor's place.
        with contextlib.suppress(Exception):  # Ray's errors, of many classes, such as for an actor that has ended
            self._ray.kill(placed.actor, no_restart=True)

    def _release(self, member: KeeperMember) -> None:
        """Let Ray end the actor of a keeper that is lost: the actor may still hold its place."""
        self._kill_all(member.token)

    def advice(self) -> str:
        """Return a text that tells where to look if workers have not joined; empty if no worker is missing."""
        missing = self._missing()
        said = f"Ray has reserved room for {counted(missing, 'worker')} that did not join: see Ray's worker logs"
        return said if missing else ""

    def close(self) -> int:
        """End all workers, give back the room that Ray has reserved, and end Ray if this launcher has started it."""
        with contextlib.ExitStack() as steps:  # every step runs, also after Ctrl-C
            steps.callback(self._leave_ray)
            steps.callback(self._kill_all)
            return super().close()

    def _kill_all(self, token: str | None = None) -> None:
        """Let Ray end all actors, or those whose keepers have this token."""
        with self._lock:
            gone = {name: placed for name, placed in self.actors.items() if token in (None, placed.token)}
            self.actors = {name: placed for name, placed in self.actors.items() if name not in gone}
        for placed in gone.values():
            self._kill(placed)

    def _leave_ray(self) -> None:
        """Give back the placement group. Disconnect from Ray; this ends Ray if this launcher has started it."""
        group, self._group = self._group, None
        if self._disconnects:
            # Frees the group, too. To ask for that would block if Ray's head is lost, and after 60 s Ray would end us.
            self._ray.shutdown()
        elif group is not None:
            # The user's own connection stays, so Ray must be asked: in a thread, because that may block.
            removing = threading.Thread(target=_remove, args=(group,), name="nbdist-ray-leaving", daemon=True)
            removing.start()
            removing.join(_LEAVES_WITHIN)


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(Exception):  # Ray raises errors of many classes
        remove_placement_group(group)


class _Placed(NamedTuple):
    """An actor that Ray was asked for, and the token of its keeper's invitation."""

    actor: Any
    token: str


def _connect(ray: Any, spec: Spec) -> bool:
    """Connect this process to Ray, unless it is connected; return True if this call has connected it."""
    if ray.is_initialized():
        return False
    address = spec.address or os.environ.get("RAY_ADDRESS")
    if address is not None and address.startswith("ray://"):
        raise UsageError(
            f"{address} is for clients of Ray outside of its cluster, which workers could not reach: run the notebook "
            "on a host of the Ray cluster, and use --address auto"
        )
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        else:
            _start_here(ray, max(spec.count, os.cpu_count() or 1))
    except Exception as error:  # Ray raises errors of many classes
        told = f"cannot be reached at {address}" if address else "cannot start on this machine"
        raise UsageError(f"Ray {told}: {error}") from error
    return True


def _start_here(ray: Any, cpus: int) -> None:
    """Start a Ray on this machine with room for ``cpus`` workers without GPUs; `ray.shutdown` ends this Ray."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(_STARTS_WITHIN))
    # A busy machine may fail a try.
    for number in range(1, _TRIES + 1):
        before = _children()
        try:
            with _starting, _small_agent(ray):
                ray.init(
                    address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
                )
            return
        except BaseException as error:  # Ctrl-C, too: Ray leaves its processes behind
            _end_rays_processes(_children() - before, str(Path(ray.__file__).parent))
            if number == _TRIES or not isinstance(error, Exception):
                raise


@contextlib.contextmanager
def _small_agent(ray: Any) -> Iterator[None]:
    """Let a Ray that starts during the block run its agent process without the parts for dashboards."""
    # Ray's raylet ends itself if its agent is not up after 15 s. With the packages of the extra `ray[default]`, the
    # agent needs 12 s on two idle cores. Without this extra, Ray runs a smaller agent.
    name = "get_dashboard_dependency_error"
    utils = getattr(getattr(ray, "_private", None), "utils", None)
    plain = getattr(utils, name, None)
    if plain is None:  # this Ray has no such function
        yield
        return
    setattr(utils, name, ImportError)  # what Ray calls returns an error, as if the extra were not installed
    try:
        yield
    finally:
        setattr(utils, name, plain)


def _children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, path.read_text().split()))
    return found


def _end_rays_processes(pids: set[int], folder: str) -> None:
    """Kill the children among ``pids`` that run programs of ``folder``, where Ray is installed; wait for their end."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.fsencode(f"{folder}/") in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
