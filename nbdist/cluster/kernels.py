"""Talks to the kernels of the workers: one thread with an event loop of its own does all of it.

So the notebook's main thread is never needed for progress: output flows while a cell computes, while it waits, and
after it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jupyter_client.client import KernelClient

from nbdist.channel.resources import require_files
from nbdist.cluster.jupyter_wire import decode, encode, new_header, pack
from nbdist.errors import WorkerLost

__all__ = ["Kernel", "KernelThread", "Message"]

T = TypeVar("T")
Message = dict[str, Any]

_log = logging.getLogger("nbdist.cluster")
_ASK_AGAIN = 0.1
_RECONNECT_MS = 10
_AT_ONCE = 100
_READABLE = 1
_FILES_OF_LOOP = 3
_FILES_NEEDED = 24
"""Files that must be free before ZeroMQ starts its threads and opens the sockets to one kernel: it takes about 20."""


class KernelThread:
    """A daemon thread that runs an event loop."""

    def __init__(self) -> None:
        require_files(_FILES_OF_LOOP, "the notebook cannot talk to workers' kernels")  # half a loop cannot be closed
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nbdist-kernels", daemon=True)
        self._thread.start()
        self.context: Any = None
        self._closing = False

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def soon(self, action: Callable[..., object], *arguments: Any) -> bool:
        """Call ``action`` there soon; from any thread. Whether it will be: not once the thread is to end."""
        if self._closing:
            return False
        try:
            self.loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            return False
        return True

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
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
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
        self._key = str(connection["key"]).encode()
        self._session = secrets.token_hex(8)
        self._listener = listener
        self._replies: dict[str, asyncio.Future[Message]] = {}
        self._sockets: dict[str, Any] = {}
        self._heard = asyncio.Event()
        self._closed: str | None = None

    async def open(self) -> None:
        """Connect, and wait until the kernel answers and its output reaches us."""
        if self._closed is not None:
            raise WorkerLost(self._closed)
        require_files(_FILES_NEEDED, "the notebook cannot talk to a worker's kernel")
        client: Any = KernelClient() if self._thread.context is None else KernelClient(context=self._thread.context)
        if self._thread.context is None:
            self._thread.context = client.context
            client._created_context = False  # it outlives this client
            self._thread.context.reconnect_ivl = _RECONNECT_MS  # to sockets that a starting kernel has yet to make
            self._thread.context.rcvhwm = self._thread.context.sndhwm = 0  # nothing is dropped, and nothing blocks
        client.load_connection_info(self._connection)
        identity = self._session.encode()
        for channel in ("shell", "iopub", "stdin", "control"):
            connect = getattr(client, f"connect_{channel}")
            socket = self._sockets[channel] = connect() if channel == "iopub" else connect(identity=identity)
            socket.linger = 0
            self._thread.loop.add_reader(socket.FD, self._drain, channel)
        while True:
            await self.ask("kernel_info_request", {})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), _ASK_AGAIN)
                return

    def close(self, why: str) -> None:
        """Disconnect; requests without a reply fail."""
        self._closed = why
        sockets, self._sockets = self._sockets, {}
        for socket in sockets.values():
            self._thread.loop.remove_reader(socket.FD)
            socket.close(linger=0)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(WorkerLost(why))
                reply.exception()  # it is no fault if nobody waits

    def send(
        self,
        kind: str,
        content: Mapping[str, Any] | bytes,
        *,
        channel: str = "shell",
        metadata: Mapping[str, Any] | bytes = b"{}",
        buffers: Sequence[Any] = (),
        parent: Message | None = None,
        id: str | None = None,
    ) -> str:
        """Send a message; its id. Who sends the same to many has packed it."""
        if self._closed is not None:
            raise WorkerLost(self._closed)
        header = new_header(kind, self._session, id)
        frames = encode(
            self._key,
            header,
            content if isinstance(content, bytes) else pack(content),
            parent=parent["header"] if parent is not None else None,
            metadata=metadata if isinstance(metadata, bytes) else pack(metadata),
            buffers=buffers,
        )
        if channel not in self._sockets:
            raise WorkerLost("its kernel has not come up")
        self._sockets[channel].send_multipart(frames)
        self._thread.loop.call_soon(self._drain, channel)  # sending may have taken the sign that there is news
        return str(header["msg_id"])

    def ask(self, kind: str, content: Mapping[str, Any], *, channel: str = "shell") -> asyncio.Future[Message]:
        """Send a request; the reply to come."""
        id = self.send(kind, content, channel=channel)
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        return reply

    def _drain(self, channel: str) -> None:
        """Take what has come: the loop is told once of any number of messages."""
        for _ in range(_AT_ONCE):
            socket = self._sockets.get(channel)  # a message may close the kernel
            if socket is None or not socket.EVENTS & _READABLE:
                return
            frames = socket.recv_multipart()
            try:
                self._take(channel, decode(self._key, frames))
            except Exception:
                _log.exception("a message of a worker's kernel could not be handled")
        self._thread.loop.call_soon(self._drain, channel)

    def _take(self, channel: str, message: Message) -> None:
        if channel == "iopub":
            self._heard.set()
        parent = message["parent_header"].get("msg_id", "")
        reply = self._replies.pop(parent, None) if channel in ("shell", "control") else None
        if reply is None:
            self._listener(channel, message)
        elif not reply.done():
            reply.set_result(message)
