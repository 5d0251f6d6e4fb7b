"""Talks to the kernels of the workers: one thread with an event loop of its own does all of it.

So the notebook's main thread is never needed for progress: output flows while a cell computes, while it waits, and
after it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jupyter_client.asynchronous.client import AsyncKernelClient

from nbdist.errors import WorkerLost

__all__ = ["Kernel", "KernelThread", "Message"]

T = TypeVar("T")
Message = dict[str, Any]

_log = logging.getLogger("nbdist.cluster")
_ASK_AGAIN = 0.1
_RECONNECT_MS = 10


class KernelThread:
    """A daemon thread that runs an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nbdist-kernels", daemon=True)
        self._thread.start()
        self.context: Any = None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def soon(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call ``action`` there soon; from any thread."""
        with contextlib.suppress(RuntimeError):  # it has ended, and with it what the action was for
            self.loop.call_soon_threadsafe(action, *arguments)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there; its outcome."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the loop and the thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.context is not None:
                self.context.destroy(linger=0)

        with contextlib.suppress(Exception):
            self.run(cancel_all()).result(2.0)
        self.soon(self.loop.stop)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self.loop.close()


class Kernel:
    """The way to one worker's kernel.

    Replies go to who asked. Everything else, and replies that nobody awaits, goes to ``listener(channel, message)``
    in the kernel thread. Of that thread are all methods, but for the constructor.
    """

    def __init__(
        self, thread: KernelThread, connection: Mapping[str, Any], listener: Callable[[str, Message], None]
    ) -> None:
        self._thread = thread
        self._connection = dict(connection)
        self._listener = listener
        self._replies: dict[str, asyncio.Future[Message]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = asyncio.Event()
        self._client: Any = None

    async def open(self) -> None:
        """Connect, and wait until the kernel answers and its output reaches us."""
        if self._thread.context is None:
            client: Any = AsyncKernelClient()
            self._thread.context = client.context
            client._created_context = False  # it outlives this client
            self._thread.context.reconnect_ivl = _RECONNECT_MS  # sockets that a starting kernel has yet to make
        self._client = AsyncKernelClient(context=self._thread.context)
        self._client.load_connection_info(self._connection)
        self._client.start_channels(hb=False)
        for channel in ("shell", "iopub", "stdin", "control"):
            self._tasks.append(asyncio.create_task(self._read(channel)))
        while True:
            reply = self.ask("kernel_info_request", {})
            await reply
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), _ASK_AGAIN)
                return

    def close(self, why: str) -> None:
        """Disconnect; requests without a reply fail."""
        for task in self._tasks:
            task.cancel()
        if self._client is not None:
            self._client.stop_channels()
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(WorkerLost(why))
                reply.exception()  # it is no fault if nobody waits

    def send(
        self,
        kind: str,
        content: Mapping[str, Any],
        *,
        channel: str = "shell",
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] | None = None,
        parent: Message | None = None,
    ) -> str:
        """Send a message; its id."""
        session = self._client.session
        message = session.msg(kind, dict(content), parent=parent, metadata=dict(metadata or {}))
        session.send(getattr(self._client, f"{channel}_channel").socket, message, buffers=buffers)
        return str(message["header"]["msg_id"])

    def ask(self, kind: str, content: Mapping[str, Any], *, channel: str = "shell") -> asyncio.Future[Message]:
        """Send a request; the reply to come."""
        id = self.send(kind, content, channel=channel)
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        return reply

    async def _read(self, channel: str) -> None:
        socket = getattr(self._client, f"{channel}_channel").socket
        session = self._client.session
        while True:
            frames = await socket.recv_multipart()
            try:
                _, parts = session.feed_identities(frames)
                message = session.deserialize(parts)
            except Exception:
                _log.exception("a message of a worker's kernel could not be read")
                continue
            if channel == "iopub":
                self._heard.set()
            parent = message["parent_header"].get("msg_id", "")
            reply = self._replies.pop(parent, None) if channel in ("shell", "control") else None
            if reply is not None:
                if not reply.done():
                    reply.set_result(message)
                continue
            try:
                self._listener(channel, message)
            except Exception:
                _log.exception("a message of a worker's kernel could not be handled")
