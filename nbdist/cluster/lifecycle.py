"""How the workers of a cluster come up, form their process group, and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from nbdist.channel.resources import full_disk_in_words
from nbdist.cluster import group_store
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.launchers import Launcher, find_launcher
from nbdist.cluster.setup import WorkerSetup, group_folder
from nbdist.cluster.spec import Spec
from nbdist.cluster.workers import StartError, Worker, first_error, lost_error

__all__ = ["Lifecycle"]

_log = logging.getLogger("nbdist.cluster")
_NOT_FORMED = "the process group did not form anew after a restart: %s; `%%dist_restart -p` tries again"

_LAST_OUTPUT = 0.03
"""Seconds for what a worker said before its end to come."""

_GOODBYE = 1.0
_POLL = 0.005


class Lifecycle:
    """Starts, restarts and ends the workers of one cluster."""

    def __init__(
        self,
        spec: Spec,
        backend: str,
        workers: Sequence[Worker],
        thread: KernelThread,
        listener: Callable[[Worker, str, Message], None],
        reached: Callable[[str, str], None],
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._workers = workers
        self._thread = thread
        self._listener = listener
        self._reached_step = reached
        self._generation = 0
        self._group_is_due = False
        """Whether the process group is to be formed anew once all workers are idle. Of the kernel thread."""
        self._begun: dict[str, Future[int]] = {}
        self.launcher: Launcher = find_launcher(spec.launcher)(spec.count, self._on_end)
        self.folder = self.launcher.folder
        self._preloading = self.launcher.preload(spec.preload, self._surroundings()) if spec.preload else None
        self._master_port = _free_port()

    @property
    def meeting(self) -> str:
        """The ``init_method`` of the RPC world."""
        return f"file://{self.folder}/members"

    # -- up -----------------------------------------------------------------------------------

    def launch(self, workers: Sequence[Worker]) -> None:
        """Have processes made; `bring_up` sees them through."""
        self._begun = {worker.name: self._launch(worker) for worker in workers}

    def _launch(self, worker: Worker) -> Future[int]:
        worker.prepare(self._thread, self.folder, self._listener)
        setup = WorkerSetup(
            name=worker.name,
            id=worker.id,
            rank=worker.rank,
            world_size=self._spec.count,
            connection_file=str(worker.connection_file(self.folder)),
            folder=str(self.folder),
            meeting=self.meeting,
            master_port=self._master_port,
            backend=self._backend,
            gpu=worker.gpu,
            device=worker.device,
            seed=self._spec.seed,
        )
        try:
            return self.launcher.start(setup, self._environment(worker))
        except BaseException:
            worker.lose("could not be started")
            worker.ended.set()
            raise

    @staticmethod
    def _surroundings() -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("JPY_PARENT_PID", None)  # the worker's parent is another
        environment.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        return environment

    def _environment(self, worker: Worker) -> dict[str, str]:
        environment = self._surroundings()
        if worker.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._spec.visible_gpus(worker.gpu)
        return environment

    def bring_up(self, workers: Sequence[Worker], deadline: float) -> None:
        """See launched workers through their steps; all of the cluster's form their process group too."""

        async def reach(worker: Worker) -> None:
            worker.pid = await asyncio.wrap_future(self._begun.pop(worker.name))
            self._reached(worker, "process")
            assert worker.kernel is not None
            await worker.kernel.open()
            self._reached(worker, "kernel")
            await worker.call("join()")
            self._reached(worker, "rpc")

        async def all_steps() -> None:
            if self._preloading is not None:
                await asyncio.wrap_future(self._preloading)
                self._preloading = None
            await first_error([asyncio.create_task(reach(worker)) for worker in workers])
            if len(workers) == len(self._workers):
                await self._form_group()
            for worker in workers:
                self._reached(worker, "ready")

        self._in_time(all_steps(), deadline)

    def form_group(self, deadline: float) -> None:
        """Form the process group of all workers anew."""
        self._in_time(self._form_group(), deadline)

    def form_group_once_idle(self, deadline: float) -> list[str]:
        """Form the process group of all workers anew; return who is not idle and has to be first."""
        if self._backend == "none":
            return []

        async def look() -> list[str]:
            busy = [worker.name for worker in self._workers if worker.state != "idle"]
            self._group_is_due = bool(busy)
            return busy

        busy = self._thread.run(look()).result()
        if not busy:
            self.form_group(deadline)
        return busy

    def after_cell(self) -> None:
        """Form the process group if that is due and the last worker is idle now. In the kernel thread.

        The workers are told before this returns, so that what they are sent next runs in the new group.
        """
        if not (self._group_is_due and all(worker.state == "idle" for worker in self._workers)):
            return

        async def see_through(forming: Coroutine[Any, Any, None]) -> None:
            try:
                async with asyncio.timeout(self._spec.timeout):
                    await forming
            except Exception as error:
                _log.error(_NOT_FORMED, error)

        try:
            self._thread.loop.create_task(see_through(self._begin_group()))
        except Exception as error:  # the cell must end all the same
            _log.error(_NOT_FORMED, error)

    async def _form_group(self) -> None:
        if self._backend != "none":
            await self._begin_group()

    def _begin_group(self) -> Coroutine[Any, Any, None]:
        """Tell all workers to form the next process group; return what waits until they have."""
        for worker in self._workers:
            if not worker.alive:
                raise lost_error(worker)
        self._group_is_due = False
        self._generation += 1
        before, folder = (self.folder / group_folder(number) for number in (self._generation - 1, self._generation))
        folder.mkdir(mode=0o700)

        async def formed(worker: Worker, call: Coroutine[Any, Any, None]) -> None:
            await call
            if worker.step != "ready":
                self._reached(worker, "process group")

        forming = [formed(worker, worker.call(f"group({self._generation})")) for worker in self._workers]

        async def all_formed() -> None:
            try:
                await first_error([asyncio.create_task(waiting) for waiting in forming])
            except BaseException as error:
                # The other workers wait in the store for the one that failed, deaf to everything but this.
                group_store.end(folder, f"the process group did not form: {error or type(error).__name__}")
                raise
            finally:
                shutil.rmtree(before, ignore_errors=True)

        return all_formed()

    def _reached(self, worker: Worker, step: str) -> None:
        worker.step = step
        with contextlib.suppress(Exception):  # a view must not keep a cluster from starting
            self._reached_step(worker.name, step)

    def _in_time(
        self, work: Coroutine[Any, Any, None], deadline: float, otherwise: str = "the process group did not form"
    ) -> None:
        """Have the kernel thread do this; name who is late."""

        async def limited() -> None:
            await asyncio.wait_for(work, max(0.0, deadline - time.monotonic()))

        running = self._thread.run(limited())
        try:
            with full_disk_in_words(self.folder, "a worker has ended"):
                running.result()
        except KeyboardInterrupt:
            running.cancel()
            raise
        except TimeoutError:
            if self._preloading is not None:
                names = ", ".join(self._spec.preload)
                raise StartError(f"{names} could not be imported within {self._spec.timeout:g} s") from None
            late = [f"{w.name} ({w.lost or f'has reached: {w.step}'})" for w in self._workers if w.step != "ready"]
            who = ", ".join(late) or otherwise
            raise StartError(f"not all workers were ready within {self._spec.timeout:g} s: {who}") from None

    # -- down ---------------------------------------------------------------------------------

    def kill(self, workers: Sequence[Worker], is_member: Callable[[str], bool], deadline: float) -> None:
        """Kill workers, and wait until they are gone, also from the RPC world."""

        def is_gone(worker: Worker) -> bool:
            return (worker.ended.is_set() or worker.pid is None) and not is_member(worker.name)

        async def kill() -> None:
            for worker in workers:
                self.launcher.signal(worker.name, signal.SIGKILL)  # whatever is known of it
                worker.lose("was restarted", "run the cell again")
            while not all(map(is_gone, workers)):
                await asyncio.sleep(_POLL)

        self._in_time(kill(), deadline, "those to be restarted have not ended")

    def say_goodbye(self) -> None:
        """Let idle kernels end by themselves, so that what their users registered for that runs."""

        async def ask() -> None:
            asked = [worker for worker in self._workers if worker.alive and not worker.cells]
            for worker in asked:
                assert worker.kernel is not None
                worker.kernel.send("shutdown_request", {"restart": False}, channel="control")
            deadline = time.monotonic() + _GOODBYE
            while any(worker.alive for worker in asked) and time.monotonic() < deadline:
                await asyncio.sleep(_POLL)

        with contextlib.suppress(Exception):
            self._thread.run(ask()).result(2 * _GOODBYE)

    def close(self) -> None:
        """Kill all that lives; nothing is left."""
        self.launcher.close()
        for worker in self._workers:
            worker.step = "ended"
        self._thread.soon(self._lose_all)

    def _lose_all(self) -> None:
        for worker in self._workers:
            worker.lose("has been shut down with its cluster", "`%dist_init` starts another")
            if worker.print_log is not None:
                worker.print_log.close()

    def _on_end(self, name: str, code: int) -> None:
        worker = next(worker for worker in self._workers if worker.name == name)
        worker.exit(code)
        self._thread.soon(self._thread.loop.call_later, _LAST_OUTPUT, self._ended, worker, worker.lives, code)

    def _ended(self, worker: Worker, life: int, code: int) -> None:
        if worker.lives == life:  # else it has been started anew since
            worker.end(code, self.launcher.last_words(worker.name))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
