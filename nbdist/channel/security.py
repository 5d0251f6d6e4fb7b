"""The cluster's secret, and what is derived from it.

All members share one secret. From it come the key that signs records in a store, and two CURVE key
pairs: one that every member's door answers with, one that every member knocks with. Who has not the secret
knows neither the door's public key nor an admitted private one, so he can neither connect nor be connected
to (G6).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from nbdist.channel.resources import refusals_in_words
from nbdist.errors import ResourceError, SecurityError, UsageError

__all__ = ["CurveKeys", "Secret", "runtime_directory"]

_SHORTEST = 16
_LONGEST_SOCKET = 107
"""Bytes that the path of a unix socket may have."""
_ROOM_WITHIN = len("/agent-1234567-0123456789abcdef/in")
"""Bytes of such a path behind the runtime directory, in a plain RPC world; a cluster needs more, and checks that."""


class CurveKeys(NamedTuple):
    """One CURVE key pair, as ZeroMQ wants it."""

    public: bytes
    private: bytes


class Secret:
    """A secret that all members of a cluster share."""

    def __init__(self, value: bytes, *, shared_off_host: bool) -> None:
        if len(value) < _SHORTEST:
            raise SecurityError(f"a cluster secret needs at least {_SHORTEST} bytes; this one has {len(value)}")
        self._value = value
        self.shared_off_host = shared_off_host

    @classmethod
    def find(cls, given: str | bytes | None) -> Secret:
        """The secret: given, or out of ``NBDIST_SECRET_FILE``, or this user's own on this host."""
        if given is not None:
            value = given.encode() if isinstance(given, str) else bytes(given)
            return cls(value, shared_off_host=True)
        file = os.environ.get("NBDIST_SECRET_FILE")
        if file:
            try:
                return cls(Path(file).read_bytes().strip(), shared_off_host=True)
            except OSError as error:
                raise SecurityError(f"NBDIST_SECRET_FILE names {file!r}, which cannot be read: {error}") from error
        return cls(_user_secret(), shared_off_host=False)

    def derive(self, purpose: str) -> bytes:
        """32 bytes for one purpose."""
        return hashlib.blake2b(purpose.encode(), key=hashlib.sha512(self._value).digest(), digest_size=32).digest()

    def sign(self, data: bytes) -> bytes:
        """``data`` behind its signature."""
        return hmac.digest(self.derive("sign"), data, "sha256") + data

    def verify(self, signed: bytes) -> bytes:
        """What was signed with this secret; anything else is a SecurityError."""
        mark, data = signed[:32], signed[32:]
        if not hmac.compare_digest(mark, hmac.digest(self.derive("sign"), data, "sha256")):
            raise SecurityError(
                "a record in the store is not signed with this cluster's secret: another cluster uses the same "
                "store, or the members were given different secrets"
            )
        return data

    def curve(self, role: str) -> CurveKeys:
        """The key pair of one role, ``door`` or ``member``."""
        private = z85.encode(self.derive(f"curve {role}"))
        return CurveKeys(zmq.curve_public(private), private)


def runtime_directory() -> Path:
    """Return this user's own directory (0700) for sockets, run directories and the secret; make it if need be.

    It is ``NBDIST_RUNTIME_DIR``, or ``nbdist-UID`` in the temporary directory.

    Raises:
        UsageError: it cannot be made or written to, or sockets in it would have paths that are too long.
        SecurityError: it is another user's, or no directory.
        ResourceError: the disk is full.
    """
    path = _named_directory()
    if len(os.fsencode(path)) + _ROOM_WITHIN > _LONGEST_SOCKET:
        raise UsageError(
            f"the path {path} is too long: sockets in it may have {_LONGEST_SOCKET} bytes, and nbdist needs "
            f"{_ROOM_WITHIN} of them; set NBDIST_RUNTIME_DIR to a shorter path"
        )
    try:
        with refusals_in_words(f"{path} cannot be made"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except ResourceError:
        raise
    except FileExistsError as error:
        raise SecurityError(f"{path} is not a directory of this user; set NBDIST_RUNTIME_DIR to one that is") from error
    except OSError as error:
        raise UsageError(
            f"the runtime directory {path} cannot be made: {error.strerror}; set NBDIST_RUNTIME_DIR to a directory of "
            "this user"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SecurityError(f"{path} is not a directory of this user; set NBDIST_RUNTIME_DIR to one that is")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"the runtime directory {path} cannot be written to; set NBDIST_RUNTIME_DIR to one that can")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _named_directory() -> Path:
    named = os.environ.get("NBDIST_RUNTIME_DIR")
    if not named:
        try:
            return Path(f"{tempfile.gettempdir()}/nbdist-{os.getuid()}")
        except FileNotFoundError as error:  # Python tried to write a file to each
            raise UsageError(
                f"no temporary directory can be written to ({error.strerror}): free some space in one, or set "
                "NBDIST_RUNTIME_DIR to a directory of this user"
            ) from error
    if not os.path.isabs(named):
        raise UsageError(f"NBDIST_RUNTIME_DIR must be an absolute path, not {named!r}")
    return Path(named)


def _user_secret() -> bytes:
    path = runtime_directory() / "secret"
    try:
        return _read_private(path)
    except FileNotFoundError:
        pass
    with refusals_in_words(f"{path} cannot be written"):
        handle, draft = tempfile.mkstemp(dir=path.parent)  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # the first of several processes wins, whole
        finally:
            os.unlink(draft)
    return _read_private(path)


def _read_private(path: Path) -> bytes:
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SecurityError(f"{path} must belong to this user and be readable by nobody else (mode 0600)")
    return path.read_bytes()
