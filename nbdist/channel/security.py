"""The cluster's secret, and what is derived from it.

All members share one secret. From it come the key that signs records in a store, and two CURVE key
pairs: one that every member's door answers with, one that every member knocks with. Who has not the secret
knows neither the door's public key nor an admitted private one, so he can neither connect nor be connected
to (G6).
"""

from __future__ import annotations

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

from nbdist.errors import SecurityError

__all__ = ["CurveKeys", "Secret", "runtime_directory"]

_SHORTEST = 16


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
    """This user's own directory (0700) for sockets and the secret; nobody else's will do."""
    path = Path(os.environ.get("NBDIST_RUNTIME_DIR") or f"{tempfile.gettempdir()}/nbdist-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SecurityError(f"{path} is not a directory of this user; set NBDIST_RUNTIME_DIR to one that is")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _user_secret() -> bytes:
    path = runtime_directory() / "secret"
    try:
        return _read_private(path)
    except FileNotFoundError:
        pass
    handle, draft = tempfile.mkstemp(dir=path.parent)  # 0600
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_hex(32).encode())
    try:
        os.link(draft, path)  # the first of several processes wins, whole
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
    return _read_private(path)


def _read_private(path: Path) -> bytes:
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SecurityError(f"{path} must belong to this user and be readable by nobody else (mode 0600)")
    return path.read_bytes()
