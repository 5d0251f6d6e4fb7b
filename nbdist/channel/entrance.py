"""The entrance of a cluster: a socket at which processes on other hosts ask to be let in, before they are members.

::

    a newcomer on another host          tcp://host:port, CURVE            the notebook's host
    knock(address, key, request) ── DEALER ───────────────> ROUTER ──> answer(request), in the entrance's thread
              <──────────────────────────────────────────────────────── the answer

Any process that knows the public key of the entrance can knock, and nobody can read the traffic. ``answer`` decides who
may come in, and by what proof. It gets bytes that anybody may have sent, and must not unpickle them.

The entrance is a door (`nbdist.channel.door`) that answers each request at once, and keeps nothing of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import zmq

from nbdist.channel.contract import ChannelError
from nbdist.channel.door import Door
from nbdist.channel.resources import require_files
from nbdist.channel.secret import CurveKeys

# The most bytes of a request, and of an answer. ZeroMQ ends the connection of a process that sends more in one part.
# The largest requests change the list of members: 4 MiB are enough for 2,000 of them.
_LARGEST_REQUEST, _LARGEST_ANSWER = 4 << 20, 16 << 20
# The most waiting requests, and waiting answers for one newcomer. Further ones are not read, or are dropped.
_WAITING, _ANSWERS_WAITING = 1000, 20
_FILES_NEEDED = 16  # ZeroMQ's threads need about ten


class Entrance(Door):
    """Answers the requests of processes on other hosts, in a thread of its own, until `close`."""

    name = "nbdist-entrance"

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
        self._answer = answer
        options = {
            **{zmq.MAXMSGSIZE: _LARGEST_REQUEST, zmq.LINGER: 0},
            **{zmq.SNDHWM: _ANSWERS_WAITING, zmq.RCVHWM: _WAITING},
        }
        super().__init__(
            host, ports, lambda who, request: self.send(who, self._answer(request)), keys=keys, options=options
        )

    def close(self) -> None:
        """Stop listening, and wait for that. A second call does nothing."""
        super().close()
        self._thread.join(5.0)


class Visit:
    """A connection to an entrance, for several requests, one after another; `close` ends it.

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
    with contextlib.closing(Visit(address, key)) as visit:
        return visit.ask(request, timeout)
