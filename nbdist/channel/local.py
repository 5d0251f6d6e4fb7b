"""The short way between two processes of one host, beside ZeroMQ: unix sockets that agents read themselves.

ZeroMQ hands every message to a thread of its own and back, on either side; that is most of what a small call costs
with it. Here the thread that sends writes to the socket, and the thread that reads is woken by the kernel. The
agent stays reachable by ZeroMQ, for members on other hosts and those that have no unix sockets; both ways end in one
`receive`, which waits for all of them at once. Who waits in it, and for what the kernel wakes whom::

    file --- news --> guests   (an epoll of all files): the guest sleeps or looks here, and is asked first
                 +--> the gate (`nbdist.channel.gate`): the threads of the pool sleep here, if there is no guest

Only processes of this user get in: the socket is in the agent's own directory (0700), and the kernel says who is at
the other end (G6).
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

from nbdist.channel import memory
from nbdist.channel.contract import ChannelError, Link, TooManyFiles
from nbdist.channel.framing import Cutter, Large
from nbdist.channel.gate import Gate
from nbdist.channel.outbox import LocalLink, Outbox, is_own_user
from nbdist.channel.spinning import MOST, Spinning
from nbdist.channel.zeromq import ZmqChannel
from nbdist.errors import ProtocolError
from nbdist.finalisers import this_thread

__all__ = ["SLEEPS", "LocalChannel", "is_available"]

_SCHEME = "unix://"
_AT_ONCE = 64 * 1024
_LINGER = 0.5
_PAUSE = 0.1
_FEWEST = 16
"""Connections that are let in however few files this process may have open."""
_EVENTS = 16
_NEWS = select.EPOLLIN | select.EPOLLET | select.EPOLLEXCLUSIVE if hasattr(select, "epoll") else 0

_log = logging.getLogger("nbdist.channel")


def is_available() -> bool:
    """Whether this system has what the channel needs."""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "SO_PEERCRED") and hasattr(select, "epoll")


_channels: weakref.WeakSet[LocalChannel] = weakref.WeakSet()


def _after_fork() -> None:
    for channel in list(_channels):
        channel.forked()


os.register_at_fork(after_in_child=_after_fork)


class LocalChannel:
    """Unix sockets to the agents of this host, and a ZeroMQ channel to all others."""

    def __init__(self, beside: ZmqChannel, *, max_message: int) -> None:
        """``beside`` is this channel's from now on: its directory holds the socket, and it is closed with it."""
        if beside.directory is None:
            raise ChannelError("a channel that is not for this host has no directory for a unix socket")
        self._beside = beside
        self._max_message = min(max_message, memory.total())
        self._closed = False
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._waiting: set[int] = set()
        self._arrived: deque[list[bytes] | _Uncut] = deque()
        self._more_beside = True  # its file tells of news, not of what was there before
        self._links: weakref.WeakSet[LocalLink] = weakref.WeakSet()
        self._incoming: dict[int, _Incoming] = {}
        # Half of the files that this process may have open stay free for what it is there for.
        self._most_incoming = max(_FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._ready: set[int] = set()
        self._try_again_at = math.inf
        self._may_look = (os.cpu_count() or 1) > 1  # or who is to send something would have no core
        self._spinning = Spinning(), Spinning()  # of other threads, and of guests
        path = str(beside.directory / "un")
        self._address = _SCHEME + path
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.setblocking(False)
            try:
                self._listener.bind(path)
            except OSError as error:
                raise ChannelError(f"cannot listen at {path}: {error}") from error
            self._listener.listen(1024)
            self._gate = Gate()
            undo.callback(self._gate.close)
            self._guests = undo.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._call)
            self._beside_file = beside.file
            for file in (self._listener.fileno(), self._wake, self._beside_file):
                self._register(file)
            self._guests.register(self._call, select.EPOLLIN)  # the guest is told, and again, until it is read
            self._outbox = Outbox()
            self._resources = undo.pop_all()
        _channels.add(self)

    @property
    def addresses(self) -> list[str]:
        return [self._address, *self._beside.addresses]

    def connect(self, addresses: Sequence[str]) -> Link:
        with self._lock:
            if self._closed:
                raise ChannelError("the channel is closed")
            for address in addresses:
                if address.startswith(_SCHEME):
                    # Its file may be another host's, or of one that has died: then the other addresses count.
                    try:
                        link = LocalLink(address.removeprefix(_SCHEME), self._outbox)
                    except TooManyFiles:
                        raise  # the short way is there, and can be taken later
                    except ChannelError:
                        continue
                    self._links.add(link)
                    return link
        return self._beside.connect(addresses)

    # -- receiving ----------------------------------------------------------------------------

    def _register(self, file: int) -> None:
        """Have threads woken by news of a file: the guest if one waits, which is asked first, or else another thread.

        So the readers sleep while a guest reads what it waits for, and none of them is woken by `call`.
        """
        self._guests.register(file, _NEWS)
        self._gate.news.register(file, _NEWS)

    @property
    def readers(self) -> int:
        return 2

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        end = None
        if self._try_again_at != math.inf:
            self._try_to_accept()
        while True:
            # As it is now: by the time of the turn, another thread may have taken all of it.
            has_some = bool(self._arrived or self._ready or self._more_beside)
            if has_some:
                events = () if self._arrived else self._wait(self._guests if guest else self._gate.news, 0) or ()
            elif (watched := self._watch(timeout, guest, soon)) is not None:
                events = watched
            else:
                events, has_some = (), True  # it sleeps on
            with self._turn:
                woken = False
                for number, what in events:
                    incoming = self._incoming.get(number)
                    if incoming is None:
                        woken |= self._note(number)
                    else:
                        self._ready.add(number)
                        if what != select.EPOLLIN:
                            incoming.has_ended = True
                if not self._arrived:
                    self._gather()
                message = self._arrived.popleft() if self._arrived else None
            if soon:
                self._gate.open(threading.get_ident())
            if message is not None:
                frames = message if isinstance(message, list) else self._cut(message)
                if frames is not None:
                    return frames
            if woken or self._closed or not (events or has_some):
                return None
            if timeout is not None:  # a part of a message has come
                end = end or time.monotonic() + timeout
                timeout = end - time.monotonic()
                if timeout < 0:
                    return None

    def _watch(self, timeout: float | None, guest: bool, soon: bool) -> Sequence[tuple[int, int]] | None:
        """Return the files that have news, after a look without sleep where that is worth while.

        Returns nothing after ``timeout`` seconds, and None where this thread was woken and another has taken the news.
        """
        me, begun, spinning = threading.get_ident(), time.monotonic(), self._spinning[guest]
        looks = (guest and self._gate.is_shut_by(me)) or (
            (guest or soon) and self._may_look and spinning.is_worth_while and self._gate.shut()
        )
        events: Sequence[tuple[int, int]] | None = ()
        looked = 0.0
        if looks:
            look_until = begun + (MOST if timeout is None else min(MOST, timeout))
            events = self._wait(self._guests if guest else self._gate.news, timeout, look_until)
            looked = time.monotonic() - begun
            if not events:
                self._gate.open(me)
        if not events:
            events = self._wait(self._guests if guest else None, timeout)
        if guest or soon:
            spinning.waited(time.monotonic() - begun, looked)
        return events

    def _wait(
        self, epoll: select.epoll | None, timeout: float | None, look_until: float = 0.0
    ) -> Sequence[tuple[int, int]] | None:
        """Return the files that have news, of those in ``epoll``, or behind the gate where that is None, as `_watch`.

        Of all threads that sleep, the kernel wakes one or two for each news, and says it once. Until ``look_until``, if
        that is given, this thread asks again and again and does not sleep. In between others may run on its core.

        A guest waits here as any of the user's threads may: a signal's handler or a finaliser that runs meanwhile may
        call and wait, which others read for. So the thread is open here to what they call.
        """
        me = threading.get_ident()
        events: Sequence[tuple[int, int]] | None = ()
        was_closed = this_thread.is_closed
        try:
            if epoll is self._guests:
                this_thread.is_closed = False
            self._waiting.add(me)
            if look_until and epoll is not None:
                while not events and not self._closed and time.monotonic() < look_until:
                    events = epoll.poll(0, _EVENTS)
                    if not events:
                        os.sched_yield()
            elif self._closed:
                pass
            elif epoll is not None:
                events = epoll.poll(timeout, _EVENTS)
            elif self._gate.wait(timeout):
                events = self._gate.news.poll(0, _EVENTS) or None
            self._waiting.discard(me)
            this_thread.is_closed = was_closed
            return events
        except BaseException:  # Ctrl-C, in a main thread that reads
            this_thread.is_closed = was_closed
            self._waiting.discard(me)
            self._look_everywhere()
            raise

    def _look_everywhere(self) -> None:
        """News may have been lost, and are not told twice: have another thread look what there is."""
        with self._turn:
            self._ready.update(self._incoming)
            self._more_beside = True
            self._try_again_at = 0.0
        self.wake()

    def has_more(self) -> bool:
        return bool(self._arrived or self._ready or self._more_beside)

    def _note(self, number: int) -> bool:
        """One of the channel's own files has news; whether they are that somebody called `wake`."""
        if number == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return True
        elif number == self._beside_file:
            self._more_beside = True
        elif number == self._call:
            return True
        elif not self._closed:
            self._accept()
        return False

    def _gather(self) -> None:
        """Take of every way that has something a part, so that none has to wait for another."""
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
            frames = self._beside.take()
            if frames is not None:
                self._arrived.append(frames)
            else:
                self._more_beside = False

    def _try_to_accept(self) -> None:
        with self._turn:
            if time.monotonic() > self._try_again_at:
                self._try_again_at = math.inf
                if not self._closed:
                    self._accept()

    def _accept(self) -> None:
        while True:
            sock = None
            try:
                sock, _ = self._listener.accept()
                if not is_own_user(sock):
                    _log.warning("a process of another user was turned away")
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
                _log.warning("cannot let another agent in: %s", error)
                if sock is not None:
                    sock.close()  # it will connect again
                self._try_again_at = time.monotonic() + _PAUSE  # of who waits there, the kernel does not tell again
                return
            self._incoming[sock.fileno()] = _Incoming(sock, Cutter(self._max_message))

    def _cut(self, message: _Uncut) -> list[bytes] | None:
        """Cut a large message into frames, which no other thread waits for; None where it was no message."""
        try:
            return message.large.frames()
        except (ProtocolError, MemoryError) as error:
            with self._turn:
                number = message.incoming.socket.fileno()
                if self._incoming.get(number) is message.incoming:
                    self._give_up(number, message.incoming, error)
            return None

    def _give_up(self, number: int, incoming: _Incoming, error: Exception) -> None:
        """Close a connection that ended, or over which something came that no link of nbdist sends."""
        if not isinstance(error, EOFError):
            _log.warning("a connection is given up: %s", error)
        # Also by name where the number is not closed for good: a forked process may hold the same socket.
        self._guests.unregister(number)
        self._gate.news.unregister(number)
        del self._incoming[number]
        self._ready.discard(number)
        incoming.socket.close()

    def expect(self) -> None:
        if self._may_look and self._spinning[True].is_worth_while:
            self._gate.shut()

    def expect_no_more(self) -> None:
        self._gate.open(threading.get_ident())

    def call(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._call, 1)

    def called(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # read already, or closed
            os.eventfd_read(self._call)

    def wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._wake, 1)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._may_look = False
        self._outbox.close(_LINGER)
        while self._waiting:  # what they wait for must not be closed under them
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
        for incoming in self._incoming.values():
            incoming.socket.close()
        self._incoming.clear()
        self._wake = self._call = -1  # their numbers may soon be other files'
        self._resources.close()

    def forked(self) -> None:
        """In a child process: what is open must not outlive the parent."""
        if self._closed:
            return
        self._closed = True
        self._may_look = False
        self._gate.forked()
        for link in list(self._links):
            link.forked()
        self._outbox.release()
        self._release()


SLEEPS = LocalChannel._wait.__code__
"""Where a thread sleeps until there is a message."""


class _Incoming:
    """A connection that another agent has made, to send to this one."""

    def __init__(self, sock: socket.socket, cutter: Cutter) -> None:
        self.socket = sock
        self.is_empty = False
        self.has_ended = False
        self._cutter = cutter

    def read(self) -> Sequence[list[bytes] | _Uncut]:
        """Take a part of the bytes that have come. Returns the messages that are whole; raises EOFError at the end."""
        cutter = self._cutter
        try:
            if cutter.large is None:
                data = self.socket.recv(_AT_ONCE)
                if not data:
                    raise EOFError
                self.is_empty = len(data) < _AT_ONCE and not self.has_ended  # of an end, too, we are told but once
                return cutter.feed(data)
            room = cutter.room
            count = self.socket.recv_into(room)
            if not count:
                raise EOFError
            self.is_empty = count < len(room) and not self.has_ended
            return [_Uncut(self, large) for large in cutter.wrote(count)]
        except BlockingIOError:
            self.is_empty = True
            return []


class _Uncut(NamedTuple):
    """A large message that has come, and the connection that it came over."""

    incoming: _Incoming
    large: Large
