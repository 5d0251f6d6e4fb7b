"""Defines the request of a *newcomer*, a process that wants to join, and the answers; compares the versions. Pure.

Requests and answers are plain data: nothing here is unpickled.
"""

from __future__ import annotations

import platform
import sys
from typing import TypeVar

import msgspec
import torch

import nbdist
from nbdist.errors import NbdistError, SecurityError, VersionMismatch
from nbdist.wire.messages import VERSION, Record

NEWCOMER = b"n"  # the first byte of a newcomer's request, by which the entrance tells it from others
QUESTION = b"q"  # of a `Newcomer`'s request that only asks: it uses up nothing; the answer is `NotebookFacts`
TRIAL = b"t"  # of a `Trial`; the answer is a `TrialAnswer`
_OLDEST_TORCH = (2, 10)

T = TypeVar("T")


class Newcomer(msgspec.Struct, tag="newcomer"):
    """The request of a keeper that wants to join."""

    token: str  # from the invitation
    workers: int  # the number of workers that it has room for
    host: str
    python: str
    torch: str
    nbdist: str
    protocol: int  # the version of the protocol of nbdist's messages


class Admitted(msgspec.Struct, tag="admitted"):
    """The answer to a newcomer that may join: how it reaches the hub, and the secret that all members share."""

    id: int
    secret: str
    hub: Record


class Denied(msgspec.Struct, tag="denied"):
    """The answer to a newcomer that may not join."""

    why: str
    version: bool  # True if its versions are the reason

    def error(self) -> NbdistError:
        """Return the error to raise for this answer."""
        return VersionMismatch(self.why) if self.version else SecurityError(self.why)


class NotebookFacts(msgspec.Struct, tag="facts"):
    """The answer to a question: the notebook's versions, and whether the asking process's versions fit them."""

    host: str
    python: str
    torch: str
    nbdist: str
    misfit: str
    """Why a worker of those versions would be refused; empty if it would not."""
    addresses: list[str]
    """Where the hub's agent listens: ports beside the entrance's that a worker's host must reach, too."""


class Trial(msgspec.Struct, tag="trial"):
    """A request that tries the way to the notebook, with the token of a valid invitation. It takes none of its uses."""

    token: str
    padding: bytes = b""
    """Bytes that only take time on the way there."""
    wanted: int = 0
    """The number of bytes that should come back."""
    port: int = 0
    """A port at which the notebook should try to connect to ``host``; 0 for none."""
    host: str = ""


class TrialAnswer(msgspec.Struct, tag="tried"):
    """The answer to a trial."""

    now: float
    """The notebook's clock, in seconds since 1970."""
    padding: bytes = b""
    """As many bytes as were wanted."""
    unreached: str = ""
    """The error with which the notebook could not connect to the port; empty if it could, or none was named."""


def describe_the_notebook(newcomer: Newcomer, addresses: list[str]) -> NotebookFacts:
    """Return the answer to a question of a newcomer with these versions, which this process, the notebook, gives."""
    try:
        check_versions(newcomer)
        misfit = ""
    except VersionMismatch as error:
        misfit = str(error)
    mine = describe_myself("", 0)
    return NotebookFacts(mine.host, mine.python, mine.torch, mine.nbdist, misfit, addresses)


def describe_myself(token: str, workers: int) -> Newcomer:
    """Return the request of this process, with its versions."""
    return Newcomer(
        token, workers, platform.node(), platform.python_version(), str(torch.__version__), nbdist.__version__, VERSION
    )


def decode_answer(answer: bytes) -> Admitted | Denied | NotebookFacts | TrialAnswer:
    """Return an answer of the entrance. Raises `msgspec.MsgspecError` if it is none."""
    return msgspec.msgpack.decode(answer, type=Admitted | Denied | NotebookFacts | TrialAnswer)


def accepted(answer: bytes, kind: type[T]) -> T:
    """Return an answer of the entrance that is of this kind. Raises the error of a `Denied`, and MsgspecError."""
    decoded = decode_answer(answer)
    if isinstance(decoded, Denied):
        raise decoded.error()
    assert isinstance(decoded, kind)  # the entrance answers each request with its own kind
    return decoded


def check_versions(newcomer: Newcomer) -> None:
    """Raise VersionMismatch, which names both versions, if a newcomer's versions do not fit this process's."""

    def refuse(what: str, theirs: object, ours: object, remedy: str) -> VersionMismatch:
        return VersionMismatch(f"{newcomer.host} has {what} {theirs}, and the notebook has {ours}: {remedy}")

    # Functions of cells travel as bytecode, so the minor version must be the same.
    mine = ".".join(map(str, sys.version_info[:2]))
    if newcomer.python.split(".")[:2] != mine.split("."):
        raise refuse("Python", newcomer.python, platform.python_version(), f"use Python {mine} on all hosts")
    if (newcomer.nbdist, newcomer.protocol) != (nbdist.__version__, VERSION):
        theirs = f"{newcomer.nbdist} (protocol {newcomer.protocol})"
        raise refuse("nbdist", theirs, f"{nbdist.__version__} (protocol {VERSION})", "install the same on all hosts")
    if _minor(newcomer.torch) < _OLDEST_TORCH:
        raise refuse("torch", newcomer.torch, torch.__version__, "nbdist needs torch 2.10 or newer")


def _minor(version: str) -> tuple[int, int]:
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:  # the text is no version
        return 0, 0
