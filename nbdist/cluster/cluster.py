"""The workers that one notebook, or script, drives."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch.distributed

from nbdist.channel.liveness import is_alive, started_at
from nbdist.cluster import labels
from nbdist.cluster.arrange import Arranger, Grouped, Live, Straight
from nbdist.cluster.cells import Cell
from nbdist.cluster.comms import Comms
from nbdist.cluster.folder import make_folder
from nbdist.cluster.interrupting import interrupt_cell
from nbdist.cluster.jupyter_wire import pack
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.launchers import Launcher, find_launcher
from nbdist.cluster.origins import Origins
from nbdist.cluster.setup import WorkerSetup
from nbdist.cluster.sinks import Sink, current_sink
from nbdist.cluster.spec import Spec
from nbdist.cluster.targets import parse_targets
from nbdist.cluster.worker_output import FENCE, METADATA, NAMES, fence, take_last_value
from nbdist.cluster.workers import StartError, Worker, first_error, lost_error
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc import api, failures
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.rref import RRef

__all__ = ["Cluster"]

_ROUTES = 2000
"""How many cells are remembered for what still comes from them."""

_SETTLE = 1.0
_dist: Any = torch.distributed

Targets = str | int | Sequence[int | str] | None


class _Fence:
    """Waits until all output that was on its way has come: the workers' answers come behind it."""

    def __init__(self, awaited: int) -> None:
        self.all_came = threading.Event()
        self._awaited = awaited
        self._lock = threading.Lock()

    def pass_one(self) -> None:
        """One answer has come, or none will."""
        with self._lock:
            self._awaited -= 1
            if self._awaited <= 0:
                self.all_came.set()


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
        progress: Callable[[str, str], None] | None = None,
    ) -> None:
        gpus = None if gpu_ids is None else tuple(gpu_ids)
        self.spec = Spec(n, gpus, backend, driver, seed, timeout, launcher, isolate_gpus)
        self.spec.check()
        self.progress = progress
        self._state = "new"
        self._pid = os.getpid()
        self._routes: OrderedDict[str, Any] = OrderedDict()
        self._fences: dict[str, _Fence] = {}
        self._generation = 0
        self._counter = 0
        first = 0 if driver is None else 1
        devices = self.spec.devices()
        self.workers = [
            Worker(f"worker{rank + first}", rank, rank + first, *devices[rank]) for rank in range(self.spec.count)
        ]
        self.driver = driver or "notebook"

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
        return str(self._folder)

    def find(self, name: str) -> Worker:
        """The worker of that name."""
        return next(worker for worker in self.workers if worker.name == name)

    @property
    def kernel_thread(self) -> KernelThread:
        """The thread that talks to the kernels."""
        return self._thread

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker's process."""
        self._launcher.signal(name, number)

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
        if self._state == "running":
            return self
        if self._state != "new":
            raise UsageError("this cluster has been shut down; make another")
        if Cluster.current is not None:
            raise UsageError("a cluster runs in this process already; shut it down first")
        if api.is_initialized():
            raise UsageError("RPC runs in this process already; call rpc.shutdown() before a cluster starts")
        self._state = "starting"
        Cluster.current = self
        try:
            self._start()
        except BaseException:
            self.shutdown()
            raise
        self._state = "running"
        atexit.register(self.shutdown)
        return self

    def _start(self) -> None:
        started = time.monotonic()
        self._folder = make_folder()
        self._launcher: Launcher = find_launcher(self.spec.launcher)(self._folder, self.spec.count, self._on_end)
        self._thread = KernelThread()
        self._comms = Comms(self._thread)
        # All that is to be done here is done while the zygote imports torch.
        self._store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._master_port = _free_port()
        self._begun = [self._launch(worker) for worker in self.workers]
        id = 0 if self.spec.driver is not None else self.spec.count
        options = RpcBackendOptions(init_method=self._meeting)
        self.agent: Agent = api.initialize(self.driver, id, None, options, hosted=True)
        self.agent.explain_end = self._explain_end
        self._origins = Origins(self)
        self.agent.origin = self._origins.current
        failures.on_text(labels.rename_frames)
        self._finish_in_time(self._bring_up(self.workers), started + self.spec.timeout)

    @property
    def _meeting(self) -> str:
        return f"file://{self._folder}/members"

    def _launch(self, worker: Worker) -> Any:
        """Start a worker's process; it says when there is a pid."""
        worker.prepare(self._thread, self._folder, self._on_message)
        setup = WorkerSetup(
            name=worker.name,
            id=worker.id,
            rank=worker.rank,
            world_size=self.spec.count,
            connection_file=str(worker.connection_file(self._folder)),
            folder=str(self._folder),
            meeting=self._meeting,
            store_port=self._store.port,
            master_port=self._master_port,
            backend=self.backend,
            gpu=worker.gpu,
            device=worker.device,
            seed=self.spec.seed,
        )
        return self._launcher.start(setup, self._environment(worker))

    def _environment(self, worker: Worker) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("JPY_PARENT_PID", None)  # the worker's parent is another
        environment.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        if worker.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.spec.visible_gpus(worker.gpu)
        return environment

    async def _bring_up(self, workers: Sequence[Worker]) -> None:
        """See started workers through their steps."""

        async def reach(worker: Worker, pid: Any) -> None:
            worker.pid = await asyncio.wrap_future(pid)
            self._reached(worker, "process")
            assert worker.kernel is not None
            await worker.kernel.open()
            self._reached(worker, "kernel")
            await worker.call("join()")
            self._reached(worker, "rpc")

        begun, self._begun = self._begun, []
        await first_error([asyncio.create_task(reach(*pair)) for pair in zip(workers, begun, strict=True)])
        if len(workers) == len(self.workers):
            await self._form_group()
        for worker in workers:
            self._reached(worker, "ready")

    async def _form_group(self) -> None:
        if self.backend == "none":
            return

        async def form(worker: Worker) -> None:
            if not worker.alive:
                raise lost_error(worker)
            await worker.call(f"group({self._generation})")
            if worker.step != "ready":
                self._reached(worker, "process group")

        await first_error([asyncio.create_task(form(worker)) for worker in self.workers])

    def _reached(self, worker: Worker, step: str) -> None:
        worker.step = step
        if self.progress is not None:
            with contextlib.suppress(Exception):  # a view must not keep a cluster from starting
                self.progress(worker.name, step)

    def _finish_in_time(self, work: Any, deadline: float) -> None:
        """Have the kernel thread do this; name who is late."""

        async def limited() -> None:
            await asyncio.wait_for(work, max(0.0, deadline - time.monotonic()))

        running = self._thread.run(limited())
        try:
            running.result()
        except KeyboardInterrupt:
            running.cancel()
            raise
        except TimeoutError:
            late = [f"{w.name} ({w.lost or f'has reached: {w.step}'})" for w in self.workers if w.step != "ready"]
            raise StartError(f"not all workers came up within {self.spec.timeout:g} s: {', '.join(late)}") from None

    # -- ending -------------------------------------------------------------------------------

    def shutdown(self, *, ask: bool = True) -> int:
        """End all workers; nothing of them is left, no process, socket, or file. How many processes there are still.

        Kernels that do nothing are asked to end, so that what was registered for that runs, unless ``ask`` is false.
        """
        if self._state in ("new", "ended") or os.getpid() != self._pid:
            return 0
        self._state = "ended"
        atexit.unregister(self.shutdown)
        if Cluster.current is self:
            Cluster.current = None
        agent, launcher, thread = (getattr(self, name, None) for name in ("agent", "_launcher", "_thread"))
        processes = [(worker.pid, started_at(worker.pid)) for worker in self.workers if worker.pid and not worker.lost]
        if ask and thread is not None and all(worker.step == "ready" for worker in self.workers):
            with contextlib.suppress(Exception):
                thread.run(self._say_goodbye()).result(_SETTLE + 1)
        if agent is not None:
            api.finish(agent)
        if launcher is not None:
            launcher.close()
        for worker in self.workers:
            worker.step = "ended"
        if thread is not None:
            thread.soon(self._lose_all)
            self._comms.close()
            thread.close()
        self._store = None
        return sum(is_alive(pid, started) for pid, started in processes)

    async def _say_goodbye(self) -> None:
        """Let kernels end by themselves, so that what their users registered for that runs."""
        asked = [worker for worker in self.workers if worker.alive and not worker.cells]
        for worker in asked:
            assert worker.kernel is not None
            worker.kernel.send("shutdown_request", {"restart": False}, channel="control")
        deadline = time.monotonic() + _SETTLE
        while any(worker.alive for worker in asked) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _lose_all(self) -> None:
        for worker in self.workers:
            worker.lose("has been shut down with its cluster")

    def restart(self, targets: Targets = None, *, process_group: bool = False) -> list[str]:
        """Start workers anew, under their names and ranks; without targets, those that have died.

        ``process_group`` forms that of all workers anew; it is also done when all of them restart.
        """
        self.start()
        chosen = self._dead() if targets is None else self.select(targets)
        if not chosen and not process_group:
            raise UsageError("no worker has died; name those to restart, or `all`")
        deadline = time.monotonic() + self.spec.timeout
        self._thread.run(self._kill(chosen)).result()
        self._begun = [self._launch(worker) for worker in chosen]
        if chosen:
            if len(chosen) == len(self.workers):
                self._generation += 1
            self._finish_in_time(self._bring_up(chosen), deadline)
        if process_group and len(chosen) < len(self.workers):
            self.rebuild_process_group()
        return [worker.name for worker in chosen]

    def rebuild_process_group(self) -> None:
        """Form the process group of all workers anew: after one was restarted, or a collective interrupted."""
        self.start()
        self._generation += 1
        self._finish_in_time(self._form_group(), time.monotonic() + self.spec.timeout)

    def _dead(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.lost is not None]

    async def _kill(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker.lost is None:
                self._launcher.signal(worker.name, signal.SIGKILL)
                worker.lose("was restarted")
        names = {worker.name for worker in workers}
        while not all(worker.ended.is_set() for worker in workers):
            await asyncio.sleep(0.005)
        while any(record.name in names for record in self.agent.membership.members()):
            await asyncio.sleep(0.005)  # RPC learns of it by itself

    # -- what workers tell ----------------------------------------------------------------------

    def _on_end(self, name: str, code: int) -> None:
        self._thread.soon(self._thread.loop.call_later, 0.03, self._lost, name, code)  # its last output comes first

    def _lost(self, name: str, code: int) -> None:
        worker = self.find(name)
        worker.end(code, self._launcher.last_words(name))

    def _explain_end(self, pid: int) -> str:
        for worker in self.workers:
            if worker.pid == pid:
                worker.ended.wait(_SETTLE)
                return worker.lost or ""
        return ""

    def _on_message(self, worker: Worker, channel: str, message: Message) -> None:
        parent = message["parent_header"].get("msg_id", "")
        if channel == "iopub":
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stderr":
                worker.remember_stderr(content["text"])
            if kind.startswith("comm_"):
                self._comms.from_worker(worker, message)
            if kind == FENCE:
                self._on_fence(content)
                return
            if kind == NAMES:
                worker.names = content["names"]
                return
            route = self._routes.get(parent) or self._origins.find(parent)
            if route is not None:
                route.on_output(worker.name, message)
        elif channel == "shell":
            route = self._routes.get(parent)
            if route is not None:
                route.on_reply(worker.name, message["content"])
        elif channel == "stdin":
            route = self._routes.get(parent)
            if route is not None:
                route.on_input(worker.name, message)

    # -- cells ----------------------------------------------------------------------------------

    def select(self, targets: Targets) -> list[Worker]:
        """The workers that targets name."""
        if targets is None:
            return list(self.workers)
        if isinstance(targets, Sequence) and not isinstance(targets, str):
            targets = ",".join(map(str, targets))
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
    ) -> Cell:
        """Run a cell on workers; with ``block`` wait for it, which raises its errors.

        What it puts out appears here while it runs. ``timeout`` (seconds) interrupts it.
        """
        self.start()
        workers = self.select(targets)
        sink = sink or current_sink()
        self._counter += 1
        number = labels.cell_number() or self._counter
        cell = Cell(
            code,
            [worker.name for worker in workers],
            sink,
            _arranger(workers, sink, grouped=group_outputs),
            self._thread,
            self._interrupt_cell,
            self._answer,
            number=number,
            foreground=block,
            quiet=quiet,
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
        told = {METADATA: {"number": number, "keep": keep, "origin": self._origins.current()}}
        self._thread.soon(self._send, cell, workers, request, told)
        if block:
            cell.wait(timeout)
        elif timeout is not None:
            self._thread.soon(self._thread.loop.call_later, timeout, self._cancel_late, cell)
        return cell

    def _send(self, cell: Cell, workers: Sequence[Worker], request: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        cell.when_part_ends(self._part_ended)
        content, metadata = pack(request), pack(told)  # once for all
        for worker in workers:
            if worker.alive:
                assert worker.kernel is not None
                id = cell.parts[worker.name].id = worker.kernel.send("execute_request", content, metadata=metadata)
                self._routes[id] = cell
                worker.cells.append(cell)
        for worker in workers:
            if not worker.alive:
                cell.on_lost(worker.name, f"{worker.lost}\n`%dist_restart {worker.name}` starts it again")
        while len(self._routes) > _ROUTES and next(iter(self._routes.values())).done:
            self._routes.popitem(last=False)

    def _part_ended(self, cell: Cell, name: str) -> None:
        worker = self.find(name)
        if cell in worker.cells:
            worker.cells.remove(cell)

    def _cancel_late(self, cell: Cell) -> None:
        if not cell.done:
            cell.interrupted = True
            self._thread.loop.create_task(interrupt_cell(self, cell))

    def _answer(self, name: str, text: str, request: Message) -> None:
        kernel = self.find(name).kernel
        assert kernel is not None
        self._thread.soon(lambda: kernel.send("input_reply", {"value": text}, channel="stdin", parent=request))

    # -- stopping -------------------------------------------------------------------------------

    def interrupt(self, targets: Targets = None) -> None:
        """Interrupt what runs on workers, as the stop button does for the cell that waits."""
        self.start()
        for worker in self.select(targets):
            if worker.alive:
                self._launcher.signal(worker.name, signal.SIGINT)

    def _interrupt_cell(self, cell: Cell) -> Sequence[str]:
        if self._thread.is_current():
            self._thread.loop.create_task(interrupt_cell(self, cell))
            return []
        return self._thread.run(interrupt_cell(self, cell)).result()

    # -- values ---------------------------------------------------------------------------------

    def evaluate(self, expression: str, targets: Targets = None, *, timeout: float | None = None) -> Any:
        """The value of an expression on a worker; on several, a list of values."""
        cell = self.execute(expression, targets, timeout=timeout, keep=True, quiet=True)
        values = [api.rpc_async(part.worker, take_last_value, (part.id,)) for part in cell.parts.values()]
        found = [value.wait() for value in values]
        return found[0] if _is_single(targets, len(found)) else found

    def references(self, cell: Cell, targets: Targets = None) -> Any:
        """RRefs to the values of the last expression of a cell that was executed with ``keep``."""
        found: list[RRef[Any]] = [api.remote(part.worker, take_last_value, (part.id,)) for part in cell.parts.values()]
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
        sent: list[Future[Any]] = [api.rpc_async(w.name, receive, (token, dict(variables))) for w in workers]
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

    def settle(self) -> None:
        """A cell of the notebook has ended: where nobody watches, what its calls printed comes before the next one."""
        origin = self._origins.find(current_sink().id)
        if origin is None or origin.sink.interactive:
            return
        token = os.urandom(8).hex()
        alive = [worker for worker in self.workers if worker.alive]
        self._fences[token] = waiting = _Fence(len(alive))
        for worker in alive:
            try:
                self.agent.caller.asynchronous(worker.name, fence, (token,), None, _SETTLE)
            except NbdistError:
                waiting.pass_one()
        waiting.all_came.wait(_SETTLE)
        del self._fences[token]
        self._thread.run(_soon(origin.finish)).result()

    def _on_fence(self, content: Mapping[str, Any]) -> None:
        waiting = self._fences.get(content["token"])
        if waiting is not None:
            waiting.pass_one()

    def complete(self, worker: Worker, code: str, cursor: int, patience: float) -> tuple[list[str], int, int] | None:
        """What a worker's kernel would complete, and from where to where; None if it does not say so in time."""
        if not worker.alive or worker.cells:
            return None

        async def ask() -> Message:
            assert worker.kernel is not None
            request = {"code": code, "cursor_pos": cursor}
            return await asyncio.wait_for(worker.kernel.ask("complete_request", request), patience)

        try:
            content = self._thread.run(ask()).result()["content"]
        except (TimeoutError, NbdistError):
            return None
        return content["matches"], content["cursor_start"], content["cursor_end"]

    def _require_alive(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if not worker.alive:
                raise lost_error(worker)


async def _soon(action: Callable[[], None]) -> None:
    action()


def _is_single(targets: Targets, count: int) -> bool:
    """Whether one worker was meant, rather than several that happen to be one."""
    if isinstance(targets, int):
        return True
    return count == 1 and isinstance(targets, str) and re.fullmatch(r"\s*(-?\d+|[^\W\d]\w*)\s*", targets) is not None


def _arranger(workers: Sequence[Worker], sink: Any, *, grouped: bool) -> Arranger:
    names = [worker.name for worker in workers]
    if len(names) == 1:
        return Straight()
    return Grouped(names) if grouped or not sink.interactive else Live(names)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
