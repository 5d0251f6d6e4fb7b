"""The entrance of a cluster: a socket at which processes on other hosts ask to be let in, before they are members.

::

    a newcomer on another host          tcp://host:port, CURVE            the notebook's host
    knock(address, key, request) ── DEALER ───────────────> ROUTER ──> answer(request), in the entrance's thread
              <──────────────────────────────────────────────────────── the answer

Any process that knows the public key of the entrance can knock, and nobody can read the traffic. ``answer`` decides who
may come in, and by what proof. It gets bytes that anybody may have sent, and must not unpickle them.

A process that knows the public key can fill the memory of the entrance's process: ZeroMQ limits the size of a message's
part, but not the number of parts, and hands a message over only when its last part has arrived. A request has one part.
The entrance drops a message of more parts as it reads it, and keeps nothing of a request that it has answered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from nbdist.channel.contract import ChannelError
from nbdist.channel.resources import require_files
from nbdist.channel.secret import CurveKeys
from nbdist.channel.zeromq import in_brackets
from nbdist.errors import ProtocolError

# The most bytes of a request, and of an answer. ZeroMQ ends the connection of a process that sends more in one part.
# The largest requests change the list of members: 4 MiB are enough for 2,000 of them.
_LARGEST_REQUEST, _LARGEST_ANSWER = 4 << 20, 16 << 20
_HANDSHAKE_MS = 5000  # after which a connection is closed if the other end has not proved that it knows the public key
# The most waiting requests, and waiting answers for one newcomer. Further ones are not read, or are dropped.
_WAITING, _ANSWERS_WAITING = 1000, 20
_FILES_NEEDED = 16  # ZeroMQ's threads need about ten

_log = logging.getLogger("nbdist.channel")


class Entrance:
    """Answers the requests of processes on other hosts, in a thread of its own, until `close`."""

    def __init__(
        self, host: str, keys: CurveKeys, answer: Callable[[bytes], bytes], ports: tuple[int, int] | None = None
    ) -> None:
        """Listen at a free port of ``host``, this machine's address for others.

        ``answer`` returns the answer to a request. It must be quick. If it raises an error, the request gets no answer,
        and the error is only counted: strangers can send anything. Newcomers know the public key of ``keys``. ``ports``
        are the first and the last port that may be used; None for any.

        Raises ChannelError if no port is free or the address is not this machine's, ResourceError if too few files can
        be opened.
        """
        require_files(_FILES_NEEDED, "the entrance for workers on other hosts cannot open")
        self._answer = answer
        self.refused = 0
        """The number of requests that got no answer."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)  # from here on, only the entrance's thread uses it
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
        self.socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.set(zmq.SNDHWM, _ANSWERS_WAITING)
        self.socket.set(zmq.RCVHWM, _WAITING)
        self.socket.set(zmq.IPV6, int(":" in host))
        keys.secure(self.socket)
        try:
            bind(self.socket, host, ports)
        except BaseException:  # Ctrl-C, too, would leave ZeroMQ's threads and files
            self._context.destroy(0)
            raise
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        """The address at which newcomers knock, such as ``tcp://10.0.0.5:40123``."""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nbdist-entrance", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            try:
                if self.socket.poll(100):
                    self._serve_one()
            except Exception as error:  # whatever a stranger's bytes cause, even MemoryError: others still want answers
                self.refused += 1
                _log.debug("a request at the entrance is not answered: %s", error)
        self.socket.close(0)
        self._context.destroy(0)

    def _serve_one(self) -> None:
        """Receive a message, and answer it if it is a request, which has one part."""
        try:
            who, request = self.socket.recv(), b""
            if self.socket.get(zmq.RCVMORE):
                request = self.socket.recv()
            if self.socket.get(zmq.RCVMORE):
                raise ProtocolError("a request has one part")
        finally:
            # Read the rest of a message with too many parts, or the next request would begin in its middle. The parts
            # are not kept: all of them together may be larger than the memory.
            while self.socket.get(zmq.RCVMORE):
                self.socket.recv(copy=False)
        said = self._answer(request)
        del request  # it may be large
        with contextlib.suppress(zmq.ZMQError):  # the newcomer may have left meanwhile
            self.socket.send_multipart([who, said], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._closing = True
        self._thread.join(5.0)


def bind(sock: zmq.Socket[bytes], host: str, ports: tuple[int, int] | None) -> None:
    """Bind a socket to a free port of ``host``; ``ports`` is the first and the last that may be used, None for any.

    Raises ChannelError if none is free, or the address is not this machine's.
    """
    place = in_brackets(host)
    for port in ["*"] if ports is None else range(ports[0], ports[1] + 1):
        try:
            sock.bind(f"tcp://{place}:{port}")
            return
        except zmq.ZMQError as found:
            error = found
            if found.errno != zmq.EADDRINUSE:
                break
    if ports is not None and error.errno == zmq.EADDRINUSE:
        raise ChannelError(
            f"all ports from {ports[0]} to {ports[1]} of {host} are taken: name others with --ports, or end what "
            "listens there"
        ) from error
    raise ChannelError(
        f"cannot listen at {host}: {error}. Name an address of this machine: --host, or NBDIST_HOST"
    ) from error


class Visit(contextlib.AbstractContextManager["Visit"]):
    """A connection to an entrance, for several requests, one after another: ``with Visit(address, key) as visit``.

    If a request got no answer in time, make a new visit: the late answer might be taken for that to the next request.
    """

    def __init__(self, address: str, key: bytes) -> None:
        """Begin to connect to the entrance at ``address``; ``key`` is its public key.

        Raises ChannelError if the address cannot be used, ResourceError if too few files can be opened.
        """
        require_files(_FILES_NEEDED, "this process cannot reach the entrance of a cluster")
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = self._context.socket(zmq.DEALER)
            self.socket.set(zmq.LINGER, 0)
            self.socket.set(zmq.MAXMSGSIZE, _LARGEST_ANSWER)
            self.socket.set(zmq.IPV6, int("[" in address))
            CurveKeys(*zmq.curve_keypair()).secure(self.socket, key)
            try:
                self.socket.connect(address)
            except zmq.ZMQError as error:
                raise ChannelError(f"the address {address} of the cluster cannot be used: {error}") from error
        except BaseException:  # Ctrl-C, too, would leave ZeroMQ's threads and files
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: bytes, timeout: float) -> bytes:
        """Send a request, and return its answer. Raises ChannelError if there is none after ``timeout`` seconds."""
        return self.ask_all([request], timeout)[0]

    def ask_all(self, requests: Sequence[bytes], timeout: float) -> list[bytes]:
        """Send requests, one right after the other, and return all answers; raises ChannelError as `ask` does."""
        for request in requests:
            self.socket.send(request)
        answers: list[bytes] = []
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(round(min(left, 0.1) * 1000)):  # short waits: Ctrl-C ends them
                answers.append(b"".join(self.socket.recv_multipart()))
                if len(answers) == len(requests):
                    return answers
        raise ChannelError(
            f"no answer from {self._address} within {timeout:g} s. Either the notebook's cluster has ended: start it "
            "again, and use its new invitation. Or its host cannot be reached from here: see whether `ping` reaches "
            "it, whether a firewall closes the port (--ports chooses it), and whether --host named the right address"
        )

    def close(self) -> None:
        """End the connection. A second call does nothing."""
        self._context.destroy(0)


def knock(address: str, key: bytes, request: bytes, timeout: float) -> bytes:
    """Send one request to an entrance, which has the public key ``key``, and return its answer.

    Raises ChannelError if there is no answer after ``timeout`` seconds: nobody listens there, or the entrance has
    another key.
    """
    with Visit(address, key) as visit:
        return visit.ask(request, timeout)
