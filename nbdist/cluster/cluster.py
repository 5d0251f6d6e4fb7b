"""`Cluster`: the workers that one notebook or script drives.

==========  ============================================================  ====================
state       how it is reached                                             what works
==========  ============================================================  ====================
new         the constructor                                               `start`
starting    `start`, or the first method that needs workers               nothing yet
running     all workers are members of the RPC world and process group    everything
ended       `shutdown`, a start that failed, the end of the process       nothing any more
==========  ============================================================  ====================
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from nbdist import durations, registry
from nbdist.amounts import counted
from nbdist.channel.resources import refusals_in_words
from nbdist.cluster import mending
from nbdist.cluster.errors import named_in_errors
from nbdist.cluster.executor import Lanes, WorkerExecutor
from nbdist.cluster.growing import Growth
from nbdist.cluster.hosts.losses import Losses
from nbdist.cluster.interrupting import interrupt_cell, interrupt_workers
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.jupyter_wire import pack
from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.kernels.cells import Cell, CellPart
from nbdist.cluster.kernels.routing import Router
from nbdist.cluster.kernels.workers import StartError, Worker, lost_error
from nbdist.cluster.launching import launcher_of
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.lookout import Lookout
from nbdist.cluster.output.outlet import make_arranger
from nbdist.cluster.output.sinks import Sink, current_sink
from nbdist.cluster.processes import process_memory
from nbdist.cluster.processes.probe import Probe
from nbdist.cluster.processes.setup import AUTO, choose_backend
from nbdist.cluster.spec import Spec, describe_arguments
from nbdist.cluster.targets import means_all, means_one, parse_targets
from nbdist.cluster.worker import collectives
from nbdist.cluster.worker.output import METADATA, drop_value, fence, take_last_value
from nbdist.errors import EncodeError, NbdistError, UnknownWorker, UsageError, WorkerLost
from nbdist.rpc import api, failures
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.references.rref import RRef
from nbdist.torch_private import warn_of_untested
from nbdist.wire.messages import Record
from nbdist.wire.pickling import culprit

if TYPE_CHECKING:
    from nbdist.cluster.examination.examination import Examination
    from nbdist.cluster.hosts.launchers.inviting import InvitingLauncher
    from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView
    from nbdist.views.timeline.timeline import Timeline

__all__ = ["Cluster"]

_log = logging.getLogger("nbdist.cluster")
_OUTPUT_ARRIVES_WITHIN = 1.0
"""Seconds to wait for output, or for a dead worker's last words, that may be on the way."""

Targets = str | int | Sequence[int | str] | None


class Cluster:
    """Worker kernels, and the RPC world that they and this process form.

    The constructor starts nothing. `start`, a ``with`` block, or the first method that needs workers starts them. A
    process has one cluster at a time. The workers end with this process, even if it is killed.

    Methods take ``targets`` as ``%%remote`` does: ``0``, ``-1``, ``"0,2"``, ``"worker1"``, ``[0, 2]``; None for all
    workers. They raise `UnknownWorker` or `UsageError` where targets name no worker.

    Args:
        (arguments)
        rpc: Options for the RPC agents of all workers and of this process, such as ``rpc_timeout``, which limits calls
            but not the start. Device maps are for the workers only, and a worker's map for itself is left out. The
            cluster sets ``init_method``, ``host``, ``secret`` and ``devices`` itself. None for the usual options.
        progress: Called as ``progress(worker, step)``, in the kernel thread, when a worker reaches a step.

    Raises:
        UsageError: A value is not possible, such as a GPU that does not exist.
        TypeError: ``rpc`` is not an `RpcBackendOptions`, or a time is not a number.

    Example:
        In a script, as in README.md (in a notebook, ``%dist_init -n 3`` starts one: ``notebooks/00_tour.ipynb``)::

            with nbdist.Cluster(3) as cluster:
                cluster.execute("x = torch.full((2,), float(rank)); dist.all_reduce(x)")
                print(cluster.pull("x", "worker1"))  # tensor([3., 3.])
    """

    current: Cluster | None = None
    """The cluster of this process, from the beginning of its `start` to the end of its `shutdown`; else None."""

    def __init__(
        self,
        n: int | None = None,
        *,
        gpu_ids: Sequence[int] | None = None,
        backend: str | None = None,
        driver: str | None = None,
        seed: int | None = None,
        timeout: float = 120.0,
        launcher: str = "local",
        isolate_gpus: bool = False,
        preload: str | Sequence[str] = (),
        gpu_memory: float | None = None,
        rpc: RpcBackendOptions | None = None,
        host: str | None = None,
        ports: tuple[int, int] | None = None,
        invitation: str | None = None,
        address: str | None = None,
        gpus_per_worker: float | None = None,
        placement: str = "pack",
        sync_code: bool = False,
        progress: Callable[[str, str], None] | None = None,
    ) -> None:
        self.spec = Spec.of(locals())
        self.progress = progress
        self.on_joined: Callable[[str], object] | None = None
        """Called with a line of text when workers have joined the running cluster, or could not. In another thread."""
        self._state = "new"
        self._pid = os.getpid()
        self._counter = 0
        """The number of cells so far, which numbers them where there is no notebook."""
        self.awaited: list[str] = []
        """The workers that had to become idle, when `restart` was last called, for the process group to form anew."""
        self.farewells: list[Callable[[], object]] = []
        """Functions that `shutdown` calls first, in this order and each once, while the workers are still there."""
        self._devices = self.spec.devices()
        self.workers = [self._make_worker(rank) for rank in range(self.spec.count)]
        self.driver = driver or "notebook"
        self._called_on_each: set[Callable[[], object]] = set()
        """The functions of `call_on_each`."""
        self._changing = threading.Lock()
        """Held while workers restart, join, or form the process group for the user: one of these at a time."""
        self._is_ending = False
        """True from the beginning of `shutdown`."""
        self._growth: Growth | None = None
        """Takes workers into the running cluster; None if the launcher lets none join."""

    def _make_worker(self, rank: int) -> Worker:
        """Return a new worker of this rank. The id of a worker that joins later comes after the notebook's id."""
        first = 0 if self.spec.driver is None else 1
        if rank < self.spec.count:
            return Worker(f"worker{rank + first}", rank, rank + first, *self._devices[rank])
        return Worker(f"worker{rank + first}", rank, rank + 1, "cpu", None)

    @classmethod
    def of(cls, spec: Spec) -> Cluster:
        """Return a new cluster, which has not started, as ``spec`` describes it."""
        options = {**vars(spec), "rpc": RpcBackendOptions(**spec.rpc)}
        return cls(options.pop("count"), **options)

    def __repr__(self) -> str:
        states = ", ".join(f"{worker.name} {worker.state}" for worker in self.workers)
        return f"<Cluster {self._state}{': ' + states if self._state == 'running' else f' of {self.spec.count}'}>"

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # -- starting -----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Return whether the workers are ready: `start` has ended well, and `shutdown` has not finished."""
        return self._state == "running"

    @property
    def folder(self) -> str:
        """The path of the run directory, with the workers' sockets, connection files and logs.

        AttributeError before `start`.
        """
        return str(self._lives.folder)

    def is_as(self, spec: Spec) -> bool:
        """Return whether this cluster was started with ``spec``, whatever its timeout, or has grown to its size."""
        return self.spec.same_as(spec) or replace(self.spec, count=len(self.workers)).same_as(spec)

    def find(self, name: str) -> Worker:
        """Return the worker called ``name``. Raises UnknownWorker if there is none.

        Dead workers are found, too: see `Worker.alive`.
        """
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise UnknownWorker(f"this cluster has no worker {name!r}; its workers are {', '.join(self.names)}")

    @property
    def kernel_thread(self) -> KernelThread:
        """The thread that talks to the workers' kernels. AttributeError before `start`."""
        return self._thread

    def signal(self, name: str, number: int) -> None:
        """Send the signal ``number`` to the process of the worker ``name``; do nothing if that process has ended."""
        self._lives.launcher.signal(name, number)

    def probe(self, name: str) -> Future[Probe]:
        """Ask the host of the worker ``name`` about the worker's process; return the future of the answer.

        The worker itself need not answer, so this works while it holds the GIL. Where the host cannot be reached, the
        future fails, or is never done.
        """
        return self._lives.launcher.probe(name)

    @property
    def names(self) -> list[str]:
        """The names of the workers, in the order of their ranks."""
        return [worker.name for worker in self.workers]

    @property
    def backend(self) -> str:
        """The process group's backend, as torch writes it.

        It is the one asked for; else nccl for GPU tensors and gloo for CPU tensors if each worker has its own GPU; else
        gloo for both. Workers on other hosts choose it when they form the group, so the first worker is asked. It
        is "auto" before the start, or if that worker does not answer within 1 s.
        """
        spec = self.spec
        if spec.backend is not None:
            return spec.backend
        if not spec.is_remote:
            return choose_backend([worker.gpu for worker in self.workers])
        if spec.gpus_per_worker is not None and spec.gpus_per_worker < 1:
            return "gloo"
        with contextlib.suppress(NbdistError):
            if self._state == "running":
                return str(self.agent.call(self.workers[0].name, collectives.backend, timeout=1.0).wait())
        return AUTO

    def start(self) -> Cluster:
        """Start the workers; return this cluster once all of them are ready.

        Does nothing if the cluster runs. If it fails after it has begun to start workers, it ends them, and this
        cluster cannot start again.

        Raises:
            UsageError: Another cluster or RPC runs in this process, this cluster has been shut down or is being started
                by another thread, this process was forked from the one that made the cluster, or a module to preload
                cannot be imported.
            StartError: The workers were not ready within the timeout, or a step of one failed.
            WorkerLost: A worker died.
            ResourceError: The system has no open file, memory or disk space left.
        """
        if os.getpid() != self._pid:
            raise UsageError("this cluster belongs to the process that this one was forked from; use it there")
        if self._state == "running":
            return self
        if self._state == "starting":
            raise UsageError("another thread is starting this cluster; wait until it has started")
        if self._state == "ended":
            raise UsageError("this cluster has been shut down; make another")
        if Cluster.current is not None:
            raise UsageError(
                "this process has a cluster already, and can have only one at a time; end that cluster first, with "
                "%dist_shutdown or its shutdown()"
            )
        if api.is_initialized():
            raise UsageError("RPC runs in this process already; call rpc.shutdown() before a cluster starts")
        warn_of_untested()
        self._state = "starting"
        Cluster.current = self
        mending.follow(self)
        try:
            with refusals_in_words("the cluster cannot start"):
                self._start()
        except BaseException:
            self.shutdown()
            raise
        self._state = "running"
        atexit.register(self.shutdown)
        if self._growth is not None:
            self._growth.begin()
        return self

    def _start(self) -> None:
        """Start the workers and this process's agent, and wait for all. Where it fails, `start` cleans up."""
        deadline = time.monotonic() + self.spec.timeout
        self._thread = KernelThread()
        self._router = Router(self._thread, lambda: self.names)
        self._lives = Lifecycle(
            launcher_of(self.spec),
            self.spec,
            self.backend,
            self.workers,
            self._thread,
            self._router.on_message,
            self._on_step,
            self._on_worker_end,
        )
        self._lives.launch(self.workers)
        # While this process does the following, the workers start, so this costs no extra time.
        id = 0 if self.spec.driver is not None else self.spec.count
        asked = {name: value for name, value in self.spec.rpc.items() if name not in ("device_maps", "rpc_timeout")}
        options = RpcBackendOptions(**self._lives.launcher.rpc, **asked)
        self.agent: Agent = api.initialize(self.driver, id, None, options, hosted=self._lives.folder, device="cpu")
        self.agent.rpc_timeout = self.spec.rpc.get("rpc_timeout", self.agent.rpc_timeout)
        self.agent.explain_end = self._explain_end
        self.agent.on_lost(self._on_member_lost)
        self._losses = Losses(self.agent) if self.spec.is_remote else None
        self.agent.know_cells(self._router.origins.current)
        failures.on_text(labels.rename_frames)
        self._lanes = Lanes(self.workers, self._thread, self.agent)
        self.farewells.append(self._lanes.close)
        self._lives.bring_up(self.workers, deadline)
        process_memory.mark_start()
        if self.spec.may_grow:
            self._growth = Growth(
                self.workers,
                self._make_worker,
                self._lives,
                self._inviting_launcher(),
                self._changing,
                self._is_member,
                self.spec.timeout,
                self._lanes.look_again,
                self._on_joined,
            )

    # -- ending -------------------------------------------------------------------------------

    def shutdown(self, *, ask: bool = True) -> int:
        """End all workers and remove their sockets and files.

        Does nothing the second time, before `start`, and in a process that was forked from this one. All steps are
        taken even if one fails or Ctrl-C comes; the error is raised at the end.

        Args:
            ask: Whether to ask idle workers first, and give them 1 s, so that their exit handlers run. Busy workers
                are killed without being asked, and so are all workers if one has not become ready.

        Returns:
            How many worker processes still exist: 0, unless the system refuses to end one.
        """
        if self._state in ("new", "ended") or os.getpid() != self._pid:
            return 0
        agent, lives, thread = (getattr(self, name, None) for name in ("agent", "_lives", "_thread"))
        self._is_ending = True
        left: list[int] = []
        with contextlib.ExitStack() as steps:  # runs the last step first, and all of them even if one fails
            steps.callback(self._forget)
            if thread is not None:
                steps.callback(thread.close)
                steps.callback(self._router.comms.close)
            if lives is not None:
                steps.callback(lambda: left.append(lives.close()))
            if agent is not None:
                steps.callback(api.finish, agent)
            if ask and lives is not None and all(worker.step == "ready" for worker in self.workers):
                steps.callback(lives.say_goodbye)
            while self.farewells:
                steps.callback(self.farewells.pop())
        return sum(left)

    def _forget(self) -> None:
        """Mark this cluster as ended, so that another may start: the last step of `shutdown`."""
        self._state = "ended"
        atexit.unregister(self.shutdown)
        if Cluster.current is self:
            Cluster.current = None
            mending.follow(None)

    def restart(self, targets: Targets = None, *, process_group: bool = False) -> list[str]:
        """Kill workers and start them again, under the same names and ranks.

        All workers form a new process group: at once if all are idle, else when the last one becomes idle; `awaited`
        then names the workers that were not idle. Groups, DDP and FSDP wrappers of the old process group no longer
        work. RRefs to values of the killed workers are lost.

        Args:
            targets: Which workers; None for all dead workers.
            process_group: Whether to form the process group now, even if no worker is restarted, and to wait until
                busy workers take part.

        Returns:
            The names of the workers that were restarted.

        Raises:
            StartError: The workers were not ready again within the cluster's timeout, or a step failed.
            WorkerLost: A worker died meanwhile; or, with ``process_group``, a dead worker is not among the targets.
        """
        self.start()
        with self._changing_workers():
            return self._restart(self._dead() if targets is None else self.select(targets), process_group)

    def _restart(self, chosen: Sequence[Worker], process_group: bool = False, because: str = "") -> list[str]:
        """Kill and start these workers, and form the process group, as `restart` does; `_changing` is held.

        ``because`` is the reason, for the errors of the killed workers' cells.
        """
        self.awaited = []
        deadline = time.monotonic() + self.spec.timeout
        if chosen:
            with refusals_in_words("the workers cannot be restarted"):
                self._lives.kill(chosen, self._is_member, deadline, because)
                if self._losses is not None:
                    self._losses.wait()
                try:
                    self._lives.launch(chosen)
                    self._on_joined(self._lives.launcher.advice())  # a worker whose host is lost needs a person
                    self._lives.bring_up(chosen, deadline)
                except BaseException:
                    self._lives.abandon(chosen)
                    raise
        if process_group and len(chosen) < len(self.workers):
            if busy := [f"{each.name} runs In[{cell.number}]" for each in self.workers if (cell := each.present_cell)]:
                self._on_joined(f"The process group forms once all workers are idle: {', '.join(busy)}")
            self._lives.form_group(deadline)
        elif chosen and len(chosen) < len(self.workers):
            self.awaited = self._lives.form_group_once_idle(deadline)
        return [worker.name for worker in chosen]

    @contextlib.contextmanager
    def _changing_workers(self) -> Iterator[None]:
        """Exclude other changes of the workers during the block, such as workers that join; these come afterwards."""
        try:
            with self._changing:
                yield
        finally:
            if self._growth is not None:
                self._growth.look_soon()

    @property
    def lifecycle(self) -> Lifecycle | None:
        """The starts, restarts and process groups of the workers, for their requests; None unless the cluster runs."""
        return self._lives if self.running else None

    def replace(self, name: str, incarnation: int, because: str) -> None:
        """Restart the worker called ``name`` for the reason ``because``, which the errors of its cells then say.

        Waits until it is ready. Does nothing if the worker's agent has not this ``incarnation`` any more, or unless the
        cluster is running. An error is only logged, because nobody waits for this: see `nbdist.cluster.mending`.
        """
        with self._changing_workers():
            found = [worker for worker in self.workers if worker.name == name and worker.incarnation == incarnation]
            if not (self.running and found) or self._is_ending:
                return
            try:
                self._restart(found, because=because)
            except Exception as error:
                if not self._is_ending:
                    _log.error("%s could not be restarted, although %s: %s", name, because, error)

    def invite(self, file: str, *, uses: int = 1, expires: float = 3600.0) -> None:
        """Write another invitation, with which workers of other hosts join: see ``python -m nbdist worker --help``.

        With the launcher ``"join"``, `start` has written the first invitation, for as many workers as it waits for. A
        worker that joins later first takes the place of a worker whose host is lost: it waits for the `restart`. If no
        place is open, the cluster grows by a worker of the next rank: ``worker4`` after ``worker3``. Then `on_joined`
        is called, and `wait_for_workers` returns. Running cells keep their workers. A new process group, with the new
        worker, forms once all workers are idle; groups, DDP and FSDP wrappers from before can no longer be used.
        Executors and views of all workers, panels, timelines and ``%%watch`` include the new worker, also those that
        were made before; executors and views of some workers do not.

        Args:
            file: The file to write, which only this user may read. An earlier one is replaced.
            uses: How many workers may join with it.
            expires: For how many seconds it is valid.

        Raises:
            UsageError: The launcher is neither ``"join"`` nor ``"local"`` with a ``host``, a number is not more than 0,
                or the file cannot be written.
        """
        self.start()
        self._inviting_launcher().invite(Path(file).expanduser(), expires, uses)

    def revoke_invitations(self) -> int:
        """Make all invitations invalid; return how many were valid. Workers that have joined stay.

        Raises UsageError as `invite` does.
        """
        self.start()
        return self._inviting_launcher().revoke()

    def wait_for_workers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until the cluster has at least ``count`` workers, dead ones included; new ones join by an invitation.

        Returns at once if it has. The process group may still have to form: it does once all workers are idle.

        Args:
            count: How many workers.
            timeout: Seconds to wait, more than 0; None for the cluster's timeout.

        Raises:
            UsageError: The cluster has fewer workers, and none can join it: see `invite`.
            StartError: It has fewer workers after the timeout.

        Example:
            ::

                cluster.invite("invitation.json", uses=2)  # python -m nbdist worker --connect invitation.json
                cluster.wait_for_workers(4)
        """
        seconds = self.spec.timeout if timeout is None else durations.positive(timeout)
        self.start()
        if len(self.workers) >= count:
            return
        self._inviting_launcher()
        assert self._growth is not None
        if not self._growth.wait_for(count, seconds):
            raise StartError(
                f"the cluster has {counted(len(self.workers), 'worker')}, and not {count}, after {seconds:g} s: invite "
                "workers with %dist_invite, and start them by `python -m nbdist worker --connect FILE`"
            )

    def _on_joined(self, line: str) -> None:
        """Pass a line about workers that have joined, or are waited for, on to the user. In any thread; "" for none."""
        if self.on_joined is not None and line:
            self.on_joined(line)

    def _inviting_launcher(self) -> InvitingLauncher:
        """Return this cluster's launcher. Raises UsageError if no worker can join the cluster."""
        if not self.spec.may_grow:
            raise UsageError(
                "no worker can join this cluster: start one with `%dist_init -n N --host ADDRESS`, the address at "
                "which other hosts reach this one, or with `--launcher join`"
            )
        return cast("InvitingLauncher", self._lives.launcher)

    def rebuild_process_group(self) -> None:
        """Form a new process group of all workers, as is needed after an interrupt has ended a collective.

        Waits until all workers have taken part. A busy worker first ends the cells that it was sent before.

        Raises:
            WorkerLost: A worker is dead; `restart` it.
            StartError: The group did not form within the cluster's timeout, or a worker failed to form it.
        """
        self.start()
        with self._changing_workers():
            self._lives.form_group(time.monotonic() + self.spec.timeout)

    def _dead(self) -> list[Worker]:
        """Return the workers that have died, or could not be started again."""
        return [worker for worker in self.workers if worker.lost is not None]

    def _is_member(self, name: str) -> bool:
        """Return whether the RPC world still counts a worker as a member."""
        return any(record.name == name for record in self.agent.members())

    def _on_step(self, worker: Worker, step: str) -> None:
        """Note a worker's agent once the worker is a member of the RPC world, and tell the user's ``progress``.

        In the kernel thread.
        """
        if step == "rpc":
            worker.incarnation = self.agent.find(worker.name).incarnation
        if self.progress is not None:
            self.progress(worker.name, step)

    def _on_worker_end(self, worker: Worker, why: str) -> None:
        """Tell this process's agent that a worker has ended, and how. In the kernel thread.

        For a process of this host, the agent notices the end by itself. For one of another host, it would notice only
        the silence.
        """
        if worker.incarnation is not None and worker.host:
            self.agent.lose(worker.incarnation, why)

    def _on_member_lost(self, record: Record, why: str) -> None:
        """Give up a worker on another host that the agent has lost, although its process may live. In any thread.

        The worker may be frozen, or its network may be down. Its process is killed as soon as its host can be reached.
        """
        worker = self._worker_of(record)
        if worker is None or not worker.host:
            return

        def give_up() -> None:
            if worker.alive and worker.incarnation == record.incarnation:
                worker.lose(why)
                self.signal(worker.name, signal.SIGKILL)

        self._thread.soon(give_up)

    def _worker_of(self, record: Record) -> Worker | None:
        """Return the worker whose present agent has this record; None if there is none, as after a restart."""
        found = (worker for worker in self.workers if worker.name == record.name)
        return next((worker for worker in found if worker.incarnation in (None, record.incarnation)), None)

    def _explain_end(self, record: Record) -> str:
        """Return in words how the worker with this record died; "" for other members, and while the worker lives.

        The RPC agent calls this for the text of its errors. Waits at most `_OUTPUT_ARRIVES_WITHIN` seconds for the end
        of the process, and as long again for the last text that the worker wrote to standard error.
        """
        worker = self._worker_of(record)
        if worker is None:
            return ""
        worker.exited.wait(_OUTPUT_ARRIVES_WITHIN)
        if worker.lost is None:  # else SIGKILL has ended it, which leaves no last words to wait for
            worker.ended.wait(_OUTPUT_ARRIVES_WITHIN)
        return worker.lost or ""

    # -- cells ----------------------------------------------------------------------------------

    def select(self, targets: Targets) -> list[Worker]:
        """Return the workers that ``targets`` name, each once, in the order given.

        Raises:
            UnknownWorker: The cluster has no such worker.
            UsageError: The targets cannot be read, or name no worker, as an empty list does.
        """
        if targets is None:
            return list(self.workers)
        if isinstance(targets, Sequence) and not isinstance(targets, str):
            targets = ",".join(map(str, targets)) or "[]"
        return [self.workers[rank] for rank in parse_targets(str(targets), self.names)]

    def execute(
        self,
        code: str,
        targets: Targets = None,
        *,
        block: bool = True,
        timeout: float | None = None,
        group_outputs: bool = False,
        keep: bool = False,
        sink: Sink | None = None,
        quiet: bool = False,
        fail_fast: bool = False,
        progress_after: float = 10.0,
        above: int = 0,
    ) -> Cell:
        """Run a cell on workers. Its output, and the error or death of a worker, appears here while the cell runs.

        Ctrl-C while this waits interrupts the cell on all its workers and raises KeyboardInterrupt.

        Args:
            code: The cell's source: Python and IPython's magics.
            targets: Which workers.
            block: Whether to wait until the cell has ended on all workers, and then to raise its error. Without it,
                return at once; the error is shown when the cell ends, and the handle's ``wait()`` raises it.
            timeout: Seconds, more than 0, after which the cell is interrupted everywhere. None, or more than 1e8, for
                no limit.
            group_outputs: Whether to show all output at the end, worker by worker.
            keep: Whether workers keep the value of the last expression, for `references`. They drop it if the cell
                fails while this waits, or some time after the handle was dropped: at most 2,000 cells later.
            sink: Where to show output; None for the place of the code that calls this.
            quiet: Whether to leave out the values of last expressions, and notices of failed workers.
            fail_fast: Whether to interrupt the other workers as soon as one has failed.
            progress_after: After how many seconds without output a line shows what the workers wait for; 0 for never.
            above: How many lines stand above ``code`` in the page's cell; tracebacks count from the top of that cell.

        Returns:
            The handle of the cell: `Cell.wait`, ``await``, `Cell.cancel`, `Cell.outputs`.

        Raises:
            CellError: With ``block``: the cell failed. The error is also of the class that the worker raised, if it is
                one of Python's or nbdist's and the same on all workers that failed; WorkerLost if a worker died.
            CellTimeout: With ``block``: the cell had not ended after ``timeout`` seconds.
            UsageError: The cluster has been shut down.
        """
        if timeout is not None:
            timeout = durations.positive(timeout)
        self.start()
        with self._lives.choosing() as token:
            workers = self.select(targets)
            sink = sink or current_sink()
            self._counter += 1
            number = labels.cell_number() or self._counter
            cell = Cell(
                code,
                [worker.name for worker in workers],
                sink,
                make_arranger([worker.name for worker in workers], sink, grouped=group_outputs),
                self._thread,
                self._interrupt_cell,
                self._answer,
                number=number,
                above=above,
                foreground=block,
                quiet=quiet,
                fail_fast=fail_fast,
            )
            if keep:
                ids = [(part.worker, part.id) for part in cell.parts.values()]
                # A weak reference to the cluster: else the cluster, whose router keeps the last cells, would never end.
                cell.kept = weakref.finalize(cell, _drop_values_soon, weakref.ref(self), ids)
                cell.kept.atexit = False
            options = {"silent": False, "store_history": True, "user_expressions": {}, "stop_on_error": False}
            request = {"code": code, "allow_stdin": block and sink.interactive, **options}
            origin = self._router.origins.current()
            told = {METADATA: {"number": number, "keep": keep, "above": above, "origin": origin}}
            packed = pack(request), pack(told)  # once, for all workers

            def send() -> None:
                if not self._thread.soon(self._send, token, cell, workers, *packed):
                    raise UsageError("this cluster has been shut down; make another")
                if progress_after > 0 and sink.interactive:
                    self._thread.soon(Lookout(self._thread, self.agent, cell, workers, progress_after).start)

            if block:
                try:
                    cell.wait(timeout, begin=send)
                except BaseException:
                    self._forget_values(cell)  # the caller gets no handle
                    raise
                return cell
            send()
            if timeout is not None:
                self._thread.soon(self._thread.loop.call_later, timeout, self._cancel_late, cell)
            return cell

    def _send(self, token: object, cell: Cell, workers: Sequence[Worker], content: bytes, metadata: bytes) -> None:
        """Send a cell to its workers; the cell fails at once on dead workers. In the kernel thread.

        ``content`` and ``metadata`` belong to the execute request, as JSON; ``token`` comes from `Lifecycle.choosing`.
        The other workers run the cell even if one is dead.
        """
        self._lives.unsent.discard(token)  # no other work of this thread runs before the end of this method
        cell.when_part_ends(self._part_ended)
        lost: dict[str, str | None] = {}
        for worker in workers:
            if worker.kernel is None or worker.lost is not None:
                lost[worker.name] = worker.lost
                continue
            part = cell.parts[worker.name]
            id, part.incarnation = part.id, worker.incarnation
            self._router.expect(id, cell)
            worker.cells.append(cell)
            try:
                worker.kernel.send("execute_request", content, metadata=metadata, id=id)
            except Exception as error:  # whatever the error is, the cell must end
                lost[worker.name] = f"cannot be reached: {error}"
        for name, why in lost.items():
            cell.on_lost(name, f"{why or 'is not running'}\n`%dist_restart {name}` starts it again")

    def _part_ended(self, cell: Cell, name: str) -> None:
        """Remove a cell that has ended on a worker from the cells of that worker. In the kernel thread.

        The cell calls this once for each worker, as set by `_send`. If a restart has left the process group to be
        formed once all workers are idle, and they now are, this begins to form it.
        """
        worker = self.find(name)
        if cell in worker.cells:
            worker.cells.remove(cell)
            worker.on_change()
            self._lives.after_cell()

    def _cancel_late(self, cell: Cell) -> None:
        """Interrupt a cell, sent without ``block``, whose time is over and that still runs. In the kernel thread."""
        if not cell.done:
            cell.interrupted = True
            self._thread.loop.create_task(interrupt_cell(self, cell))

    def _answer(self, name: str, text: str, request: Message) -> None:
        kernel = self.find(name).kernel
        assert kernel is not None
        self._thread.soon(lambda: kernel.send("input_reply", {"value": text}, channel="stdin", parent=request))

    # -- calls ----------------------------------------------------------------------------------

    def executor(self, targets: Targets = None) -> WorkerExecutor:
        """Return an executor of `concurrent.futures` that calls functions on the workers in ``targets``.

        Each call goes to the first worker that is free: it runs no call and no cell. A worker runs one call at a time,
        after the cells that it was sent before. A call fails with `WorkerLost` if its worker dies while it runs.
        Without targets, or with ``"all"``, workers that join later (`invite`) run calls, too.

        Example:
            ::

                with cluster.executor() as pool:
                    values = list(pool.map(function, items))
        """
        self.start()
        names = None if means_all(targets) else [worker.name for worker in self.select(targets)]
        return WorkerExecutor(self._lanes, names)

    def call_on_each(self, function: Callable[[], object]) -> None:
        """Call a function on each living worker, and wait; later also on each worker that joins or starts again.

        Nobody waits for the later calls, and their errors are dropped. After an error, there are no later calls.
        A second call with the same function does nothing.

        Args:
            function: The function, which the workers can import. It may run several times on a worker.

        Raises:
            WorkerLost: A worker died meanwhile. The function may raise other errors.

        Example:
            ::

                cluster.call_on_each(my_project.settings.prepare)
        """
        self.start()
        if function in self._called_on_each:
            return
        self._called_on_each.add(function)
        forget = self.agent.on_joined(lambda record: self.agent.call(record.name, function))
        # Not the cluster's workers: one that joins at this moment may not be among them yet.
        names = [record.name for record in self.agent.membership.others()]
        try:
            ask_each(self.agent, function, dict.fromkeys(names, ())).or_raise()
        except BaseException:
            forget()
            self._called_on_each.discard(function)
            raise

    # -- looking for trouble --------------------------------------------------------------------

    def examine(self, *, timeout: float = 60.0) -> Examination:
        """Ask each worker for its facts, measure the links between all members, and return the faults.

        Asks for versions, clocks, memory, GPUs and NCCL. Then one pair of members after another makes calls and sends a
        tensor, which takes about 0.7 s for each pair, and less if there are many. Busy workers take part. The result
        names dead workers and workers that do not answer within 3 s. A notebook shows the result as tables, and `print`
        as text. `%dist_doctor` shows it.

        Args:
            timeout: Seconds for all pairs together, more than 0. Pairs for which there is no time are left out.

        Raises:
            UsageError: ``timeout`` is not more than 0.

        Example:
            ::

                found = cluster.examine()
                print(found)
                assert not found.findings
        """
        from nbdist.cluster.examination.examination import examine

        seconds = durations.positive(timeout)
        self.start()
        return examine(self.agent, self.workers, seconds)

    # -- views: of higher layers, by `nbdist.registry` ------------------------------------------

    def timeline(self) -> Timeline:
        """Return a new timeline, which records the work of all workers from now on.

        It records until `Timeline.stop` or the end of a ``with`` block.

        Example:
            ::

                with cluster.timeline() as timeline:
                    cluster.execute("train()")
                timeline.save("step.json")  # for ui.perfetto.dev
        """
        self.start()
        made: Timeline = registry.make_timeline(self.agent)
        return made

    @overload
    def view(self, targets: Targets | slice = None, *, balanced: Literal[False] = False) -> DirectView: ...
    @overload
    def view(self, targets: Targets | slice = None, *, balanced: Literal[True]) -> LoadBalancedView: ...
    @overload
    def view(self, targets: Targets | slice = None, *, balanced: bool) -> DirectView | LoadBalancedView: ...
    def view(self, targets: Targets | slice = None, *, balanced: bool = False) -> DirectView | LoadBalancedView:
        """Return a view of some workers, or of all, as ipyparallel has them: ``notebooks/10_from_ipyparallel.ipynb``.

        Args:
            targets: A rank, a slice or sequence of ranks, or a target of ``%%remote``; None for all workers.
            balanced: Whether each task goes to the first of these workers that is free. Otherwise, each goes to all.
        """
        made: DirectView | LoadBalancedView = registry.make_view(self, targets, balanced)
        return made

    # -- stopping -------------------------------------------------------------------------------

    def interrupt(self, targets: Targets = None) -> None:
        """Interrupt everything that the workers in ``targets`` do: cells, begun or not, and calls from other workers.

        Each of these cells fails with a `CellError` that is named KeyboardInterrupt. Each of these calls fails with a
        KeyboardInterrupt on the worker. This method returns before they have ended. Cells and calls that are sent later
        run. Dead workers are skipped.
        """
        self.start()
        interrupt_workers(self, [worker for worker in self.select(targets) if worker.alive])

    def _interrupt_cell(self, cell: Cell) -> Sequence[str]:
        """Interrupt a cell; return a text for each worker that does not stop.

        Waits until the workers have stopped, about 2 s at most, or 30 s if one is formatting its traceback. In the
        kernel thread, this method does not wait and returns an empty list; the interrupt continues in the background.
        """
        if self._thread.is_current():
            self._thread.loop.create_task(interrupt_cell(self, cell))
            return []
        return self._thread.run(interrupt_cell(self, cell)).result()

    # -- values ---------------------------------------------------------------------------------

    def evaluate(self, expression: str, targets: Targets = None, *, timeout: float | None = None) -> Any:
        """Return a copy of the value that an expression has on a worker, or a list of values for several workers.

        The expression runs as a cell, so a worker first ends the cells that it was sent before. No autograd context
        records the copy.

        Args:
            expression: One Python expression, or a cell that ends with one.
            targets: Which workers. A rank or a name gives one value; everything else, also None, gives a list.
            timeout: Seconds, more than 0, after which the expression is interrupted; None for no limit.

        Raises:
            CellError: The expression failed, as in `execute`; CellTimeout if it was interrupted after ``timeout``.
            EncodeError: The value cannot be sent.
        """
        cell = self.execute(expression, targets, timeout=timeout, keep=True, quiet=True)
        try:
            # The value is a copy: no context records its way here, and a leaf stays a leaf.
            with torch.no_grad(), named_in_errors(expression):
                asked = ask_each(self.agent, take_last_value, {part.worker: (part.id,) for part in cell.parts.values()})
                found = list(asked.or_raise().values())
        except BaseException:
            self._forget_values(cell)
            raise
        if cell.kept is not None:
            cell.kept.detach()
        return found[0] if means_one(targets) else found

    def references(self, cell: Cell, targets: Targets = None) -> Any:
        """Return RRefs to the values of the last expression of a cell, one for each worker of the cell.

        Does not wait for the cell. If the cell fails on a worker, fetching the value of that worker's RRef raises
        RemoteError; if the worker has died, WorkerLost. Only one call for each cell is possible, because a worker keeps
        the value for this call only.

        Args:
            cell: The handle that `execute` returned.
            targets: The targets of that cell: for a rank or a name, one RRef is returned instead of a list.

        Raises:
            UsageError: The cell was executed without ``keep``, or its references were returned already.
        """
        if cell.kept is None or not cell.kept.alive:
            raise UsageError(
                "the workers have no value of this cell: it was executed without keep=True, or references() has "
                "returned the references already"
            )
        found = [self._reference(part) for part in cell.parts.values()]
        cell.kept.detach()
        return found[0] if means_one(targets) else found

    def _reference(self, part: CellPart) -> RRef[Any]:
        """Return an RRef to the value of a cell's last expression on one worker.

        If the worker is dead, or has been restarted since, the RRef is one of this process, and fetching its value
        raises WorkerLost.
        """
        if part.incarnation is not None and self.find(part.worker).incarnation not in (part.incarnation, None):
            why = (
                f"{part.worker} has ended since it was sent this cell, and the cell's value with it; run the cell again"
            )
            return api.remote(self.driver, _raise_lost, (why,), timeout=0)
        try:
            return api.remote(part.worker, take_last_value, (part.id,), timeout=0)
        except WorkerLost as error:
            return api.remote(self.driver, _raise_lost, (str(error),), timeout=0)

    def _forget_values(self, cell: Cell) -> None:
        """Let the workers drop the values that they keep for `references`, once the cell has ended.

        Does nothing if the cell keeps none, and for values that were fetched or dropped before.
        """
        if cell.kept is not None:
            cell.when_done(cell.kept)

    def push(self, variables: Mapping[str, Any], targets: Targets = None) -> None:
        """Set variables on workers, after the cells that they were sent before; return when that is done.

        Args:
            variables: The values by name. A worker gets copies.
            targets: Which workers.

        Raises:
            UsageError: A name is no Python identifier.
            EncodeError: A value cannot be sent; the text says which part of which variable.
            WorkerLost: One of these workers is dead.
        """
        from nbdist.cluster.worker.values import forget, receive

        for name in variables:
            if not name.isidentifier():
                raise UsageError(f"{name!r} is not a variable's name, so it cannot be pushed")
        self.start()
        workers = self.select(targets)
        self._require_alive(workers)
        names, ranks, token = [each.name for each in workers], [each.rank for each in workers], os.urandom(8).hex()
        code = f"__import__('nbdist.cluster.worker.values', fromlist=['_']).place({token!r})"
        self.execute("pass", ranks, quiet=True)  # waits with a line that says for whom, as the calls below do not
        try:
            with torch.no_grad():  # as in `evaluate`; also avoids the warning that no gradient will come back
                ask_each(self.agent, receive, dict.fromkeys(names, (token, dict(variables)))).or_raise()
            self.execute(code, ranks, quiet=True)
        except BaseException as error:
            for name in names:
                with contextlib.suppress(NbdistError):  # the worker is gone, and the values with it
                    self.agent.call(name, forget, token)
            if not isinstance(error, EncodeError):
                raise
            found = next(filter(None, (culprit.of_value(value, name) for name, value in variables.items())), "")
            why = f"{found}, which cannot be sent: {culprit.reason(error.__cause__)}" if found else str(error)
            raise EncodeError(why) from error

    def pull(self, names: str | Sequence[str], targets: Targets = None) -> Any:
        """Return copies of the values that variables have on workers.

        Args:
            names: One name, such as ``"x"`` or ``"model.weight"``, gives its value; a sequence of names gives a dict.
            targets: Which workers. A rank or a name gives one result; everything else, also None, gives a list.

        Raises:
            UsageError: A name cannot be the name of a variable or an attribute; `evaluate` takes any expression.
            CellError: A worker has no such variable or attribute, or is dead. The error is then also a NameError,
                AttributeError or WorkerLost, as in `execute`.
            EncodeError: A value cannot be sent.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if not all(part.isidentifier() for part in name.split(".")):
                raise UsageError(
                    f"{name!r} is not a variable's name; `%remote TARGET expression` returns the value of any"
                )
        values = self.evaluate(", ".join(wanted), targets)
        shaped = [
            value if isinstance(names, str) else dict(zip(wanted, value if len(wanted) > 1 else (value,), strict=True))
            for value in (values if isinstance(values, list) else [values])
        ]
        return shaped if isinstance(values, list) else shaped[0]

    def sync(self) -> list[str]:
        """Wait until every worker has run all the cells that it was sent; return the names of the workers.

        Raises:
            WorkerLost: A worker is dead or dies meanwhile.
        """
        self.execute("pass", quiet=True)
        return self.names

    # -- for the notebook -----------------------------------------------------------------------

    def settle(self, *, patience: float | None = None) -> None:
        """Show, below the cell that runs in the notebook, the output that its calls (RPCs) have printed on workers.

        Waits for text that is on its way. The magics call this after each cell, and before a cell's result is shown;
        programs need not. ::

            called                              the page is watched     captured output, or nobody watches
            after a cell (``patience`` None)    does not wait           waits up to 1 s
            before a result is shown            waits ``patience`` s    ``patience`` s if watched, else 1 s

        The page counts as watched if its user can be asked for input (`Sink.interactive`).

        Args:
            patience: Seconds to wait at most before a result is shown; None after a cell.
        """
        sink = current_sink()
        origin = self._router.origins.find(sink.key)
        if origin is None or (sink.interactive and not sink.captured and patience is None):
            return

        def ask(worker: str, token: str) -> bool:
            try:
                self.agent.call(worker, fence, token, timeout=_OUTPUT_ARRIVES_WITHIN)
            except NbdistError:
                return False
            return True

        within = _OUTPUT_ARRIVES_WITHIN if patience is None or not sink.interactive else patience
        self._router.settle(origin, [worker for worker in self.workers if worker.alive], ask, within)

    def _require_alive(self, workers: Sequence[Worker]) -> None:
        """Raise WorkerLost if one of these workers is dead."""
        for worker in workers:
            if not worker.alive:
                raise lost_error(worker)


Cluster.__doc__ = (Cluster.__doc__ or "").replace("(arguments)", textwrap.indent(describe_arguments(), " " * 8).strip())


def _drop_values_soon(cluster: weakref.ref[Cluster], ids: Sequence[tuple[str, str]]) -> None:
    """Let the kernel thread tell workers to drop values, unless the cluster has ended; see `Cluster.execute`."""
    if (known := cluster()) is not None:
        known.kernel_thread.soon(_drop_values, known.agent, ids)


def _drop_values(agent: Agent, ids: Sequence[tuple[str, str]]) -> None:
    """Tell workers to drop values of cells, by the ids of the requests. In the kernel thread, without waiting."""
    for worker, id in ids:
        with contextlib.suppress(NbdistError):  # the worker is gone, and its values with it
            agent.call(worker, drop_value, id)


def _raise_lost(text: str) -> None:
    """Raise WorkerLost: the value of a dead worker's RRef, see `Cluster.references`."""
    raise WorkerLost(text)


def _after_fork() -> None:
    Cluster.current = None  # the cluster stays with the parent process
    mending.follow(None)


os.register_at_fork(after_in_child=_after_fork)
