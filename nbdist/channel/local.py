"""Moves frames between processes of one host over unix sockets, and uses a ZeroMQ channel for all other agents.

With ZeroMQ, each message goes through a thread of ZeroMQ's own on both sides, which takes most of the time of a small
call. Here the sending thread writes to the socket itself, and the kernel wakes the thread that reads. Agents on other
hosts, or without unix sockets, still use ZeroMQ (the channel ``beside``). One `receive` waits for all of these::

    a connection ──────────────┐                     ┌──> guests, an epoll: the guest polls or sleeps here; it is
    the ZeroMQ channel's file ─┼── becomes readable ─┤    woken first
    `wake` ────────────────────┤                     └──> the gate (`nbdist.channel.gate`): readers sleep here
    a new connection ──────────┘
    `call` ─────────────────────────────────────────────> guests only

The epolls are edge-triggered: each reports a file once when bytes arrive, and not again while they are unread. So
`receive` keeps a list of connections that may have unread bytes (`_ready`), reads a part of each in turn, and puts
whole messages into a queue (`_arrived`), from which it returns one at a time.

Only processes of this user can connect: the socket is in the agent's own directory (mode 0700), and the kernel tells
which user is at the other end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from nbdist.channel import machine
from nbdist.channel.after_fork import call_forked
from nbdist.channel.contract import ChannelError, Link, TooManyFiles
from nbdist.channel.framing import FrameCutter, split
from nbdist.channel.gate import Gate
from nbdist.channel.local_link import LocalLink, Outbox, peer_of
from nbdist.channel.spinning import POLL_SECONDS, Spinning
from nbdist.channel.zeromq import ZeroMqChannel
from nbdist.errors import ProtocolError
from nbdist.finalisers import this_thread

_SCHEME = "unix://"
_BYTES_PER_READ = 64 * 1024  # the most that are read from a connection before it is the turn of other connections
_LINGER = 0.5  # seconds for which `LocalChannel.close` waits until all backlogs are sent
_ACCEPT_AGAIN_AFTER = 0.1  # seconds
_FEWEST_CONNECTIONS = 16  # that are accepted even if this process may have very few files open
_EVENTS_PER_POLL = 16
# The events of a file that wake threads: readable, reported once, to one thread rather than to all threads.
_READABLE_ONCE = select.EPOLLIN | select.EPOLLET | select.EPOLLEXCLUSIVE

_log = logging.getLogger("nbdist.channel")


class LocalChannel:
    """Reaches the agents of this host over unix sockets, and all others over a ZeroMQ channel.

    The caller of `_handle_own_file`, `_gather`, `_accept` and `_give_up` holds `_turn`, the lock of the thread that
    reads connections.
    """

    def __init__(self, beside: ZeroMqChannel, *, max_message: int, uses_sockets: bool = True) -> None:
        """Listen at a unix socket in the directory of ``beside``, which is closed together with this channel.

        ``beside`` has local addresses. ``max_message`` is the most bytes of a message. Without ``uses_sockets``,
        ``beside`` carries all messages, and this channel only waits for them. Raises ChannelError if the socket cannot
        be made.
        """
        assert beside.directory is not None  # it has local addresses
        self._beside = beside
        self._max_message = min(max_message, machine.memory())
        self._closed = False
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._waiting: set[int] = set()  # the idents of the threads in `_wait`
        self._arrived: deque[list[bytes] | _Uncut] = deque()  # the messages that `receive` has not returned
        # True if the ZeroMQ channel may have messages: some may have arrived before its file was watched.
        self._more_beside = True
        self._links: weakref.WeakSet[LocalLink] = weakref.WeakSet()
        self._incoming: dict[int, _Incoming] = {}  # by file number
        # Leave half of the files that this process may have open to the program.
        self._most_incoming = max(_FEWEST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._ready: set[int] = set()  # the file numbers of connections that may have unread bytes
        # The moment at which to accept connections again after a failure, as of `time.monotonic`.
        self._try_again_at = math.inf
        # On a single core, a thread that polls would keep the sender from running.
        self._may_look = machine.cores() > 1
        self._spinning = Spinning(), Spinning()  # for readers, and for guests
        path = str(beside.directory / "un")
        self._own_addresses = [_SCHEME + path] if uses_sockets else []
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.setblocking(False)
            try:
                self._listener.bind(path)
            except OSError as error:
                raise ChannelError(f"cannot listen at {path}: {error}") from error
            self._listener.listen(1024)
            self.gate = Gate()  # readers sleep there
            undo.callback(self.gate.close)
            self._guests = undo.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._call)
            self._beside_file = beside.file
            for file in (self._listener.fileno(), self._wake, self._beside_file):
                self._register(file)
            self._guests.register(self._call, select.EPOLLIN)  # not edge-triggered: reported until `called` reads it
            self._outbox = Outbox()
            self._resources = undo.pop_all()
        call_forked(self)

    @property
    def addresses(self) -> list[str]:
        """The channel's addresses: ``unix://`` first, then the addresses of the ZeroMQ channel."""
        return [*self._own_addresses, *self._beside.addresses]

    def connect(self, addresses: Sequence[str], is_large: bool = False) -> Link:
        """Return a link over a unix socket if an address names one that accepts the connection, else one over ZeroMQ.

        Raises errors as `Channel.connect` does.
        """
        with self._lock:
            if self._closed:
                raise ChannelError("the channel is closed: RPC has been shut down in this process")
            for address in addresses:
                if self._own_addresses and address.startswith(_SCHEME):
                    # The address may be on another host, or its agent may have died: then try the other addresses.
                    try:
                        link = LocalLink(address.removeprefix(_SCHEME), self._outbox)
                    except TooManyFiles:
                        raise  # the caller tries again later, rather than using ZeroMQ for good
                    except ChannelError:
                        continue
                    self._links.add(link)
                    return link
        return self._beside.connect(addresses, is_large)

    # -- receiving ----------------------------------------------------------------------------

    def _register(self, file: int) -> None:
        """Watch a file: when it becomes readable, the kernel wakes the guest, or a reader if no guest waits."""
        # In this order: the kernel asks the epoll that was registered first, and stops after it has woken a thread. So
        # readers sleep while a guest reads its answer.
        self._guests.register(file, _READABLE_ONCE)
        self.gate.news.register(file, _READABLE_ONCE)

    @property
    def readers(self) -> int:
        """The number of threads that should wait in `receive`: 2, because a message wakes only one of them."""
        return 2

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        """Return the next message's frames; None after ``timeout`` seconds, after `wake` or `call`, and once closed."""
        end = None
        if self._try_again_at != math.inf:
            self._try_to_accept()
        while True:
            # Read this once, here: when this thread gets the lock, another thread may have taken everything.
            has_some = bool(self._arrived or self._ready or self._more_beside)
            if has_some:
                events = () if self._arrived else self._wait(self._guests if guest else self.gate.news, 0) or ()
            elif (watched := self._watch(timeout, guest, soon)) is not None:
                events = watched
            else:
                events, has_some = (), True  # woken, but another thread has read the file: wait again
            with self._turn:
                woken = False
                for number, what in events:
                    incoming = self._incoming.get(number)
                    if incoming is None:
                        woken |= self._handle_own_file(number)
                    else:
                        self._ready.add(number)
                        if what != select.EPOLLIN:
                            incoming.has_ended = True
                if not self._arrived:
                    self._gather()
                message = self._arrived.popleft() if self._arrived else None
            # Before the frames of a large message are cut: another thread should read meanwhile.
            if soon:
                self.gate.open(threading.get_ident())
            if message is not None:
                frames = message if isinstance(message, list) else self._cut_into_frames(message)
                if frames is not None:
                    return frames
            if woken or self._closed or not (events or has_some):
                return None
            if timeout is not None:  # only a part of a message has arrived: wait for the rest of the time
                end = end or time.monotonic() + timeout
                timeout = end - time.monotonic()
                if timeout < 0:
                    return None

    def _watch(self, timeout: float | None, guest: bool, soon: bool) -> Sequence[tuple[int, int]] | None:
        """Wait until files are readable; return the number of each, with its epoll events. Poll first, if it pays off.

        Returns () after ``timeout`` seconds, and None if this thread was woken but another thread has read the file.
        """
        me, begun, spinning = threading.get_ident(), time.monotonic(), self._spinning[guest]
        looks = (guest and self.gate.owner == me) or (
            (guest or soon) and self._may_look and spinning.is_worth_while and self.gate.shut()
        )
        events: Sequence[tuple[int, int]] | None = ()
        looked = 0.0
        if looks:
            look_until = begun + (POLL_SECONDS if timeout is None else min(POLL_SECONDS, timeout))
            events = self._wait(self._guests if guest else self.gate.news, timeout, look_until)
            looked = time.monotonic() - begun
            if not events:
                self.gate.open(me)
        if not events:
            events = self._wait(self._guests if guest else None, timeout)
        if guest or soon:
            spinning.waited(time.monotonic() - begun, looked)
        return events

    def _wait(
        self, epoll: select.epoll | None, timeout: float | None, look_until: float = 0.0
    ) -> Sequence[tuple[int, int]] | None:
        """Wait until files in ``epoll`` are readable; return them as `_watch` does. With None, wait behind the gate.

        With ``look_until``, a moment as of `time.monotonic`, the thread polls until then without sleeping.
        """
        me = threading.get_ident()
        events: Sequence[tuple[int, int]] | None = ()
        was_closed = this_thread.is_closed
        try:
            # A signal handler or a finaliser of the user may make a call here and wait: readers read the answer.
            if epoll is self._guests:
                this_thread.is_closed = False
            self._waiting.add(me)  # before `_closed` is read: `close` sets that, and then waits for all in `_waiting`
            if look_until and epoll is not None:
                while not events and not self._closed and time.monotonic() < look_until:
                    events = epoll.poll(0, _EVENTS_PER_POLL)
                    if not events:
                        os.sched_yield()
            elif self._closed:
                pass
            elif epoll is not None:
                events = epoll.poll(timeout, _EVENTS_PER_POLL)
            elif self.gate.wait(timeout):
                events = self.gate.news.poll(0, _EVENTS_PER_POLL) or None
            self._waiting.discard(me)
            this_thread.is_closed = was_closed
            return events
        except BaseException:  # Ctrl-C, in a main thread that reads
            this_thread.is_closed = was_closed
            self._waiting.discard(me)
            self._look_everywhere()
            raise

    def _look_everywhere(self) -> None:
        """Make a thread in `receive` read all connections: Ctrl-C may have lost the report that one is readable."""
        with self._turn:
            self._ready.update(self._incoming)
            self._more_beside = True
            self._try_again_at = 0.0
        self.wake()

    def has_more(self) -> bool:
        """Return whether there may be messages that `receive` has not returned, and for which no thread is woken."""
        return bool(self._arrived or self._ready or self._more_beside)

    def _handle_own_file(self, number: int) -> bool:
        """Handle one of the channel's own files, which is readable. Returns True if `wake` or `call` was called."""
        if number == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif number == self._beside_file:
            self._more_beside = True
        elif number != self._call and not self._closed:
            # The listener, or a connection that another thread has given up meanwhile; then there is nothing to accept.
            self._accept()
        return number in (self._wake, self._call)

    def _gather(self) -> None:
        """Read a part from each connection that has bytes, and one message from ZeroMQ, so that none waits long."""
        for number in [*self._ready]:
            incoming = self._incoming[number]
            try:
                self._arrived += incoming.read()
            except (OSError, EOFError, ProtocolError, MemoryError) as error:
                self._give_up(number, incoming, error)
            else:
                if incoming.is_empty:
                    self._ready.discard(number)
        if self._more_beside:
            if (frames := self._beside.take()) is not None:
                self._arrived.append(frames)
            else:
                self._more_beside = False

    def _try_to_accept(self) -> None:
        """Call `_accept` again if `_ACCEPT_AGAIN_AFTER` seconds have passed since it failed."""
        with self._turn:
            if time.monotonic() > self._try_again_at:
                self._try_again_at = math.inf
                if not self._closed:
                    self._accept()

    def _accept(self) -> None:
        """Accept all new connections; close those of other users, and those beyond half of this process's files."""
        while True:
            sock = None
            try:
                sock, _ = self._listener.accept()
                if peer_of(sock)[1] != os.getuid():
                    _log.warning("a connection from a process of another user was turned away")
                    sock.close()
                    continue
                if len(self._incoming) >= self._most_incoming:
                    _log.warning("a connection was turned away: there are %d already", len(self._incoming))
                    sock.close()
                    continue
                sock.setblocking(False)
                self._register(sock.fileno())
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("cannot accept a connection from another agent; will try again soon: %s", error)
                if sock is not None:
                    sock.close()  # the other agent will connect again
                # The kernel does not report waiting connections again.
                self._try_again_at = time.monotonic() + _ACCEPT_AGAIN_AFTER
                return
            self._incoming[sock.fileno()] = _Incoming(sock, FrameCutter(self._max_message))

    def _cut_into_frames(self, message: _Uncut) -> list[bytes] | None:
        """Cut a large message into frames. If the bytes are none, or there is no memory, give the connection up."""
        # Copying takes long, so without the lock.
        try:
            return split(message.whole)
        except (ProtocolError, MemoryError) as error:
            with self._turn:
                number = message.incoming.socket.fileno()
                if self._incoming.get(number) is message.incoming:
                    self._give_up(number, message.incoming, error)
            return None

    def _give_up(self, number: int, incoming: _Incoming, error: Exception) -> None:
        """Close a connection, file ``number``: it has ended, failed, or carried bytes that no link of nbdist sends.

        If the sender is alive, it connects again and repeats what has not been acknowledged.
        """
        if not isinstance(error, EOFError):
            _log.warning("dropped what process %d sent, and its connection: %s", peer_of(incoming.socket)[0], error)
        # Closing the socket is not enough: while a forked process has it, the epolls keep reporting it.
        self._guests.unregister(number)
        self.gate.news.unregister(number)
        del self._incoming[number]
        self._ready.discard(number)
        incoming.socket.close()

    def expect(self) -> None:
        """Keep messages from waking readers, if the calling thread will poll for its reply without sleeping."""
        if self._may_look and self._spinning[True].is_worth_while:
            self.gate.shut()

    def expect_no_more(self) -> None:
        """Let messages wake readers again, if the calling thread's `expect` still prevents it."""
        self.gate.open(threading.get_ident())

    def call(self) -> None:
        """Make ``receive(guest=True)`` return None, again and again until `called`."""
        with contextlib.suppress(OSError, ValueError):  # the channel is closed
            os.eventfd_write(self._call, 1)

    def called(self) -> None:
        """End the effect of `call`: the guest has returned from `receive`."""
        with contextlib.suppress(OSError, ValueError):  # no call, or the channel is closed
            os.eventfd_read(self._call)

    def wake(self) -> None:
        """Make one waiting `receive`, or else the next one, return None."""
        with contextlib.suppress(OSError, ValueError):  # the channel is closed
            os.eventfd_write(self._wake, 1)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the backlogs, for half a second at most, then close everything, including the ZeroMQ channel."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._may_look = False
        self._outbox.close(_LINGER)
        while self._waiting:  # epolls must not be closed while threads wait in them
            self.wake()
            time.sleep(0.0005)
        with self._turn:
            self._arrived.clear()
            self._ready.clear()
            self._more_beside = False
            for link in list(self._links):
                link.close(at_once=True)
            self._release()
            self._beside.close()

    def _release(self) -> None:
        """Close all files of this channel, except those of the links, the outbox and the ZeroMQ channel."""
        for incoming in self._incoming.values():
            incoming.socket.close()
        self._incoming.clear()
        self._wake = self._call = -1  # `wake` and `call` must not write to other files that get these numbers
        self._resources.close()

    def forked(self) -> None:
        """Close all files in a forked process. Otherwise the parent's sockets would stay open after its death."""
        if self._closed:
            return
        self._closed = True
        self._may_look = False
        self.gate.forked()
        for link in list(self._links):
            link.forked()
        self._outbox.release()
        self._release()


# The code in which a thread sleeps until a message arrives: `nbdist.signals` runs signal handlers there.
WAITING_CODE = LocalChannel._wait.__code__


class _Incoming:
    """A connection that another agent has made, on which it sends messages to this agent."""

    def __init__(self, sock: socket.socket, cutter: FrameCutter) -> None:
        self.socket = sock
        self.is_empty = False  # the last `read` took all bytes: then the kernel reports when more have arrived
        self.has_ended = False  # the other end has closed the connection, which may still have unread bytes
        self._cutter = cutter

    def read(self) -> Sequence[list[bytes] | _Uncut]:
        """Read some of the bytes that have arrived, without waiting; return the messages that are whole now.

        Raises EOFError at the end of the connection, and the errors of `FrameCutter.feed`.
        """
        cutter = self._cutter
        try:
            if cutter.large is None:
                data = self.socket.recv(_BYTES_PER_READ)
                if not data:
                    raise EOFError
                # Once the connection has ended, read on: the kernel does not report that again.
                self.is_empty = len(data) < _BYTES_PER_READ and not self.has_ended
                return cutter.feed(data)
            room = cutter.room
            count = self.socket.recv_into(room)
            if not count:
                raise EOFError
            self.is_empty = count < len(room) and not self.has_ended
            whole = cutter.wrote(count)
            return [_Uncut(self, whole)] if whole is not None else []
        except BlockingIOError:
            self.is_empty = True
            return []


class _Uncut(NamedTuple):
    """A large message that has arrived as a whole, and its connection."""

    incoming: _Incoming
    whole: memoryview
