"""Starts the workers of a cluster, forms their process group, restarts and ends them.

The drawing shows the values of `Worker.step`. ``progress`` is called with each of them except the first and the last::

                  each worker by itself                    all workers together
                  ┌───────────────────────────────────┐    ┌──────────────────┐
    launch        bring_up                                 _begin_group
    "starting" ─> "process" ─> "kernel" ──> "rpc" ───────> "process group" ──> "ready" ──> "ended"
                  started      it answers   it has run     it has run                      close
                               requests     `join()`       `group(generation)`

A worker that is restarted alone, or that joins a running cluster (`bring_in`, `adopt`), goes from "rpc" to "ready". The
process group then forms again, as the next generation in a folder of its own: at once if all workers are idle, else in
`after_cell` of the last cell (`_group_is_due`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from nbdist.channel.resources import full_disk_in_words
from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.kernels.workers import StartError, Worker, first_error, require_alive
from nbdist.cluster.processes.generations import Generations
from nbdist.cluster.processes.launchers.contract import GIVEN_UP, Launcher, StartedWorker
from nbdist.cluster.processes.setup import WorkerSetup, free_port
from nbdist.cluster.spec import Spec
from nbdist.cluster.undoing import undone_by
from nbdist.errors import NbdistError
from nbdist.rpc.core.members import RESTARTED

T = TypeVar("T")

_log = logging.getLogger("nbdist.cluster")
_NOT_FORMED = "the process group did not form anew: %s; `%%dist_restart -p` tries again"

_LAST_OUTPUT_WITHIN = 0.03  # seconds after a process's end in which its last output may arrive; then its cells fail
_KERNELS_END_WITHIN = 1.0  # seconds for idle kernels to end by themselves when the cluster shuts down
# Seconds for workers to end that could not join a running cluster: a host that is cut off is lost after 12.
_KILLED_WITHIN = 20.0
_POLL = 0.005  # seconds between two looks whether processes have ended
_BEFORE_RPC = ("starting", "process", "kernel")  # the steps of a worker that is not a member of the RPC world yet

# The end of a worker whose cluster ends, and what to do then.
_SHUT_DOWN = "has been shut down with its cluster", "`%dist_init` starts another"
# Why a worker is lost if its restart did not reach the step "rpc".
_NOT_READY = "did not become ready: its start failed or was interrupted"


class Lifecycle:
    """Starts, restarts and ends the workers of one cluster.

    Methods wait in the calling thread for coroutines, which run in the kernel thread. A ``deadline`` is by
    `time.monotonic`. ``listener(worker, channel, message)`` gets what kernels send unasked, ``reached(worker, step)``
    each step of a worker, and ``ended(worker, why)`` each end of a worker's process that was a member of the RPC world,
    in that thread. ``is_member(name)`` returns whether the RPC world still counts a worker as a member.
    """

    def __init__(
        self,
        launcher: type[Launcher],
        spec: Spec,
        backend: str,
        workers: list[Worker],
        thread: KernelThread,
        listener: Callable[[Worker, str, Message], None],
        reached: Callable[[Worker, str], None],
        ended: Callable[[Worker, str], None],
        is_member: Callable[[str], bool],
    ) -> None:
        self._spec, self._backend, self._workers, self._thread = spec, backend, workers, thread
        self._listener, self._reached_step, self._ended, self._is_member = listener, reached, ended, is_member
        self.has_group = backend != "none"
        """True if the workers form a process group."""
        self._group_is_due = False  # True if the group must form anew once all are idle; for the kernel thread only
        self._is_ending = False
        self._coming: list[Worker] = []  # those that are starting to join the cluster: see `bring_in`
        self._told_size = len(workers)  # the size of the cluster that all workers know; for the kernel thread only
        # The tasks that wait until workers know that number. A loop keeps only weak references to its tasks.
        self._telling: list[asyncio.Task[None]] = []
        # A token for each cell whose workers `CellSender.execute` has chosen, but which is not sent to them yet.
        self.unsent: set[object] = set()
        # By name: the futures of the starts that `launch` has asked for, until `bring_up` waits for them.
        self._begun: dict[str, Future[StartedWorker]] = {}
        self.launcher = launcher(spec, self._on_end)
        with undone_by(self.launcher.close):  # the zygote or the hub would stay
            self.folder = self.launcher.folder
            self.generations = Generations(self.launcher.group_stores)
            # The imports that the first workers wait for; None once they are done, or if there are none.
            self._preloading = self.launcher.preload(spec.preload) if spec.preload else None
            self._master_port = free_port()

    # -- up -----------------------------------------------------------------------------------

    def launch(self, workers: Sequence[Worker]) -> None:
        """Ask the launcher for a process for each worker. Does not wait: `bring_up` does."""
        self._begun = {}
        with undone_by(self._give_up, workers):  # the workers before would run on
            for worker in workers:
                self._begun[worker.name] = self._launch(worker)

    def _give_up(self, workers: Sequence[Worker]) -> None:
        """Cancel the starts of these workers that nobody waits for."""
        for worker in workers:
            if (start := self._begun.pop(worker.name, None)) is not None:
                worker.lose(GIVEN_UP)
                start.cancel()

    def _launch(self, worker: Worker) -> Future[StartedWorker]:
        """Start a worker's next process; return the future of its start. If the launcher fails, the worker is lost."""
        worker.prepare(self._thread, self.folder, self._listener)
        setup = WorkerSetup(
            name=worker.name,
            id=worker.id,
            rank=worker.rank,
            world_size=len(self._workers) + len(self._coming),
            connection_file=str(worker.connection_file(self.folder)),
            folder=str(self.folder),
            meeting=self.launcher.rpc["init_method"],
            driver=self._spec.driver or "notebook",
            master_port=self._master_port,
            backend=self._backend,
            gpu=worker.gpu,
            device=worker.device,
            gpu_memory=self._spec.gpu_memory,
            rpc=_for_worker(self._spec.rpc, worker.name),
            seed=self._spec.seed,
        )
        with undone_by(worker.fail_to_start):
            visible = {} if worker.gpu is None else {"CUDA_VISIBLE_DEVICES": self._spec.visible_gpus(worker.gpu)}
            return self.launcher.start(setup, visible)

    def bring_up(self, workers: Sequence[Worker], deadline: float) -> None:
        """Wait until launched workers are ready; if these are all workers, they form the process group, too."""

        async def all_steps() -> None:
            await self._all_reach(workers, self._reach_rpc)
            # If only some were restarted, the others may be busy: `WorkerChanges` then decides when the group forms.
            if len(workers) == len(self._workers):
                await self._form_group()
            for worker in workers:
                if worker.step != "ready":
                    self._note_reached(worker, "ready")

        self._in_time(all_steps(), deadline)

    def abandon(self, workers: Sequence[Worker]) -> None:
        """Settle a failed or interrupted restart: no worker stays half started. Waits for the kernel thread."""

        async def settle() -> None:
            self._give_up(workers)
            for worker in workers:
                if worker.step in _BEFORE_RPC:  # killed and lost, so that the next restart starts it again
                    worker.lose(_NOT_READY)
                    self.launcher.signal(worker.name, signal.SIGKILL)
                elif worker.alive and worker.step != "ready":  # it can run cells; the group forms later
                    self._note_reached(worker, "ready")
                    self._group_is_due = self.has_group
            self.after_cell()

        with contextlib.suppress(RuntimeError, CancelledError):  # the cluster ends, and kills all workers
            self._thread.run(settle()).result()

    async def _all_reach(self, workers: Sequence[Worker], reach: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
        """Wait until ``reach`` is done for each launched worker; give up the other starts after the first error."""
        try:
            if self._preloading is not None:
                await asyncio.wrap_future(self._preloading)
                self._preloading = None
            await first_error([asyncio.create_task(reach(worker)) for worker in workers])
        finally:
            self._give_up(workers)

    async def _reach_rpc(self, worker: Worker) -> None:
        """Wait until a launched worker is a member of the RPC world. Raises the error of the step that fails."""
        # Each await raises if the worker dies: `Worker.lose` closes the kernel, which fails its requests.
        worker.note_started(await self._started(worker))
        self._note_reached(worker, "process")
        assert worker.kernel is not None
        await worker.kernel.open()
        self._note_reached(worker, "kernel")
        await worker.call("join()")
        self._note_reached(worker, "rpc")

    def bring_in(self, workers: Sequence[Worker], deadline: float) -> dict[str, BaseException]:
        """Start new workers beside those of the running cluster; return the errors of the failed ones, by name."""
        # Without errors, all are members of the RPC world, and `adopt` makes them workers of the cluster. Else all have
        # been killed. The caller sees to it that neither this nor a restart runs at the same time.
        failed: dict[str, BaseException] = {}

        async def reach(worker: Worker) -> None:
            try:
                await self._reach_rpc(worker)
            except Exception as error:  # a step's, of any class: it says why none of the new workers joins
                failed[worker.name] = error
                raise

        self._coming = list(workers)
        try:
            self.launch(workers)
            self._in_time(self._all_reach(workers, reach), deadline)
        except Exception as error:  # also a launcher's, of any class: the running cluster goes on without them
            if not failed:  # too late, or not even launched
                failed.update({each.name: error for each in workers if each.step != "rpc"} or {workers[0].name: error})
            try:
                with contextlib.suppress(StartError):  # a host may be cut off: it ends its workers by itself
                    self.kill(workers, time.monotonic() + _KILLED_WITHIN)
            finally:
                self._coming = []
        return failed

    def adopt(self, workers: Sequence[Worker], deadline: float) -> list[str]:
        """Make workers of `bring_in` workers of the cluster, and form the group as `form_group_once_idle` does."""

        async def take_in() -> list[str]:
            for worker in workers:
                self._note_reached(worker, "ready")
            self._workers.extend(workers)
            self._coming = []
            # A cell for all workers, chosen before the line above, must not run in the new group without the new ones.
            while self.unsent:
                await asyncio.sleep(_POLL)
            return await self._form_if_idle()

        return self._in_time(take_in(), deadline)

    @contextlib.contextmanager
    def choosing(self) -> Iterator[object]:
        """Return a token in `unsent` for a cell whose workers are chosen in this block."""
        token = object()
        try:
            self.unsent.add(token)
            # The code that sends the cell removes it, in the kernel thread.
            yield token
        except BaseException:  # Ctrl-C, too: no group could form while the token is there
            self.unsent.discard(token)
            self._thread.soon(self.after_cell)
            raise

    async def _started(self, worker: Worker) -> StartedWorker:
        """Wait until a launched worker has its process; raise the error of the start, for which the worker is lost."""
        try:
            return await asyncio.wrap_future(self._begun.pop(worker.name))
        except asyncio.CancelledError:  # given up; `kill` waits for the launcher's report, as there may be a process
            worker.lose(GIVEN_UP)
            raise
        except BaseException:  # of a launcher, of any class: there is no process
            worker.fail_to_start()
            raise

    def form_group(self, deadline: float) -> None:
        """Form the process group of all workers anew and wait until it has formed, unless the backend is none."""
        self._in_time(self._form_group(), deadline)

    def form_group_once_idle(self, deadline: float) -> list[str]:
        """Form the process group anew, now or once all workers are idle; return the names of those that are not."""
        # If all are idle, waits until it has formed; else `after_cell` begins it.
        return self._in_time(self._form_if_idle(), deadline)

    async def _form_if_idle(self) -> list[str]:
        """Form the next process group if all workers are idle, else note that it is due, and return who is not idle."""
        # Cells begin and end in this thread, the kernel thread, and nothing is awaited between the check and the start
        # of the group, so none begins meanwhile.
        busy = [worker.name for worker in self._workers if self.has_group and worker.state != "idle"]
        self._group_is_due = bool(busy)
        if not busy and (self.has_group or self._told_size != len(self._workers)):
            await self._begin_group()
        return busy

    def form_group_later(self, generation: int) -> None:
        """Form the process group of all workers anew as soon as all are idle; from any thread, without waiting."""

        # ``generation`` is the number of the group that is gone.
        def note() -> None:
            if (
                self.has_group
                and generation == self.generations.present  # else another worker has asked for the same
                and all(worker.alive for worker in self._workers)  # else its restart forms the group
            ):
                self._group_is_due = True
                self.after_cell()

        self._thread.soon(note)

    def after_cell(self) -> None:
        """Begin to form the process group if it is due and all workers are idle. In the kernel thread."""
        # A cell that is about to be sent counts as a running cell: its workers were chosen for the present group.
        if self.unsent or not (self._group_is_due and all(worker.state == "idle" for worker in self._workers)):
            return

        async def see_through(forming: Coroutine[Any, Any, None]) -> None:
            try:
                async with asyncio.timeout(self._spec.timeout):
                    await forming
            except Exception as error:  # a worker's, of any class: nobody waits
                if not self._is_ending:
                    _log.error(_NOT_FORMED, error)

        try:
            # The workers are told before this returns: the cells that they are sent next run in the new group.
            self._thread.loop.create_task(see_through(self._begin_group()))
        except Exception as error:  # must not keep the cell from ending
            _log.error(_NOT_FORMED, error)

    async def _form_group(self) -> None:
        if self.has_group:
            await self._begin_group()

    def _begin_group(self) -> Coroutine[Any, Any, None]:
        """Tell all workers to form the next process group; return a coroutine that waits until it has formed."""
        if not self.has_group:
            return self._tell_size()
        require_alive(self._workers)
        generation = self.generations.begin()
        self._told_size = size = len(self._workers)
        self._group_is_due = False  # last: what fails before is tried again after the next cell

        def release(error: BaseException) -> None:
            # The other workers wait in the store for the one that failed; only the store can end that wait.
            self.generations.end(generation, f"the process group did not form: {error or type(error).__name__}")
            self.generations.remove_before(generation)

        async def formed(worker: Worker, call: Coroutine[Any, Any, None]) -> None:
            await call
            if worker.step != "ready":
                self._note_reached(worker, "process group")

        calls: list[tuple[Worker, Coroutine[Any, Any, None]]] = []
        try:
            for worker in self._workers:
                calls.append((worker, worker.call(f"group({generation}, {size})")))
        except BaseException as error:  # of a worker's connection; the workers that were told wait for the others
            for _, call in calls:  # else Python warns that they were never awaited
                call.close()
            release(error)
            raise

        async def all_formed() -> None:
            try:
                await first_error([asyncio.create_task(formed(worker, call)) for worker, call in calls])
            except BaseException as error:  # a worker's, or the time is over
                release(error)
                raise
            self.generations.remove_before(generation)

        return all_formed()

    def enter_group(self, name: str) -> int:
        """Return the number of the process group that worker ``name`` forms in a cell: see `Generations.enter`."""
        require_alive(self._workers)  # the others would wait for it
        return self.generations.enter(name, [worker.name for worker in self._workers])

    def _tell_size(self) -> Coroutine[Any, Any, None]:
        """Tell all living workers how many there are; return a coroutine that sends it."""
        self._told_size = size = len(self._workers)
        calls = [worker.call(f"group(0, {size})") for worker in self._workers if worker.alive]

        async def see_through(call: Coroutine[Any, Any, None]) -> None:
            with contextlib.suppress(NbdistError):
                await call

        async def tell() -> None:
            # Nobody waits: busy workers learn it after the cells that they were sent before.
            self._telling = [asyncio.create_task(see_through(call)) for call in calls]

        return tell()

    def _note_reached(self, worker: Worker, step: str) -> None:
        """Note that a worker has reached a step, and tell the user's ``progress``. In the kernel thread."""
        worker.step = step
        with contextlib.suppress(Exception):  # an error of a view must not keep the cluster from starting
            self._reached_step(worker, step)
        worker.on_change()

    def _in_time(
        self, work: Coroutine[Any, Any, T], deadline: float, otherwise: str = "the process group did not form"
    ) -> T:
        """Run a coroutine in the kernel thread; raise StartError, which names what is late, after ``deadline``."""

        async def limited() -> T:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await work

        running = self._thread.run(limited())
        # A worker that finds the disk full can often not even write down why it ends, so this process looks as well.
        try:
            with full_disk_in_words(self.folder, "a worker ended"):
                return running.result()
        except KeyboardInterrupt:
            running.cancel()
            raise
        except TimeoutError:
            if self._preloading is not None:
                names = ", ".join(self._spec.preload)
                raise StartError(
                    f"{names} could not be imported within {self._spec.timeout:g} s, the timeout: set a longer one "
                    "with `%dist_init -t SECONDS`, or Cluster(timeout=SECONDS)"
                ) from None
            late = [
                f"{each.name} ({f'last step: {each.step}' if each.lost in (None, GIVEN_UP) else each.lost})"
                for each in (self._coming or self._workers)
                if each.step != "ready"
            ]
            who = ", ".join(late) or otherwise
            if late and (advice := self.launcher.advice()):
                who = f"{who}; {advice}"
            raise StartError(
                f"not all workers were ready within {self._spec.timeout:g} s: {who}; a longer timeout is "
                "`%dist_init -t SECONDS`, or Cluster(timeout=SECONDS)"
            ) from None

    # -- down ---------------------------------------------------------------------------------

    def kill(self, workers: Sequence[Worker], deadline: float, because: str = "") -> None:
        """Kill workers; wait until their processes have ended and they are no members of the RPC world any more."""
        why = f"{RESTARTED}, because {because}" if because else RESTARTED

        async def kill() -> None:
            for worker in workers:
                self.launcher.signal(worker.name, signal.SIGKILL)  # also a lost worker's: its process may live
                worker.lose(why, "run the cell again")
                self.generations.lose(worker.name, f"{worker.name} {why}")
            while not all(worker.ended.is_set() and not self._is_member(worker.name) for worker in workers):
                await asyncio.sleep(_POLL)

        self._in_time(kill(), deadline, "the killed workers have not ended")

    def say_goodbye(self) -> None:
        """Ask idle kernels to end, so that their exit handlers run; wait at most `_KERNELS_END_WITHIN` seconds."""

        self._is_ending = True

        # The control channel is served while a kernel is idle and while it works: busy workers are not asked at all.
        async def ask() -> None:
            asked = [worker for worker in self._workers if worker.alive and not worker.cells]
            for worker in asked:
                assert worker.kernel is not None
                worker.kernel.send("shutdown_request", {"restart": False}, channel="control")
            deadline = time.monotonic() + _KERNELS_END_WITHIN
            while any(worker.alive for worker in asked) and time.monotonic() < deadline:
                await asyncio.sleep(_POLL)

        with contextlib.suppress(Exception):  # any error: `close` kills the workers that remain
            self._thread.run(ask()).result(2 * _KERNELS_END_WITHIN)

    def close(self) -> int:
        """Kill all workers, remove the run directory, and fail their cells; return how many workers may still live."""
        self._is_ending = True
        left = self.launcher.close()
        for worker in self._workers:
            worker.step = "ended"
        self._thread.soon(self._lose_all)
        return left

    def _lose_all(self) -> None:
        for worker in [*self._workers, *self._coming]:
            worker.lose(*_SHUT_DOWN)
            if worker.print_log is not None:
                worker.print_log.close()

    def _on_end(self, name: str, how: int | str) -> None:
        """Note that a worker's process has ended, ``how`` as `Launcher` says. In a thread of the launcher's."""
        worker = next((worker for worker in [*self._workers, *self._coming] if worker.name == name), None)
        if worker is None:
            return  # it could not join, and nobody waits for its end
        if self._is_ending:  # `close` has killed it
            how = _SHUT_DOWN[0]
        worker.exit(how)
        # The cells fail a moment later, so that the last output arrives first.
        self._thread.soon(
            self._thread.loop.call_later, _LAST_OUTPUT_WITHIN, self._fail_cells_of, worker, worker.lives, how
        )

    def _fail_cells_of(self, worker: Worker, life: int, how: int | str) -> None:
        """Fail the cells of a worker whose process, number ``life``, has ended. In the kernel thread."""
        if worker.lives == life:  # else the worker has been restarted meanwhile
            if how == _SHUT_DOWN[0]:
                worker.lose(*_SHUT_DOWN)
            why = worker.end(how, self.launcher.last_words(worker.name))
            self.generations.lose(worker.name, f"{worker.name} {why}")
            # The error of a start that was given up says it; the agent never knew a process without an incarnation.
            if how != GIVEN_UP and worker.incarnation is not None:
                self._ended(worker, why)


def _for_worker(rpc: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options of RPC for one worker: without a device map for messages to itself, which stay as they are."""
    maps = {to: device_map for to, device_map in rpc.get("device_maps", {}).items() if to != name}
    return {**rpc, "device_maps": maps} if maps else {key: rpc[key] for key in rpc if key != "device_maps"}
