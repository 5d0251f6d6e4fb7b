"""Talks to the workers' kernels. One thread, the kernel thread, does all of it in an event loop of its own.

::

    any thread ── KernelThread.soon, run ──> kernel thread ── KernelConnection.send, ask ──> a worker's kernel
                                                  │ <───────── _drain ────── replies, output, requests for input
                                                  └── the future of `ask`, or the listener (`Router.on_message`)

So progress never depends on the notebook's main thread: output arrives while a cell computes, while it waits, and
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

import zmq
from jupyter_client.connect import channel_socket_types

from nbdist.channel.resources import require_files
from nbdist.cluster.jupyter.jupyter_wire import decode, encode, new_header
from nbdist.errors import WorkerLost

T = TypeVar("T")
Message = dict[str, Any]

_log = logging.getLogger("nbdist.cluster")
_ASK_AGAIN_AFTER = 0.1  # seconds after which a starting kernel is asked again, until its first output has arrived
_RECONNECT_MS = 10  # milliseconds between two attempts of ZeroMQ to connect
_MOST_SOCKETS = 16_384  # to all kernels, four for each; ZeroMQ's default, 1,023, is enough for 255 workers only
_MESSAGES_AT_ONCE = 100  # messages that are read before the loop's other work gets its turn
_FILES_OF_LOOP = 3  # files that an event loop opens
_FILES_NEEDED = 24  # files to be free before ZeroMQ's threads and the sockets to one kernel, which take about 20


class KernelThread:
    """A daemon thread that runs an event loop."""

    def __init__(self) -> None:
        # First: a half-made loop cannot be closed.
        require_files(_FILES_OF_LOOP, "the notebook cannot talk to workers' kernels")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nbdist-kernels", daemon=True)
        self._thread.start()
        self.context: Any = None  # ZeroMQ's, of all kernels; made by the first one
        self._closing = False

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def soon(self, action: Callable[..., object], *arguments: Any) -> bool:
        """Call ``action`` in this thread soon; return False if it will not be called. Any thread may call this."""
        if self._closing:
            return False
        try:
            self.loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in this thread; return the future of its outcome. RuntimeError once the thread is ending.

        In this thread itself, await the coroutine instead: waiting would block it for ever.
        """
        if self._closing:
            work.close()  # else Python warns that it was never awaited
            raise RuntimeError("the cluster is shutting down: start another one")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def is_current(self) -> bool:
        """Return whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel the loop's tasks and close all sockets, within 2 s; then end the thread. For another thread.

        Once the thread has ended, a further call does nothing.
        """
        if self.loop.is_closed():
            return

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.context is not None:
                self.context.destroy(linger=0)

        self._closing = True  # nothing is begun any more that nobody would cancel
        with contextlib.suppress(Exception):  # the tasks' errors: whatever they are, the thread must end
            asyncio.run_coroutine_threadsafe(cancel_all(), self.loop).result(2.0)
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self.loop.close()


class KernelConnection:
    """The connection to one worker's kernel. All methods but the constructor are for the kernel thread.

    A reply to `ask` resolves its future. All other messages go to ``listener(channel, message)``, in the kernel thread.
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
        self._heard = asyncio.Event()  # set when the first message of the output channel arrives
        self._closed: str | None = None  # why the connection was closed; None while it is open

    async def open(self) -> None:
        """Connect, and wait until the kernel answers and its output reaches this process; WorkerLost after `close`."""
        if self._closed is not None:  # closed before it was opened
            raise WorkerLost(self._closed)
        require_files(_FILES_NEEDED, "the notebook cannot talk to a worker's kernel")
        if self._thread.context is None:
            context: Any = zmq.Context()
            context.max_sockets = _MOST_SOCKETS
            context.reconnect_ivl = _RECONNECT_MS  # a starting kernel has yet to make its sockets
            context.rcvhwm = context.sndhwm = 0  # no message is dropped, and no send blocks
            self._thread.context = context
        for channel in ("shell", "iopub", "stdin", "control"):
            self._connect(channel)
            self._thread.loop.add_reader(self._sockets[channel].FD, self._drain, channel)
        # A PUB socket drops what it sends before a subscription has arrived, so the kernel is asked again.
        while True:
            await self.ask("kernel_info_request", {})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), _ASK_AGAIN_AFTER)
                return

    def _connect(self, channel: str) -> None:
        # A client of jupyter_client would do the same, but in version 7 it insists on sockets for asyncio.
        socket = self._sockets[channel] = self._thread.context.socket(channel_socket_types[channel])
        if channel == "iopub":
            socket.subscribe(b"")
        else:
            socket.identity = self._session.encode()
        socket.linger = 0
        socket.connect(f"ipc://{self._connection['ip']}-{self._connection[f'{channel}_port']}")

    def close(self, why: str) -> None:
        """Disconnect. Requests that wait for a reply fail with WorkerLost(``why``), and so do later requests."""
        self._closed = why
        sockets, self._sockets = self._sockets, {}
        for socket in sockets.values():
            self._thread.loop.remove_reader(socket.FD)
            socket.close(linger=0)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(WorkerLost(why))
                reply.exception()  # else asyncio logs an error if nothing awaits the reply

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
        """Send a message on ``channel``; return its id, which is ``id`` if given. Raises WorkerLost if not open."""
        if self._closed is not None:
            raise WorkerLost(self._closed)
        header = new_header(kind, self._session, id)
        cause = parent["header"] if parent is not None else None
        frames = encode(self._key, header, content, parent=cause, metadata=metadata, buffers=buffers)
        if channel not in self._sockets:
            raise WorkerLost("the kernel of the worker has not started yet: try again when the worker is ready")
        self._sockets[channel].send_multipart(frames)
        self._thread.loop.call_soon(self._drain, channel)  # sending may have consumed the signal to read
        return str(header["msg_id"])

    def ask(self, kind: str, content: Mapping[str, Any], *, channel: str = "shell") -> asyncio.Future[Message]:
        """Send a request; return the future of the reply, which has no time limit and fails once disconnected."""
        id = self.send(kind, content, channel=channel)
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        return reply

    def _drain(self, channel: str) -> None:
        """Read the messages that have arrived, up to `_MESSAGES_AT_ONCE` of them, and the others a little later."""
        # ZeroMQ's file descriptor reports the arrival of messages only once, however many have arrived.
        for _ in range(_MESSAGES_AT_ONCE):
            socket = self._sockets.get(channel)  # a message may close the kernel
            if socket is None or not socket.EVENTS & zmq.POLLIN:
                return
            frames = socket.recv_multipart()
            try:
                self._take(channel, decode(self._key, frames))
            except Exception:  # a listener's, or of a malformed message: the next one must be read
                _log.exception("a message from a worker's kernel could not be handled, and is dropped")
        self._thread.loop.call_soon(self._drain, channel)

    def _take(self, channel: str, message: Message) -> None:
        """Give a message to the `ask` whose request it answers first, by the parent id, else to the listener."""
        if channel == "iopub":
            self._heard.set()
        parent = message["parent_header"].get("msg_id", "")
        reply = self._replies.pop(parent, None) if channel in ("shell", "control") else None
        if reply is None:
            self._listener(channel, message)
        elif not reply.done():
            reply.set_result(message)
