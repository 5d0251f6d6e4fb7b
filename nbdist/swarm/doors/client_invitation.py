"""The file that invites clients to a swarm."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from nbdist.channel.locked_file import read_private, write_whole
from nbdist.errors import UsageError
from nbdist.wire.messages import VERSION


class ClientInvitation(msgspec.Struct):
    """The file of `Swarm.invite`, as JSON, which only its owner may read: whoever has it can use the swarm."""

    address: str
    """The address of the swarm's door, such as ``tcp://10.0.0.5:40123``."""
    key: str
    """The public key of the door."""
    secret: str
    """The secret of the role of clients, at this door only."""

    @property
    def hello(self) -> bytes:
        """The first message of a client; both ends must have the same version of nbdist."""
        return f"{VERSION} {self.secret}".encode()

    def write(self, path: Path) -> None:
        """Write the file, which only this user may read; replace an earlier one. Raises UsageError if it cannot."""
        try:
            draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            write_whole(path, msgspec.json.format(msgspec.json.encode(self)) + b"\n", draft)
        except OSError as error:
            raise UsageError(f"the invitation cannot be written to {path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> ClientInvitation:
        """Return the invitation in a file.

        Raises SecurityError if another user may read the file, UsageError if it cannot be read or is no invitation.
        """
        try:
            risk = "whoever reads it can use the swarm: serve the model again, invite again"
            return msgspec.json.decode(read_private(path, risk), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"{path} cannot be read, or is no invitation of Swarm.invite: {error}") from error
