"""Derives all keys of a cluster from its secret, secures sockets with them, and finds the user's runtime directory.

All members share one secret. Each key is a hash of the secret and of the key's purpose::

    secret ──┬── "sign" ─────────> signs the records in a store
             ├── "curve door" ───> key pair of every listening TCP socket
             └── "curve member" ─> key pair of every connecting TCP socket

A process without the secret knows neither the public key of the listening sockets nor a private key that they accept.
So it can neither connect to members nor pose as one of them.
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

from nbdist.channel.locked_file import read_private
from nbdist.channel.resources import refusals_in_words
from nbdist.errors import ResourceError, SecurityError, UsageError

_SHORTEST_SECRET = 16  # bytes
_RISK = "whoever reads it can join your clusters: delete it while no program uses nbdist"
_LONGEST_SOCKET_PATH = 107  # the most bytes of a unix socket's path, on Linux
# The bytes that a plain RPC world appends to the runtime directory's path. A cluster needs more, and checks this.
_LONGEST_SUFFIX = len("/agent-1234567-0123456789abcdef/in")


class CurveKeys(NamedTuple):
    """A CURVE key pair, in the encoding that ZeroMQ expects (z85)."""

    public: bytes
    private: bytes

    def secure(self, sock: zmq.Socket[bytes], listener: bytes | None = None) -> None:
        """Make a socket encrypt its TCP connections and prove its identity with these keys.

        A socket that connects needs the public key of the ``listener``; without one, the socket itself listens.
        """
        sock.set(zmq.CURVE_PUBLICKEY, self.public)
        sock.set(zmq.CURVE_SECRETKEY, self.private)
        if listener is None:
            sock.set(zmq.CURVE_SERVER, 1)
        else:
            sock.set(zmq.CURVE_SERVERKEY, listener)


class Secret:
    """The secret that all members of a cluster share."""

    def __init__(self, value: bytes, *, shared_off_host: bool) -> None:
        """Wrap the bytes of a secret. Raises SecurityError if there are fewer than 16.

        ``shared_off_host`` is True if processes on other hosts may have the secret, too.
        """
        if len(value) < _SHORTEST_SECRET:
            raise SecurityError(
                f"a cluster secret needs at least {_SHORTEST_SECRET} bytes; this one has {len(value)}. Make one with "
                "python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        self._value = value
        self.shared_off_host = shared_off_host

    @classmethod
    def find(cls, given: str | bytes | None) -> Secret:
        """Return the secret: ``given``, else the contents of ``NBDIST_SECRET_FILE``, else this user's own on this host.

        The user's own secret is made when it is first needed. Raises SecurityError if the file cannot be read, or if
        the secret is too short.
        """
        if given is not None:
            value = given.encode() if isinstance(given, str) else bytes(given)
            return cls(value, shared_off_host=True)
        file = os.environ.get("NBDIST_SECRET_FILE")
        if file:
            try:
                return cls(Path(file).read_bytes().strip(), shared_off_host=True)
            except OSError as error:
                raise SecurityError(
                    f"the file {file!r}, which NBDIST_SECRET_FILE names, cannot be read: {error}"
                ) from error
        return cls(_user_secret(), shared_off_host=False)

    def derive(self, purpose: str) -> bytes:
        """Return the key for one purpose, such as "sign", as 32 bytes."""
        return hashlib.blake2b(purpose.encode(), key=hashlib.sha512(self._value).digest(), digest_size=32).digest()

    def sign(self, data: bytes) -> bytes:
        """Return ``data`` with a signature of 32 bytes in front of it, which `verify` checks."""
        return hmac.digest(self.derive("sign"), data, "sha256") + data

    def verify(self, signed: bytes) -> bytes:
        """Return the data in ``signed``, without the signature. Raises SecurityError if another secret signed it."""
        mark, data = signed[:32], signed[32:]
        if not hmac.compare_digest(mark, hmac.digest(self.derive("sign"), data, "sha256")):
            raise SecurityError(
                "a record in the store is not signed with this cluster's secret: another cluster uses the same "
                "store, or the members were given different secrets. Give all members the same secret, and each "
                "cluster a store of its own"
            )
        return data

    def curve(self, role: str) -> CurveKeys:
        """Return the CURVE key pair of a role: ``door`` for listening TCP sockets, ``member`` for connecting ones."""
        private = z85.encode(self.derive(f"curve {role}"))
        return CurveKeys(zmq.curve_public(private), private)


def runtime_directory() -> Path:
    """Return this user's directory (mode 0700) for sockets, run directories and the secret; make it if it is missing.

    Its path is ``NBDIST_RUNTIME_DIR``, or else ``nbdist-UID`` in the temporary directory.

    Raises:
        UsageError: the directory cannot be made or written to, or its path is too long for sockets in it.
        SecurityError: it belongs to another user, or is not a directory.
        ResourceError: the disk is full.
    """
    path = _named_directory()
    if len(os.fsencode(path)) + _LONGEST_SUFFIX > _LONGEST_SOCKET_PATH:
        raise UsageError(
            f"the path {path} is too long: the path of a socket may have {_LONGEST_SOCKET_PATH} bytes, and nbdist "
            f"needs {_LONGEST_SUFFIX} of them; set NBDIST_RUNTIME_DIR to a shorter path"
        )
    try:
        with refusals_in_words(f"{path} cannot be made"), contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()  # not `stat`: in a directory that all may write to, another user may have made a link
    except ResourceError:
        raise
    except OSError as error:
        raise UsageError(
            f"the runtime directory {path} cannot be made: {error.strerror}; set NBDIST_RUNTIME_DIR to a directory of "
            "this user"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SecurityError(f"{path} is not a directory of this user; set NBDIST_RUNTIME_DIR to one that is")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(
            f"this process cannot write to the runtime directory {path}; set NBDIST_RUNTIME_DIR to another directory"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _named_directory() -> Path:
    """Return the path of the runtime directory, which need not exist. Raises UsageError if none can be named."""
    named = os.environ.get("NBDIST_RUNTIME_DIR")
    if not named:
        try:
            return Path(f"{tempfile.gettempdir()}/nbdist-{os.getuid()}")
        except FileNotFoundError as error:  # Python has tried to write a file in each temporary directory
            raise UsageError(
                f"no temporary directory can be written to ({error.strerror}): free some space in one, or set "
                "NBDIST_RUNTIME_DIR to a directory of this user"
            ) from error
    if not os.path.isabs(named):
        raise UsageError(f"NBDIST_RUNTIME_DIR must be an absolute path, not {named!r}")
    return Path(named)


def _user_secret() -> bytes:
    """Return the user's own secret on this host; make it if it is missing."""
    path = runtime_directory() / "secret"
    try:
        return read_private(path, _RISK)
    except FileNotFoundError:
        pass
    with refusals_in_words(f"{path} cannot be written"):
        handle, draft = tempfile.mkstemp(dir=path.parent)  # 0600
        try:
            # Whole before it has its name: another process that finds the name reads the file at once.
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # if several processes do this at once, the first one's secret stays
        finally:
            os.unlink(draft)
    return read_private(path, _RISK)
