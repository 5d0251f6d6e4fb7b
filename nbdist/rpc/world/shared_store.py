"""Keeps the list of a world's members in the memory of one process, for members on any host.

Members reach it at the process's `nbdist.channel.entrance.Entrance`. The URL is ``nbdist://host:port/NAME``. One
process may keep the lists of several worlds, by name. A request is signed with the secret that the members share, so
nobody else can read or change a list::

    SharedStore ── knock ──> Entrance ──> Texts.answer
"""

from __future__ import annotations

import threading
import weakref

import msgspec

from nbdist.channel.entrance import knock
from nbdist.channel.secret import Secret

ENTRANCE = "entrance"
"""The role whose CURVE key pair (`Secret.curve`) an entrance has."""
STORE = b"s"
"""The first byte of a request to the store. It tells the entrance what kind of request this is."""
_ANSWER_WITHIN = 10.0  # the longest time to wait for an answer, in seconds


class _CompareSet(msgspec.Struct):
    """A request: write ``desired`` if the text ``name`` is ``expected``. The answer is the text afterwards."""

    name: str
    expected: str
    desired: str


class Texts:
    """Texts by name, which processes with the same secret change by compare-and-set. Any thread may use it."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def serve_at(self, address: str) -> None:
        """Register the address of the entrance, such as ``10.0.0.5:40123``, for each `SharedStore` of this process."""
        _here[address] = self

    def answer(self, signed: bytes) -> bytes:
        """Return the answer to a request of a `SharedStore`. Raises SecurityError if another secret has signed it."""
        request = msgspec.msgpack.decode(self._secret.verify(signed), type=_CompareSet)
        return self.compare_set(request.name, request.expected, request.desired)

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        """Set the text ``name`` to ``desired`` if it is ``expected``; return the text that it has then."""
        with self._lock:
            text = self._texts.get(name, "")
            if text == expected:
                text = self._texts[name] = desired
            return text.encode()


# The texts of this process, by the addresses of their entrances.
_here: weakref.WeakValueDictionary[str, Texts] = weakref.WeakValueDictionary()


def is_here(address: str) -> bool:
    """Return whether the texts behind the entrance at ``address``, such as ``10.0.0.5:40123``, are in this process."""
    return address in _here


class SharedStore:
    """A store for `nbdist.rpc.world.roster.Roster` that another process, or this one, has in its memory."""

    def __init__(self, address: str, name: str, secret: Secret, timeout: float) -> None:
        """Use the text ``name`` in the store at the entrance with ``address``, such as ``10.0.0.5:40123``."""
        self._address = address
        self._name = name
        self._secret = secret
        self._timeout = min(timeout, _ANSWER_WITHIN)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the text is ``expected``; return the text that the store has then. Ignores ``key``."""
        texts = _here.get(self._address)
        if texts is not None:  # in this process: no message needed
            return texts.compare_set(self._name, expected, desired)
        request = self._secret.sign(msgspec.msgpack.encode(_CompareSet(self._name, expected, desired)))
        return knock(f"tcp://{self._address}", self._secret.curve(ENTRANCE).public, STORE + request, self._timeout)
