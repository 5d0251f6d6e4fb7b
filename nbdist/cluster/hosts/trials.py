"""Asks a notebook whether a worker of this host could join, and tests the connection in both directions.

::

    this host                                          the notebook's host
    question   ──────────────────────────────────────> the notebook's versions and ports
    trial      ── small, there and back ─────────────> the latency, and the notebook's clock
    trials     ── up to 8 MB, in parts of 1 MiB ─────> the rate there
    trial      <──────────────────────── up to 8 MB ── the rate back
    connection ──────────────────────────────────────> a port of the hub's agent
    trial      <─────────────────────── connection ─── a port that is open here for this purpose

All but the connections go through the cluster's entrance, encrypted. The notebook answers only a process with a valid
invitation, and an invitation may move only a bounded number of bytes in a minute (`Invitations.try_out`).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from nbdist.channel.entrance import Visit
from nbdist.cluster.examination.speed import RoundTrips, rate_of, round_trips
from nbdist.cluster.hosts import admission
from nbdist.cluster.hosts.interfaces import own_address_towards
from nbdist.cluster.hosts.invitations import Invitation

_ANSWERS_WITHIN = 10.0  # seconds for each answer of the notebook
_PART = 1 << 20  # the most bytes of one request on the way there: the entrance reads no large ones
_CONNECTS_WITHIN = 2.0  # seconds for a connection to a port of the notebook's host


class TrialWay:
    """The way from this host to the notebook of an invitation: ``with TrialWay(invitation) as way``.

    Every method raises ChannelError if the notebook does not answer within 10 s, and SecurityError if it refuses the
    invitation.
    """

    def __init__(self, invitation: Invitation) -> None:
        """Begin to connect. Raises UsageError if there is no way to the address of ``invitation``."""
        self.own_address = own_address_towards(invitation.address)
        self._token = invitation.token
        self._visit = Visit(invitation.address, invitation.key.encode())

    def __enter__(self) -> TrialWay:
        return self

    def __exit__(self, *_: object) -> None:
        self._visit.close()

    def ask_for_facts(self) -> admission.NotebookFacts:
        """Return the notebook's facts, among them whether it would refuse a worker of this process's versions."""
        request = admission.QUESTION + msgspec.msgpack.encode(admission.describe_myself(self._token, 1))
        return admission.accepted(self._visit.ask(request, _ANSWERS_WITHIN), admission.NotebookFacts)

    def round_trips(self) -> RoundTrips:
        """Return the latency and the offset of the notebook's clock, measured by small trials, one after another."""
        return round_trips(lambda: self._try().now)

    def rates(self, fastest: float) -> tuple[float, float]:
        """Return the bytes a second to the notebook, and back; ``fastest`` is the fastest small trial's time in s."""
        there = rate_of(self._move_there, fastest)
        return there, rate_of(lambda size: self._try(wanted=size), fastest)

    def unreached_from_here(self, facts: admission.NotebookFacts) -> str:
        """Return why this host cannot connect to the other ports of the notebook; an empty text if it can."""
        # A firewall may let connections to the entrance pass, and no others.
        for address in facts.addresses:
            if not address.startswith("tcp://"):
                continue
            place = address.removeprefix("tcp://").partition("#")[0]  # behind it, the purpose of the port
            host, _, port = place.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _CONNECTS_WITHIN).close()
            except OSError as error:
                return f"{place}: {error}"
        return ""

    def unreached_from_there(self) -> str:
        """Return why the notebook's host cannot connect to a free port of this host; an empty text if it can."""
        family = socket.AF_INET6 if ":" in self.own_address else socket.AF_INET
        with socket.create_server((self.own_address, 0), family=family) as door:
            port = door.getsockname()[1]
            unreached = self._try(port=port, host=self.own_address).unreached
        return f"{self.own_address}:{port}: {unreached}" if unreached else ""

    def _move_there(self, nbytes: int) -> None:
        self._try_all([admission.Trial(self._token, bytes(min(_PART, nbytes - at))) for at in range(0, nbytes, _PART)])

    def _try(self, *, wanted: int = 0, port: int = 0, host: str = "") -> admission.TrialAnswer:
        return self._try_all([admission.Trial(self._token, b"", wanted, port, host)])[0]

    def _try_all(self, trials: Sequence[admission.Trial]) -> list[admission.TrialAnswer]:
        requests = [admission.TRIAL + msgspec.msgpack.encode(trial) for trial in trials]
        answers = self._visit.ask_all(requests, _ANSWERS_WITHIN)
        return [admission.accepted(answer, admission.TrialAnswer) for answer in answers]
