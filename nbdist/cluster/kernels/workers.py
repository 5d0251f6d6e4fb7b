"""`Worker`: one worker as the notebook sees it, through all its restarts.

==============  ============================================================  ========================
`state`         since                                                         ends with
==============  ============================================================  ========================
a step          `prepare`; `Lifecycle` moves `step` on                        step "ready"
idle            the step "ready", or the end of the last cell                 a cell
busy            a cell, which is in `cells` until it ends                     the end of the last cell
why it is lost  `exit` after SIGKILL, else `lose`, which `end` calls          `prepare`: a restart
==============  ============================================================  ========================
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.kernel_connection import KernelConnection, KernelThread, Message
from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.kernels.crash_reports import lines_that_say_why
from nbdist.cluster.kernels.sightings import KEPT, Sighting, say_last_seen
from nbdist.cluster.output.print_log import PrintLog
from nbdist.cluster.output.tail import Tail
from nbdist.cluster.processes.last_operations import split_off
from nbdist.cluster.processes.launchers.contract import StartedWorker
from nbdist.cluster.processes.worker_processes import describe_exit
from nbdist.errors import NbdistError, WorkerLost

STEPS = ("process", "kernel", "rpc", "process group")
"""The steps of a worker that starts, in their order; after the last one it is ready."""

_log = logging.getLogger("nbdist.cluster")
_LAST_LINES = 5
_LONGEST_LINE = 2000  # characters that are kept of each of the last lines


class StartError(NbdistError):
    """A worker did not become ready: one of its steps failed or took too long."""


class Worker:
    """One worker: its process, its kernel and its cells.

    Cells and messages are handled in the kernel thread. Any thread may read the attributes. `exited` is set when the
    process has ended; `ended` when its last words are known, too, and its cells have failed.
    """

    def __init__(self, name: str, rank: int, id: int, device: str, gpu: int | None) -> None:
        self.name = name
        self.rank = rank
        self.id = id
        self.device = device
        self.gpu = gpu
        self.host = ""  # the name of the worker's host; empty for this one
        self.kernel: KernelConnection | None = None
        self.cells: list[Cell] = []
        """The cells that the worker has been sent and has not ended, in that order: the first one runs."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when a cell has ended here, when the worker has joined the RPC world, and when it is lost."""
        # Takes the events of the worker's debugger while a page debugs the worker.
        self.on_debug_event: Callable[[dict[str, Any]], object] | None = None
        self.lives = 0  # how many times the worker was started
        self.print_log: PrintLog | None = None  # of all lives of the worker
        self._begin_life()
        self.ended.set()  # until `prepare`, there is no process

    def _begin_life(self) -> None:
        self.pid: int | None = None  # on the worker's host; None before it is known
        self.incarnation: int | None = None  # of its agent; None before the agent has joined the RPC world
        self.step = "starting"  # the last one that the worker has reached
        self.ended = threading.Event()
        self.exited = threading.Event()
        self.names: list[str] = []  # the user's variables after the last cell, for completion
        self.code: object = None  # what `code_in_use` returned then
        # By process group, the collectives that it had called at the end of its last cell with any.
        self.histories: Sequence[GroupHistory] = ()
        # Where the worker was, each time that somebody looked while its cell was silent.
        self.sightings: deque[Sighting] = deque(maxlen=KEPT)
        self.stderr = Tail(_LAST_LINES, _LONGEST_LINE)  # of the present cell
        self.log = Tail(_LAST_LINES, _LONGEST_LINE)  # of all cells and calls, of both streams
        self._let_go = False  # True once `lose` has run; `exit` may have set `lost` before
        self.lost: str | None = None
        """The way in which the worker was lost, in words that follow its name; None while it is not lost."""

    def __repr__(self) -> str:
        return f"<Worker {self.name}: {self.state}>"

    @property
    def alive(self) -> bool:
        """Return whether the worker has a kernel and is not lost. It may still be starting."""
        return self.kernel is not None and self.lost is None

    @property
    def state(self) -> str:
        """The worker's state in words: a step while it starts, "idle", "busy", or the first line of how it was lost."""
        if self.lost is not None:
            return self.lost.partition("\n")[0]
        if self.step != "ready":
            return self.step
        return "busy" if self.cells else "idle"

    @property
    def present_cell(self) -> Cell | None:
        """The cell that the worker runs, or runs next; None if it is idle. It may end at any moment."""
        return next(iter(self.cells), None)

    def connection_file(self, folder: Path) -> Path:
        """Return the path of the kernel's connection file, in ``folder``, for the latest start of the worker."""
        return folder / f"{self.name}-{self.lives}.json"

    def prepare(self, thread: KernelThread, folder: Path, listener: Callable[[Worker, str, Message], None]) -> None:
        """Get ready for the next start: write a new connection file, make the connection, and reset the state."""
        self.lives += 1
        connection = {
            "transport": "ipc",
            # In the run directory, which no other user can enter. Each start of the worker has sockets of its own.
            "ip": str(folder / f"{self.name}-{self.lives}"),
            **{f"{channel}_port": port for port, channel in enumerate(_CHANNELS, 1)},
            "key": secrets.token_hex(32),
            "signature_scheme": "hmac-sha256",
            "kernel_name": "",
        }
        self.print_log = self.print_log or PrintLog(folder, self.name)
        self.connection_file(folder).touch(mode=0o600)  # before the key is written into it
        self.connection_file(folder).write_text(json.dumps(connection))
        self.kernel = KernelConnection(thread, connection, lambda channel, message: listener(self, channel, message))
        self._begin_life()

    def call(self, function: str) -> Coroutine[Any, Any, None]:
        """Call a method of the worker's `WorkerKernel`, such as ``"join()"``, in its main thread."""
        assert self.kernel is not None
        # Leaves no name in the user's namespace.
        code = f"__import__('nbdist.cluster.worker.kernel', fromlist=['_']).here().{function}"
        options = {"silent": True, "store_history": False, "allow_stdin": False, "user_expressions": {}}
        # Asked now, and not when the coroutine first runs: cells that are sent meanwhile come after it.
        # Raises StartError if the function fails; WorkerLost if this worker dies, or another one that it needs.
        return self._wait_for_reply(self.kernel.ask("execute_request", {"code": code, **options}))

    async def _wait_for_reply(self, asked: asyncio.Future[Message]) -> None:
        content = (await asked)["content"]
        if content["status"] != "ok":
            # The worker knows of another one's death, of which this process may learn later.
            if content.get("ename") == WorkerLost.__name__:
                raise WorkerLost(content["evalue"])
            text = f"{self.name}: {content.get('ename', 'aborted')}: {content.get('evalue', '')}"
            raise StartError("\n".join([text, *content.get("traceback", ())]))

    def end(self, how: int | str, last_words: str) -> str:
        """Fail the worker's cells with the reason of its process's end, and return it. In the kernel thread."""
        last_words, called = split_off(last_words, None if self.host else time.time())
        lines = lines_that_say_why(last_words, self.stderr.lines())  # the present cell's, if the process has left none
        told: list[str] = []
        if how == -signal.SIGKILL and self.cells and (seen := say_last_seen(self.sightings, time.monotonic())):
            told.append(seen)
        if called and self.cells:
            told.append(called)
        lines = [labels.rename_cell_frames(line, self.name) for line in lines]
        if lines:
            told += ["its standard error ended with:", *(f"    {line}" for line in lines)]
        # Into the log, too: `say_lost` sends the user there.
        if told and self.print_log is not None:
            number = self.cells[0].number if self.cells else 0
            self.print_log.write(number, "stderr", "\n".join(told) + "\n")
        why = "\n".join([describe_exit(how), *told])
        try:
            self.lose(why)
        finally:
            self.ended.set()
        return why

    def exit(self, how: int | str) -> None:
        """Note that the process has ended; ``how`` is as for `end`. Called in the launcher's thread."""
        # A process that is killed in this way leaves no last words to wait for: it is lost from now on, others from
        # `end` on. Its cells fail by `end`, because their last output may still be on its way.
        if how == -signal.SIGKILL and not self._let_go:
            self.lost = describe_exit(how)
        self.exited.set()

    def lose(self, why: str, advice: str | None = None) -> None:
        """Mark the worker as lost: disconnect from its kernel, and fail its cells with WorkerLost."""
        # Lost already since the last `prepare`.
        if self._let_go:
            return
        self._let_go = True
        self.lost = why
        if self.kernel is not None:
            self.kernel.close(f"{self.name} {why}")
        cells, self.cells = self.cells, []
        for cell in cells:
            try:
                cell.on_lost(self.name, f"{why}\n{advice or f'`%dist_restart {self.name}` starts it again'}")
            except Exception:  # must not keep the other cells from ending
                _log.exception("a cell on %s could not be ended", self.name)
        self.on_change()

    def fail_to_start(self) -> None:
        """Mark the worker as lost, without a process: none will end, for which `Lifecycle.kill` would wait."""
        self.lose("could not be started")
        self.ended.set()

    def say_lost(self) -> str:
        """Return how the worker was lost, without its last words, and what to do; for commands that come later."""
        how, _, words = (self.lost or "is not running").partition("\n")
        log = f"; `%dist_log {self.name}` has its last words" if words else ""
        return f"{how}\n`%dist_restart {self.name}` starts it again{log}"

    def note_started(self, started: StartedWorker) -> None:
        """Note where the worker's process runs, which the launcher reports. In the kernel thread."""
        self.pid, self.host = started.pid, started.host
        self.device = started.device or self.device

    def remember(self, stream: str, text: str, cell: int) -> None:
        """Keep text that the worker printed in cell number ``cell``: all of it in the log, on disk."""
        if self.print_log is not None:
            self.print_log.write(cell, stream, text)
        # The last lines stay in memory: for the panel, and those of standard error for the error of a worker that dies.
        self.log.feed(text, time.time())
        if stream == "stderr":
            self.stderr.feed(text)


_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


async def first_error(work: list[asyncio.Task[None]]) -> None:
    """Wait for all tasks; as soon as one fails, cancel the others and raise its error."""
    try:
        await asyncio.gather(*work)
    except BaseException:  # also a cancellation of this wait: no task must run on
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)  # until they have ended
        raise


def require_alive(workers: Sequence[Worker]) -> None:
    """Raise WorkerLost, which says how to restart the worker, if one of these is dead."""
    for worker in workers:
        if not worker.alive:
            raise WorkerLost(f"{worker.name} {worker.say_lost()}")
