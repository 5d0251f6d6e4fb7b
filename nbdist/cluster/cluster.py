"""The workers that one notebook, or script, drives."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from nbdist import durations
from nbdist.channel.liveness import is_alive, started_at
from nbdist.channel.resources import refusals_in_words
from nbdist.cluster import labels, process_memory
from nbdist.cluster.cells import Cell
from nbdist.cluster.executor import Lanes, WorkerExecutor
from nbdist.cluster.interrupting import interrupt_cell, interrupt_workers
from nbdist.cluster.jupyter_wire import pack
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.outlet import make_arranger
from nbdist.cluster.routing import Router
from nbdist.cluster.sinks import Sink, current_sink
from nbdist.cluster.spec import Spec
from nbdist.cluster.standing import Lookout
from nbdist.cluster.targets import parse_targets
from nbdist.cluster.worker_output import METADATA, fence, take_last_value
from nbdist.cluster.workers import Worker, lost_error
from nbdist.errors import EncodeError, NbdistError, UsageError
from nbdist.rpc import api, failures
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.rref import RRef
from nbdist.torch_private import warn_of_untested
from nbdist.wire import culprit

__all__ = ["Cluster"]

_SETTLE = 1.0

Targets = str | int | Sequence[int | str] | None


class Cluster:
    """Worker kernels, and the RPC world that they and this process form.

    ``Cluster(4)`` describes it; ``start()``, a ``with`` block, or the first use starts it. ``targets`` are written as
    for ``%%remote``: ``0``, ``"0,2"``, ``"worker1"``, ``[0, 2]``; nothing for all.
    """

    current: Cluster | None = None
    """The one that runs in this process; there is one at a time."""

    def __init__(
        self,
        n: int = 2,
        *,
        gpu_ids: Sequence[int] | None = None,
        backend: str | None = None,
        driver: str | None = None,
        seed: int | None = None,
        timeout: float = 120.0,
        launcher: str = "local",
        isolate_gpus: bool = False,
        preload: str | Sequence[str] = (),
        progress: Callable[[str, str], None] | None = None,
    ) -> None:
        gpus = None if gpu_ids is None else tuple(gpu_ids)
        before = (preload,) if isinstance(preload, str) else tuple(preload)
        self.spec = Spec(n, gpus, backend, driver, seed, timeout, launcher, isolate_gpus, before)
        self.spec.check()
        self.progress = progress
        self._state = "new"
        self._pid = os.getpid()
        self._counter = 0
        self.awaited: list[str] = []
        """After a `restart`: the workers that have to become idle before the process group is formed anew."""
        self.farewells: list[Callable[[], object]] = []
        """Called when the cluster is about to be shut down, as long as all is there: each once."""
        first = 0 if driver is None else 1
        devices = self.spec.devices()
        self.workers = [
            Worker(f"worker{rank + first}", rank, rank + first, *devices[rank]) for rank in range(self.spec.count)
        ]
        self.driver = driver or "notebook"
        self._lanes = Lanes(self)

    @classmethod
    def add_view(cls, name: str, make: Callable[..., Any]) -> None:
        """Have ``cluster.name(…)`` be ``make(cluster, …)``: what is drawn of a cluster is not known here."""
        setattr(cls, name, make)

    @classmethod
    def of(cls, spec: Spec) -> Cluster:
        """A cluster by its description."""
        return cls(
            spec.count,
            gpu_ids=spec.gpu_ids,
            backend=spec.backend,
            driver=spec.driver,
            seed=spec.seed,
            timeout=spec.timeout,
            launcher=spec.launcher,
            isolate_gpus=spec.isolate_gpus,
            preload=spec.preload,
        )

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
        """Whether it has been started and not shut down."""
        return self._state == "running"

    @property
    def folder(self) -> str:
        """The run directory."""
        return str(self._lives.folder)

    def find(self, name: str) -> Worker:
        """The worker of that name."""
        return next(worker for worker in self.workers if worker.name == name)

    @property
    def kernel_thread(self) -> KernelThread:
        """The thread that talks to the kernels."""
        return self._thread

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker's process."""
        self._lives.launcher.signal(name, number)

    @property
    def names(self) -> list[str]:
        """The workers' names, by rank."""
        return [worker.name for worker in self.workers]

    @property
    def backend(self) -> str:
        """That of the process group."""
        if self.spec.backend is not None:
            return self.spec.backend
        gpus = {worker.gpu for worker in self.workers} - {None}
        return "nccl" if len(gpus) == self.spec.count else "gloo"  # nccl wants a GPU for each

    def start(self) -> Cluster:
        """Start the workers, and return when all of them answer."""
        if os.getpid() != self._pid:
            raise UsageError("this cluster belongs to the process that this one was forked from")
        if self._state == "running":
            return self
        if self._state != "new":
            raise UsageError("this cluster has been shut down; make another")
        if Cluster.current is not None:
            raise UsageError(
                "a cluster runs in this process already, and there is one at a time; end it with %dist_shutdown, or "
                "its shutdown()"
            )
        if api.is_initialized():
            raise UsageError("RPC runs in this process already; call rpc.shutdown() before a cluster starts")
        warn_of_untested()
        self._state = "starting"
        Cluster.current = self
        try:
            with refusals_in_words("the cluster cannot start"):
                self._start()
        except BaseException:
            self.shutdown()
            raise
        self._state = "running"
        atexit.register(self.shutdown)
        return self

    def _start(self) -> None:
        deadline = time.monotonic() + self.spec.timeout
        self._thread = KernelThread()
        self._router = Router(self._thread, self.names)
        self._lives = Lifecycle(
            self.spec,
            self.backend,
            self.workers,
            self._thread,
            self._router.on_message,
            lambda worker, step: self.progress(worker, step) if self.progress is not None else None,
        )
        self._lives.launch(self.workers)
        # All that is to be done here is done while the zygote imports torch.
        id = 0 if self.spec.driver is not None else self.spec.count
        options = RpcBackendOptions(init_method=self._lives.meeting)
        self.agent: Agent = api.initialize(self.driver, id, None, options, hosted=self._lives.folder)
        self.agent.explain_end = self._explain_end
        self.agent.know_cells(self._router.origins.current)
        failures.on_text(labels.rename_frames)
        self._lives.bring_up(self.workers, deadline)
        process_memory.mark_start()

    # -- ending -------------------------------------------------------------------------------

    def shutdown(self, *, ask: bool = True) -> int:
        """End all workers; nothing of them is left, no process, socket, or file. How many processes there are still.

        Kernels that do nothing are asked to end, so that what was registered for that runs, unless ``ask`` is false.
        """
        if self._state in ("new", "ended") or os.getpid() != self._pid:
            return 0
        agent, lives, thread = (getattr(self, name, None) for name in ("agent", "_lives", "_thread"))
        processes = [(worker.pid, started_at(worker.pid)) for worker in self.workers if worker.pid and not worker.lost]
        with contextlib.ExitStack() as steps:  # all of them, last first, though one fails or the user is impatient
            steps.callback(self._forget)
            if thread is not None:
                steps.callback(thread.close)
                steps.callback(self._router.comms.close)
            if lives is not None:
                steps.callback(lives.close)
            if agent is not None:
                steps.callback(api.finish, agent)
            if ask and lives is not None and all(worker.step == "ready" for worker in self.workers):
                steps.callback(lives.say_goodbye)
            while self.farewells:
                steps.callback(self.farewells.pop())
        return sum(is_alive(pid, started) for pid, started in processes)

    def _forget(self) -> None:
        self._state = "ended"
        atexit.unregister(self.shutdown)
        if Cluster.current is self:
            Cluster.current = None

    def restart(self, targets: Targets = None, *, process_group: bool = False) -> list[str]:
        """Start workers anew, under their names and ranks; without targets, those that have died. Return their names.

        The process group of all workers is formed anew: at once if all are idle, else, unless ``process_group``, when
        the last one is: `awaited` says who that is. ``process_group`` does it also if nobody is restarted.
        """
        self.start()
        self.awaited = []
        chosen = self._dead() if targets is None else self.select(targets)
        deadline = time.monotonic() + self.spec.timeout
        if chosen:
            with refusals_in_words("the workers cannot be restarted"):
                self._lives.kill(chosen, self._is_member, deadline)
                self._lives.launch(chosen)
                self._lives.bring_up(chosen, deadline)
        if process_group and len(chosen) < len(self.workers):
            self._lives.form_group(deadline)
        elif chosen and len(chosen) < len(self.workers):
            self.awaited = self._lives.form_group_once_idle(deadline)
        return [worker.name for worker in chosen]

    def rebuild_process_group(self) -> None:
        """Form the process group of all workers anew: after one was restarted, or a collective interrupted."""
        self.start()
        self._lives.form_group(time.monotonic() + self.spec.timeout)

    def _dead(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.lost is not None]

    def _is_member(self, name: str) -> bool:
        return any(record.name == name for record in self.agent.members())

    def _explain_end(self, pid: int) -> str:
        for worker in self.workers:
            if worker.pid == pid:
                worker.exited.wait(_SETTLE)
                if worker.lost is None:  # else it had no time for last words, which are not waited for
                    worker.ended.wait(_SETTLE)
                return worker.lost or ""
        return ""

    # -- cells ----------------------------------------------------------------------------------

    def select(self, targets: Targets) -> list[Worker]:
        """Return the workers that targets name; an empty sequence names none, which is an error."""
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
        """Run a cell on workers; with ``block`` wait for it, which raises its errors.

        What it puts out appears here while it runs, and so does the error or death of a worker. ``fail_fast``
        interrupts the other workers then. ``progress_after`` seconds without output, a line says where workers stand
        that wait; 0 for never. ``timeout`` (seconds, more than 0) interrupts all; None is for no limit, and so is more
        than 1e8. Tracebacks count lines from ``above`` lines above the code.
        """
        if timeout is not None:
            timeout = durations.positive(timeout)
        self.start()
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
        allow_stdin = block and sink.interactive
        request = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": allow_stdin,
            "stop_on_error": False,
        }
        told = {METADATA: {"number": number, "keep": keep, "above": above, "origin": self._router.origins.current()}}
        packed = pack(request), pack(told)  # once for all

        def send() -> None:
            if not self._thread.soon(self._send, cell, workers, *packed):
                raise UsageError("the cluster has been shut down")
            if progress_after > 0 and sink.interactive and not quiet:
                self._thread.soon(Lookout(self, cell, progress_after).start)

        if block:
            cell.wait(timeout, begin=send)
            return cell
        send()
        if timeout is not None:
            self._thread.soon(self._thread.loop.call_later, timeout, self._cancel_late, cell)
        return cell

    def _send(self, cell: Cell, workers: Sequence[Worker], content: bytes, metadata: bytes) -> None:
        cell.when_part_ends(self._part_ended)
        lost: dict[str, str | None] = {}
        for worker in workers:
            if worker.kernel is None or worker.lost is not None:
                lost[worker.name] = worker.lost
                continue
            id = cell.parts[worker.name].id
            self._router.expect(id, cell)
            worker.cells.append(cell)
            try:
                worker.kernel.send("execute_request", content, metadata=metadata, id=id)
            except Exception as error:  # whatever it is, the cell must end
                lost[worker.name] = f"cannot be reached: {error}"
        for name, why in lost.items():
            cell.on_lost(name, f"{why or 'does not run'}\n`%dist_restart {name}` starts it again")

    def _part_ended(self, cell: Cell, name: str) -> None:
        worker = self.find(name)
        if cell in worker.cells:
            worker.cells.remove(cell)
            self._lives.after_cell()

    def _cancel_late(self, cell: Cell) -> None:
        if not cell.done:
            cell.interrupted = True
            self._thread.loop.create_task(interrupt_cell(self, cell))

    def _answer(self, name: str, text: str, request: Message) -> None:
        kernel = self.find(name).kernel
        assert kernel is not None
        self._thread.soon(lambda: kernel.send("input_reply", {"value": text}, channel="stdin", parent=request))

    # -- calls ----------------------------------------------------------------------------------

    def executor(self, targets: Targets = None) -> WorkerExecutor:
        """Return an executor of `concurrent.futures` that calls functions on some workers, or on all.

        Each call goes to the first worker that is free; a worker runs one call at a time, and first the cells that it
        was sent before::

            with cluster.executor() as pool:
                values = list(pool.map(function, items))
        """
        self.start()
        return WorkerExecutor(self._lanes, [worker.name for worker in self.select(targets)])

    # -- stopping -------------------------------------------------------------------------------

    def interrupt(self, targets: Targets = None) -> None:
        """Interrupt all that workers do: cells, begun or not, and calls that they run for others.

        Does not wait until they end. Each cell fails with KeyboardInterrupt. What is sent afterwards runs.
        """
        self.start()
        interrupt_workers(self, [worker for worker in self.select(targets) if worker.alive])

    def _interrupt_cell(self, cell: Cell) -> Sequence[str]:
        if self._thread.is_current():
            self._thread.loop.create_task(interrupt_cell(self, cell))
            return []
        return self._thread.run(interrupt_cell(self, cell)).result()

    # -- values ---------------------------------------------------------------------------------

    def evaluate(self, expression: str, targets: Targets = None, *, timeout: float | None = None) -> Any:
        """The value of an expression on a worker; on several, a list of values."""
        cell = self.execute(expression, targets, timeout=timeout, keep=True, quiet=True)
        with torch.no_grad():  # a copy of a value: no context records it, and a leaf stays one
            values = [api.rpc_async(part.worker, take_last_value, (part.id,)) for part in cell.parts.values()]
        found = [value.wait() for value in values]
        return found[0] if _is_single(targets, len(found)) else found

    def references(self, cell: Cell, targets: Targets = None) -> Any:
        """RRefs to the values of the last expression of a cell that was executed with ``keep``."""
        found: list[RRef[Any]] = [
            api.remote(part.worker, take_last_value, (part.id,), timeout=0) for part in cell.parts.values()
        ]
        return found[0] if _is_single(targets, len(found)) else found

    def push(self, variables: Mapping[str, Any], targets: Targets = None) -> None:
        """Set variables on workers, once the cells that were sent before have run."""
        from nbdist.cluster.worker_values import receive

        for name in variables:
            if not name.isidentifier():
                raise UsageError(f"{name!r} is not a variable's name")
        self.start()
        workers = self.select(targets)
        self._require_alive(workers)
        token = os.urandom(8).hex()
        with torch.no_grad():  # as in `evaluate`; nor does it warn that no gradient will come back
            try:
                sent: list[Future[Any]] = [api.rpc_async(w.name, receive, (token, dict(variables))) for w in workers]
            except EncodeError as error:
                found = next(filter(None, (culprit.of_value(value, name) for name, value in variables.items())), "")
                raise EncodeError(
                    f"{found}, which cannot be sent: {error.__cause__}" if found else str(error)
                ) from error
        for future in sent:
            future.wait()
        code = f"__import__('nbdist.cluster.worker_values', fromlist=['_']).place({token!r})"
        self.execute(code, [worker.rank for worker in workers], quiet=True)

    def pull(self, names: str | Sequence[str], targets: Targets = None) -> Any:
        """The values of variables on workers: of one name its value, of several a dict; of several workers, a list."""
        several = not isinstance(names, str)
        wanted = list(names) if several else [str(names)]
        for name in wanted:
            if not all(part.isidentifier() for part in name.split(".")):
                raise UsageError(f"{name!r} is not a variable's name; `%remote TARGET expression` gives any value")
        values = self.evaluate(f"({', '.join(wanted)},)", targets)
        shaped = [
            dict(zip(wanted, value, strict=True)) if several else value[0]
            for value in (values if isinstance(values, list) else [values])
        ]
        return shaped if isinstance(values, list) else shaped[0]

    def sync(self) -> list[str]:
        """Wait until every worker has done all that it was sent; who answered."""
        self.execute("pass", quiet=True)
        return self.names

    # -- for the notebook -----------------------------------------------------------------------

    def settle(self, *, patience: float | None = None) -> None:
        """Show what this cell's calls printed on workers, before the notebook goes on.

        Without ``patience``, a cell has ended: one that nobody watches, or whose output is captured, waits up to 1 s
        for that output, and a watched one does not wait. With ``patience`` (seconds), a result is about to be shown:
        all wait, for so long at most.
        """
        sink = current_sink()
        origin = self._router.origins.find(sink.key)
        if origin is None or (sink.interactive and not sink.captured and patience is None):
            return

        def ask(worker: str, token: str) -> bool:
            try:
                self.agent.call(worker, fence, token, timeout=_SETTLE)
            except NbdistError:
                return False
            return True

        within = _SETTLE if patience is None or not sink.interactive else patience
        self._router.settle(origin, [worker for worker in self.workers if worker.alive], ask, within)

    def _require_alive(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if not worker.alive:
                raise lost_error(worker)


def _is_single(targets: Targets, count: int) -> bool:
    """Whether one worker was meant, rather than several that happen to be one."""
    if isinstance(targets, int):
        return True
    return count == 1 and isinstance(targets, str) and re.fullmatch(r"\s*(-?\d+|[^\W\d]\w*)\s*", targets) is not None


def _after_fork() -> None:
    Cluster.current = None  # it is the parent's


os.register_at_fork(after_in_child=_after_fork)
