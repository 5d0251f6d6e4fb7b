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
import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from nbdist import durations, registry
from nbdist.channel.resources import refusals_in_words
from nbdist.cluster.cell_sender import CellSender
from nbdist.cluster.cell_values import CellValues, check_kept, check_pulled, check_pushed
from nbdist.cluster.deaths import Deaths
from nbdist.cluster.executor import Lanes, WorkerExecutor
from nbdist.cluster.interrupting import Interrupts
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.kernels.cells import Cell, CellOptions
from nbdist.cluster.kernels.routing import Router
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.launching import launcher_of
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.mending import Mending
from nbdist.cluster.output.sinks import Sink
from nbdist.cluster.partings import Parting
from nbdist.cluster.processes import process_memory
from nbdist.cluster.processes.probe import Probe
from nbdist.cluster.processes.setup import AUTO, choose_backend
from nbdist.cluster.spec import Spec, describe_arguments
from nbdist.cluster.stops import Stops
from nbdist.cluster.targets import means_all
from nbdist.cluster.team import Targets, Team
from nbdist.cluster.undoing import undone_by
from nbdist.cluster.worker_changes import WorkerChanges
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc import api, failures
from nbdist.rpc.asking import ask_each
from nbdist.rpc.options import RpcBackendOptions
from nbdist.torch_private import warn_of_untested

if TYPE_CHECKING:
    from nbdist.cluster.examination.examination import Examination
    from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView
    from nbdist.views.timeline.timeline import Timeline


class Cluster:
    """Worker kernels, and their RPC world with this process. Methods start it, or raise UsageError after `shutdown`.

    The constructor starts nothing: `start`, a ``with`` block, or the first method that needs workers does, with the
    errors of `start`. After `shutdown`, or a start that failed, these methods raise `UsageError`. They raise
    `UnknownWorker` or `UsageError` for ``targets`` that name no worker. Ctrl-C ends a wait with KeyboardInterrupt.
    A process has one cluster at a time. The workers end with this process, even if it is killed. Methods take
    ``targets`` as ``%%remote`` does: ``0``, ``-1``, ``"0,2"``, ``"worker1"``, ``[0, 2]``; None for all workers.

    Args:
        (arguments)
        rpc: Options for the RPC agents of all workers and of this process, such as ``rpc_timeout``, which limits calls
            but not the start. Device maps are for the workers only, and a worker's map for itself is left out. The
            cluster sets ``init_method``, ``host``, ``secret`` and ``devices`` itself. None for the usual options.
        progress: Called as ``progress(worker, step)``, in the kernel thread, when a worker reaches a step.

    Raises:
        UsageError: A value is not possible, such as a GPU that does not exist. `start` checks the launcher's name.
        TypeError: ``rpc`` is not an `RpcBackendOptions`, or ``n`` or a time is not a number.

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
        self.farewells: list[Callable[[], object]] = []
        """Functions that `shutdown` calls first, in this order and each once, while the workers are still there."""
        self._team = Team(self.spec)
        self.workers = self._team.workers
        self.driver = driver or "notebook"
        self._called_on_each: set[Callable[[], object]] = set()  # the functions of `call_on_each`

    @classmethod
    def of(cls, spec: Spec) -> Cluster:
        """Return a new cluster, which has not started, as ``spec`` describes it.

        Raises UsageError or TypeError for a value that is impossible, as the constructor does.
        """
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

        AttributeError before `start`. `shutdown` removes the directory, and this still returns its path.
        """
        return str(self.lifecycle.folder)

    def is_as(self, spec: Spec) -> bool:
        """Return whether this cluster was started with ``spec``, whatever its timeout, or has grown to its size."""
        return self.spec.same_as(spec) or replace(self.spec, count=len(self.workers)).same_as(spec)

    def find(self, name: str) -> Worker:
        """Return the worker called ``name``. Raises UnknownWorker if there is none. Starts nothing.

        Dead workers are found, too, also after `shutdown`: see `Worker.alive`.
        """
        return self._team.find(name)

    def signal(self, name: str, number: int) -> None:
        """Send the signal ``number`` to the process of the worker ``name``; do nothing if that process has ended.

        Does nothing either if there is no such worker, or its host cannot be reached. AttributeError before `start`.
        """
        self.lifecycle.launcher.signal(name, number)

    def probe(self, name: str) -> Future[Probe]:
        """Ask the host of the worker ``name`` about the worker's process; return the future of the answer.

        The worker itself need not answer, so this works while it holds the GIL. Where the host cannot be reached, the
        future fails, or is never done. AttributeError before `start`.
        """
        return self.lifecycle.launcher.probe(name)

    def partings(self, probes: Mapping[str, Future[Probe]] | None = None) -> list[Parting]:
        """Return the collectives that not all members of a process group have called in the same way.

        Waits for the workers' answers, about a second at most. Leaves dead workers out, and raises nothing for dead or
        silent ones. AttributeError before `start`. ``probes`` are answers of `probe` for workers that have
        not answered a call; by default, their hosts are asked.
        """
        return self._cells.collation.partings(probes)

    @property
    def names(self) -> list[str]:
        """The names of the workers, in the order of their ranks, dead ones included. Starts nothing."""
        return self._team.names

    @property
    def awaited(self) -> list[str]:
        """The workers that had to become idle, when `restart` was last called, for the process group to form anew.

        Dead ones are among them. The list is not updated later. It is empty before `start` and after `shutdown`.
        """
        return self._changes.awaited if self.running else []

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
                return str(self.agent.at(self.workers[0].name, "collectives").ask("backend", timeout=1.0))
        return AUTO

    def start(self) -> Cluster:
        """Start the workers; return this cluster once all of them are ready.

        Does nothing if the cluster runs. If it fails, or Ctrl-C comes, after it has begun to start workers, it ends
        them, and this cluster cannot start again.

        Raises:
            UsageError: Another cluster runs in this process, or RPC does, as on a worker; this cluster has been shut
                down or is being started by another thread; this process was forked from the one that made the cluster;
                there is no such launcher, or it cannot be used; or a module to preload cannot be imported.
            StartError: The workers were not ready within the timeout, or a step of one failed.
            WorkerLost: A worker died.
            ResourceError: The system has no open file, memory or disk space left, or Ray has no room.
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
        with undone_by(self.shutdown), refusals_in_words("the cluster cannot start"):
            self._start()
        self._state = "running"
        atexit.register(self.shutdown)
        self._changes.begin()
        return self

    def _start(self) -> None:
        deadline = time.monotonic() + self.spec.timeout
        self.kernel_thread = KernelThread()
        """The thread that talks to the workers' kernels. AttributeError before `start`, as for the other parts."""
        self._router = Router(self.kernel_thread, lambda: self._team.names)
        self.lifecycle = Lifecycle(
            launcher_of(self.spec),
            self.spec,
            self.backend,
            self.workers,
            self.kernel_thread,
            self._router.on_message,
            self._on_step,
            # Not bound: `_deaths` and `agent` are made below, and members end later.
            lambda worker, why: self._deaths.on_end(worker, why),
            lambda name: any(record.name == name for record in self.agent.members()),
        )
        self.lifecycle.launch(self.workers)
        # While this process does the following, the workers start, so this costs no extra time.
        launcher = self.lifecycle.launcher
        id = 0 if self.spec.driver is not None else self.spec.count
        asked = {name: value for name, value in self.spec.rpc.items() if name not in ("device_maps", "rpc_timeout")}
        options = RpcBackendOptions(**launcher.rpc, **asked)
        self.agent = agent = api.initialize(self.driver, id, None, options, hosted=self.lifecycle.folder, device="cpu")
        agent.rpc_timeout = self.spec.rpc.get("rpc_timeout", agent.rpc_timeout)
        agent.know_cells(self._router.origins.current)
        agent.named.publish("boards", launcher.group_stores, "act")  # stores in folders are not called
        failures.on_text(labels.rename_frames)
        self._deaths = Deaths(self._team, self.kernel_thread, agent, launcher.signal)
        self._interrupts = Interrupts(self._team, self.kernel_thread, agent, launcher)
        self.stops = Stops(agent, self.kernel_thread)
        """Asks the user what debuggers on workers want to know."""
        self.farewells.append(self.stops.close)
        parts = self._team, self.kernel_thread, self._router, self.lifecycle, agent, self._interrupts, self.stops
        self._cells = CellSender(*parts)
        self._values = CellValues(self._team, self._cells, agent)
        self._lanes = Lanes(self.workers, self.kernel_thread, agent)
        self._changes = WorkerChanges(self.spec, self._team, self.lifecycle, agent, self._lanes.look_again, self._tell)
        self.farewells.append(self._lanes.close)
        self.lifecycle.bring_up(self.workers, deadline)
        process_memory.mark_start()
        self._mending = Mending(self.lifecycle, self._changes)
        agent.named.publish("mending", self._mending, *Mending.METHODS)

    def _on_step(self, worker: Worker, step: str) -> None:
        if step == "rpc":
            worker.incarnation = self.agent.find(worker.name).incarnation
        if self.progress is not None:
            self.progress(worker.name, step)

    def _tell(self, line: str) -> None:
        if self.on_joined is not None and line:
            self.on_joined(line)

    # -- ending -------------------------------------------------------------------------------

    def shutdown(self, *, ask: bool = True) -> int:
        """End all workers and remove their sockets and files.

        Cells and calls that still run fail with `WorkerLost`. Does nothing the second time, before `start`, and in a
        process that was forked from this one. All steps are taken even if one fails or Ctrl-C comes; the error is
        raised at the end.

        Args:
            ask: Whether to ask idle workers first, and give them 1 s, so that their exit handlers run. Busy workers
                are killed without being asked, and so are all workers if one has not become ready.

        Returns:
            How many worker processes still exist: 0, unless the system refuses to end one.
        """
        if self._state in ("new", "ended") or os.getpid() != self._pid:
            return 0
        agent, lives, thread = (getattr(self, name, None) for name in ("agent", "lifecycle", "kernel_thread"))
        if (changes := getattr(self, "_changes", None)) is not None:
            changes.close()
        left: list[int] = []
        with contextlib.ExitStack() as steps:  # runs the last step first, and all of them even if one fails
            steps.callback(self._forget)  # last: until then, no other cluster may start
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
        self._state = "ended"
        atexit.unregister(self.shutdown)
        if Cluster.current is self:
            Cluster.current = None  # from now on, another may start

    def restart(self, targets: Targets = None, *, process_group: bool = False) -> list[str]:
        """Kill workers and start them again, under the same names and ranks.

        All workers form a new process group: at once if all are idle, else when the last one becomes idle; `awaited`
        then names the workers that were not idle. Groups, DDP and FSDP wrappers of the old process group no longer
        work. RRefs to values of the killed workers are lost, and their cells fail with `WorkerLost`. Workers that did
        not become ready again, also after Ctrl-C, are dead: call it again.

        Args:
            targets: Which workers; None for all dead workers.
            process_group: Whether to form the process group now, even if no worker is restarted, and to wait until
                busy workers take part.

        Returns:
            The names of the workers that were restarted; none without targets if no worker is dead.

        Raises:
            StartError: The workers were not ready again within the cluster's timeout, or a step failed.
            WorkerLost: A worker died meanwhile; or, with ``process_group``, a dead worker is not among the targets.
            ResourceError: As in `start`.
        """
        self.start()
        return self._changes.restart(targets, process_group=process_group)

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
        self._changes.invite(file, uses=uses, expires=expires)

    def revoke_invitations(self) -> int:
        """Make all invitations invalid; return how many were valid, 0 the second time. Workers that have joined stay.

        Raises UsageError if no worker can join this cluster, as `invite` does.
        """
        self.start()
        return self._changes.revoke_invitations()

    def wait_for_workers(self, count: int, *, timeout: float | None = None) -> None:
        """Wait until the cluster has at least ``count`` workers, dead ones included; new ones join by an invitation.

        Returns at once if it has. The process group may still have to form: it does once all workers are idle.

        Args:
            count: How many workers.
            timeout: Seconds to wait, more than 0; None for the cluster's timeout.

        Raises:
            UsageError: The cluster has fewer workers and none can join (see `invite`), or ``timeout`` is not above 0.
            StartError: It has fewer workers after the timeout.

        Example:
            ::

                cluster.invite("invitation.json", uses=2)  # python -m nbdist worker --connect invitation.json
                cluster.wait_for_workers(4)
        """
        seconds = self.spec.timeout if timeout is None else durations.positive(timeout)
        self.start()
        self._changes.wait_for_workers(count, seconds)

    def rebuild_process_group(self) -> None:
        """Form a new process group of all workers, as is needed after an interrupt has ended a collective.

        Waits until all workers have taken part. A busy worker first ends the cells that it was sent before. Without a
        process group (the backend none), does nothing.

        Raises:
            WorkerLost: A worker is dead, or dies meanwhile; `restart` it.
            StartError: The group did not form within the cluster's timeout, or a worker failed to form it.
        """
        self.start()
        self._changes.rebuild_process_group()

    # -- cells ----------------------------------------------------------------------------------

    def select(self, targets: Targets) -> list[Worker]:
        """Return the workers that ``targets`` name, each once, in the order given, dead ones too. Starts nothing.

        Raises:
            UnknownWorker: The cluster has no such worker.
            UsageError: The targets cannot be read, or name no worker, as an empty list does.
        """
        return self._team.select(targets)

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

        Ctrl-C while this waits interrupts the cell on all its workers and raises KeyboardInterrupt. On a dead worker
        the cell fails at once, and it runs on the others.

        Args:
            code: The cell's source: Python and IPython's magics.
            targets: Which workers.
            block: Whether to wait until the cell has ended on all workers, and then to raise its error. Without it,
                return at once; the error is shown when the cell ends, and the handle's ``wait()`` raises it.
            timeout: Seconds, more than 0, after which the cell is interrupted everywhere. None, or more than 1e8, for
                no limit. Without ``block``, the cell's error is then a KeyboardInterrupt.
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
            UsageError: ``timeout`` is not more than 0, or the cluster has been shut down.
        """
        seconds = None if timeout is None else durations.positive(timeout)
        self.start()
        options = CellOptions(block, group_outputs, keep, sink, quiet, fail_fast, progress_after, above)
        return self._cells.execute(code, targets, options, seconds)

    # -- calls ----------------------------------------------------------------------------------

    def executor(self, targets: Targets = None) -> WorkerExecutor:
        """Return an executor of `concurrent.futures` that calls functions on the workers in ``targets``.

        Each call goes to the first worker that is free: it runs no call and no cell. A worker runs one call at a time,
        after the cells that it was sent before. A call fails with `WorkerLost` if its worker dies while it runs, or if
        all its workers are dead. One that no worker has taken fails with `UsageError` when the cluster is shut down.
        ``submit`` raises neither.
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
        A second call with the same function does nothing, unless the first one failed. Dead workers are skipped.

        Args:
            function: The function, which the workers can import. It may run several times on a worker.

        Raises:
            WorkerLost: A worker died meanwhile.
            EncodeError: The function cannot be sent.
            Exception: The function raised it. If several workers fail, the first one's, with a note of the others.

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
        with undone_by(self._called_on_each.discard, function), undone_by(forget):  # there are no later calls then
            ask_each(self.agent, function, dict.fromkeys(names, ())).or_raise()

    # -- looking for trouble --------------------------------------------------------------------

    def examine(self, *, timeout: float = 60.0) -> Examination:
        """Ask each worker for its facts, measure the links between all members, and return the faults.

        Asks for versions, clocks, memory, GPUs and NCCL, and for the code that differs. Then one pair of members after
        another makes calls and sends a tensor, which takes about 0.7 s for each pair, and less if there are many. Busy
        workers take part. The result names dead workers and workers that do not answer within 3 s. A notebook shows the
        result as tables, and `print` as text. `%dist_doctor` shows it.

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
        made: Timeline = registry.Timeline(self.agent)
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
        client = registry.Client(self)
        made: DirectView | LoadBalancedView = (client.load_balanced_view if balanced else client.direct_view)(targets)
        return made

    # -- stopping -------------------------------------------------------------------------------

    def interrupt(self, targets: Targets = None) -> None:
        """Interrupt everything that the workers in ``targets`` do: cells, begun or not, and calls from other workers.

        Each of these cells fails with a `CellError` that is named KeyboardInterrupt. Each of these calls fails with a
        KeyboardInterrupt on the worker. This method returns before they have ended. Cells and calls that are sent later
        run. Dead workers are skipped, and one that does not answer raises nothing. `UnknownWorker` for wrong targets.
        """
        self.start()
        self._interrupts.stop_workers([worker for worker in self.select(targets) if worker.alive])

    # -- values ---------------------------------------------------------------------------------

    def evaluate(self, expression: str, targets: Targets = None, *, timeout: float | None = None) -> Any:
        """Return a copy of the value that an expression has on a worker, or a list of values for several workers.

        The expression runs as a cell, so a worker first ends the cells that it was sent before. No autograd context
        records the copy.

        Args:
            expression: One Python expression, or a cell that ends with one; a statement gives None.
            targets: Which workers. A rank or a name gives one value; everything else, also None, gives a list.
            timeout: Seconds, more than 0, after which the expression is interrupted; None for no limit.

        Raises:
            CellError: The expression failed on a worker, or a worker is dead, as in `execute`; CellTimeout if it was
                interrupted after ``timeout``.
            EncodeError: The value cannot be sent.
            UsageError: ``timeout`` is not more than 0.
        """
        seconds = None if timeout is None else durations.positive(timeout)
        self.start()
        return self._values.evaluate(expression, targets, seconds)

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
        check_kept(cell)
        return self._values.references(cell, targets)

    def push(self, variables: Mapping[str, Any], targets: Targets = None) -> None:
        """Set variables on workers, after the cells that they were sent before; return when that is done.

        If a value cannot be sent, or a worker is dead at the beginning, no worker sets any variable.

        Args:
            variables: The values by name. A worker gets copies.
            targets: Which workers.

        Raises:
            UsageError: A name is no Python identifier.
            EncodeError: A value cannot be sent; the text says which part of which variable.
            WorkerLost: One of these workers is dead, or dies meanwhile.
        """
        check_pushed(variables)
        self.start()
        self._values.push(variables, targets)

    def pull(self, names: str | Sequence[str], targets: Targets = None) -> Any:
        """Return copies of the values that variables have on workers.

        Args:
            names: One name, such as ``"x"`` or ``"model.weight"``, gives its value; a sequence of names gives a dict.
            targets: Which workers. A rank or a name gives one result; everything else, also None, gives a list.

        Raises:
            UsageError: A name cannot be the name of a variable or an attribute; `evaluate` takes any expression.
            CellError: A worker has no such variable or attribute, or is dead; nothing is returned then. The error is
                also a NameError, AttributeError or WorkerLost, if all workers that failed have that class.
            EncodeError: A value cannot be sent.
        """
        wanted = names if isinstance(names, str) else list(names)
        check_pulled(wanted)
        self.start()
        return self._values.pull(wanted, targets)

    def sync(self) -> list[str]:
        """Wait until every worker has run all the cells that it was sent; return the names of the workers.

        Waits without a limit, and raises no errors of these cells. Ctrl-C ends the wait only, with KeyboardInterrupt.

        Raises:
            WorkerLost: A worker is dead or dies meanwhile.
            UsageError: The cluster has been shut down.
        """
        self.execute("pass", quiet=True)
        return self.names

    # -- for the notebook -----------------------------------------------------------------------

    def settle(self, *, patience: float | None = None) -> None:
        """Show, below the cell that runs in the notebook, the output that its calls (RPCs) have printed on workers.

        Waits for text that is on its way. Raises nothing for a dead worker, or after `shutdown`; AttributeError before
        `start`. The magics call this after each cell, and before a cell's result is shown;
        programs need not. ::

            called                              the page is watched     captured output, or nobody watches
            after a cell (``patience`` None)    does not wait           waits up to 1 s
            before a result is shown            waits ``patience`` s    ``patience`` s if watched, else 1 s

        The page counts as watched if its user can be asked for input (`Sink.interactive`).

        Args:
            patience: Seconds to wait at most before a result is shown; None after a cell.
        """
        self._cells.settle(patience)


Cluster.__doc__ = (Cluster.__doc__ or "").replace("(arguments)", textwrap.indent(describe_arguments(), " " * 8).strip())


def _after_fork() -> None:
    Cluster.current = None  # the cluster stays with the parent process


os.register_at_fork(after_in_child=_after_fork)
