"""`RequestTexts`: the texts of one request, each written by a thread when its turn comes; the event loop reads them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from nbdist.swarm.http.api_error import ApiError
from nbdist.swarm.http.limits import Limits
from nbdist.swarm.http.writing import Piece

Job = Callable[[Callable[[Piece], None], Callable[[], bool]], None]
"""Writes one text, with the ``tell`` and ``halted`` of `Writing.run`."""


class RequestTexts:
    """The texts of one request, which begin at once or wait for their turn. Only the event loop's thread uses it.

    Raises `ApiError` (429) if too many texts wait.
    """

    def __init__(self, limits: Limits, jobs: Sequence[Job]) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._left = len(jobs)
        self._come: asyncio.Queue[tuple[int, Piece] | ApiError] = asyncio.Queue()
        self._halted = threading.Event()
        self._starts = [partial(self._start, number, job) for number, job in enumerate(jobs)]
        limits.enter(self._starts)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (number of the text, piece) in the order in which the threads write; raise the first error."""
        while self._left:
            item = await self._come.get()
            if isinstance(item, ApiError):
                raise item
            self._left -= item[1].finish is not None
            yield item

    def end(self, error: ApiError) -> None:
        """End all texts: the reader of `pieces` gets ``error``."""
        self.halt()
        self._come.put_nowait(error)

    def halt(self) -> None:
        """Give up the turns that have not come; stop each thread after its token, or its wait for cache memory."""
        self._halted.set()
        self._limits.withdraw(self._starts)

    def _start(self, number: int, job: Job) -> None:
        try:
            # Not a pool's thread: Python would wait for it when the process ends.
            threading.Thread(target=self._write, args=(number, job), name="swarm http text", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._come.put_nowait(ApiError(503, f"the server could not begin: {error}", code="unavailable", retry=5))
            self._loop.call_soon(self._limits.leave)  # not now, when `limits` starts texts

    def _write(self, number: int, job: Job) -> None:
        def tell(item: tuple[int, Piece] | ApiError) -> None:
            self._loop.call_soon_threadsafe(self._come.put_nowait, item)

        with contextlib.suppress(RuntimeError):  # the loop is closed, since the endpoint is
            try:
                job(lambda piece: tell((number, piece)), self._halted.is_set)
            except Exception as error:
                # Another error, without the traceback, whose frames have the text's cache.
                tell(ApiError.of(error))
            finally:
                self._loop.call_soon_threadsafe(self._limits.leave)
