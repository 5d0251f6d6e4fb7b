"""One worker as the notebook sees it, and how it is brought up."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster import labels
from nbdist.cluster.kernels import Kernel, KernelThread, Message
from nbdist.cluster.print_log import PrintLog
from nbdist.cluster.processes import describe_exit
from nbdist.cluster.tail import Tail
from nbdist.errors import NbdistError, WorkerLost

if TYPE_CHECKING:
    from nbdist.cluster.cells import Cell

__all__ = ["STEP", "STEPS", "StartError", "Worker"]

STEPS = ("process", "kernel", "rpc", "process group")
"""What a worker has reached, in order; after the last it is ready."""

STEP = "__import__('nbdist.cluster.worker', fromlist=['_']).{}"
"""Calls a function of the worker's extension and leaves no name behind."""

_log = logging.getLogger("nbdist.cluster")
_LAST_LINES = 5
_LONGEST = 2000
_CRASH = re.compile(r"^(Fatal Python error|terminate called)")


class StartError(NbdistError):
    """A worker did not come up."""


class Worker:
    """One worker: its process, its kernel, and what it does. Of the kernel thread, but for reading."""

    def __init__(self, name: str, rank: int, id: int, device: str, gpu: int | None) -> None:
        self.name = name
        self.rank = rank
        self.id = id
        self.device = device
        self.gpu = gpu
        self.pid: int | None = None
        self.kernel: Kernel | None = None
        self.step = "starting"
        self.lost: str | None = None
        self._let_go = False
        self.ended = threading.Event()
        self.exited = threading.Event()
        """Set when its process has; `ended` when its last words are known, too."""
        self.cells: list[Cell] = []
        self.names: list[str] = []
        self.stderr = Tail(_LAST_LINES, _LONGEST)
        """The end of what the cell that runs has written to standard error."""
        self.log = Tail(_LAST_LINES, _LONGEST)
        """The end of all that it has written."""
        self.lives = 0
        self.print_log: PrintLog | None = None
        """All that it has printed in cells and calls, its earlier lives included."""

    def __repr__(self) -> str:
        return f"<Worker {self.name}: {self.state}>"

    @property
    def alive(self) -> bool:
        """Whether it can be asked for anything."""
        return self.kernel is not None and self.lost is None

    @property
    def state(self) -> str:
        """What it does, in a word or two."""
        if self.lost is not None:
            return self.lost.partition("\n")[0]
        if self.step != "ready":
            return self.step
        return "busy" if self.cells else "idle"

    def connection(self, folder: Path) -> dict[str, Any]:
        """Where its next kernel shall listen: sockets in the run directory, which nobody else can reach."""
        self.lives += 1
        return {
            "transport": "ipc",
            "ip": str(folder / f"{self.name}-{self.lives}"),
            **{f"{channel}_port": port for port, channel in enumerate(_CHANNELS, 1)},
            "key": secrets.token_hex(32),
            "signature_scheme": "hmac-sha256",
            "kernel_name": "",
        }

    def connection_file(self, folder: Path) -> Path:
        """The file that says so."""
        return folder / f"{self.name}-{self.lives}.json"

    def prepare(self, thread: KernelThread, folder: Path, listener: Callable[[Worker, str, Message], None]) -> None:
        """Forget a life before; be ready for one more."""
        connection = self.connection(folder)
        self.print_log = self.print_log or PrintLog(folder, self.name)
        self.connection_file(folder).touch(mode=0o600)
        self.connection_file(folder).write_text(json.dumps(connection))
        self.kernel = Kernel(thread, connection, lambda channel, message: listener(self, channel, message))
        self.ended = threading.Event()
        self.exited = threading.Event()
        self.lost, self.pid, self.step = None, None, "starting"
        self._let_go = False
        self.stderr.clear()
        self.log.clear()
        self.names = []

    def call(self, function: str) -> Coroutine[Any, Any, None]:
        """Have a function of its extension called in its main thread, after the cells that it was sent before.

        It is sent at once. Who awaits what is returned waits for its end; the function's error is a StartError.
        """
        assert self.kernel is not None
        request = {"code": STEP.format(function), "silent": True, "store_history": False, "allow_stdin": False}
        return self._outcome(self.kernel.ask("execute_request", {**request, "user_expressions": {}}))

    async def _outcome(self, asked: asyncio.Future[Message]) -> None:
        content = (await asked)["content"]
        if content["status"] != "ok":
            text = f"{self.name}: {content.get('ename', 'aborted')}: {content.get('evalue', '')}"
            raise StartError("\n".join([text, *content.get("traceback", ())]))

    def end(self, code: int, last_words: str) -> str:
        """Its process has ended; what is to be said of that."""
        lines = _telling([line for line in last_words.splitlines() if line.strip()] or self.stderr.lines())
        why = describe_exit(code)
        for cell in self.cells:
            lines = [labels.rename_cell_frames(line, cell.source, cell.number, self.name) for line in lines]
        if lines:
            why += "\nits standard error ended with:\n" + "\n".join(f"    {line}" for line in lines)
        try:
            self.lose(why)
        finally:
            self.ended.set()
        return why

    def exit(self, code: int) -> None:
        """Its process has ended just now; what it has put out may be on its way, so its cells have not."""
        if code == -signal.SIGKILL:  # there is no more to be said of that
            self.lost = describe_exit(code)
        self.exited.set()

    def lose(self, why: str, advice: str | None = None) -> None:
        """Note that the worker is gone: its cells fail, for that reason and with that advice. Nothing the second time.

        Without advice, they say how to start the worker again.
        """
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
            except Exception:  # it must not keep the others from ending
                _log.exception("a cell on %s could not be ended", self.name)

    def remember(self, stream: str, text: str, cell: int) -> None:
        """Keep what it has printed in a cell, and the end of it for the panel, and for the case that it dies."""
        if self.print_log is not None:
            self.print_log.write(cell, stream, text)
        self.log.feed(text, time.time())
        if stream == "stderr":
            self.stderr.feed(text)


def _telling(lines: list[str]) -> list[str]:
    """The lines that say why a process died: the last ones, or those with which a crash begins."""
    crash = next((index for index, line in enumerate(lines) if _CRASH.search(line)), None)
    return lines[-_LAST_LINES:] if crash is None else lines[crash : crash + _LAST_LINES]


_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


async def first_error(work: list[asyncio.Task[None]]) -> None:
    """Wait for all; raise the first error at once, and give up the rest."""
    try:
        await asyncio.gather(*work)
    except BaseException:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        raise


def lost_error(worker: Worker) -> WorkerLost:
    """The error of who asks something of a worker that is gone."""
    return WorkerLost(f"{worker.name} {worker.lost}\n`%dist_restart {worker.name}` starts it again")
