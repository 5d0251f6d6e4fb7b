"""The connection file that invites processes of other hosts, and the tokens that the notebook accepts.

An invitation has a token, which the notebook checks against its own list: until when it is valid, how many uses are
left, and whether it was revoked. What the file says about this is for the reader only, so altering it changes nothing.
"""

from __future__ import annotations

import hmac
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nbdist.amounts import counted, duration, size
from nbdist.channel.locked_file import read_private, write_whole
from nbdist.errors import SecurityError, UsageError


class Invitation(msgspec.Struct):
    """The connection file, as JSON, which only its owner may read: whoever has it can run a worker of the cluster."""

    address: str
    """The address of the cluster's entrance, such as ``tcp://10.0.0.5:40123``."""
    key: str
    """The public key of the entrance."""
    token: str
    """The proof that the notebook has invited whoever comes with it."""
    uses: int
    """The number of workers that may join with the token."""
    expires: str
    """Until when the token is valid, for the reader only: a date and a time in UTC."""

    def write(self, path: Path) -> None:
        """Write the file, which only this user may read; replace an earlier one. Raises UsageError if it cannot."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            write_whole(path, msgspec.json.format(msgspec.json.encode(self)) + b"\n", draft)
        except OSError as error:
            raise UsageError(f"the invitation cannot be written to {path}: {error.strerror}") from error


def read_invitation(path: str) -> Invitation:
    """Return the invitation in the file at ``path``, or on standard input if that is ``-``.

    Raises SecurityError if another user may read the file, UsageError if it cannot be read or is no invitation.
    """
    if path == "-":
        text = sys.stdin.buffer.read()
    else:
        try:
            text = read_private(
                Path(path),
                "whoever reads it can run code in the cluster: revoke it in the notebook with %dist_invite --revoke, "
                "invite again",
            )
        except OSError as error:
            raise UsageError(f"the invitation {path} cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(text, type=Invitation)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no invitation of %dist_invite: {error}") from error


_TRIED_BYTES = 128_000_000  # bytes that trials with one invitation may move in a minute: a doctor moves 35 MB
_TRIED_SECONDS = 60.0


@dataclass
class _Grant:
    """One token."""

    token: str
    until: float  # the end of its validity, by the caller's clock
    left: int  # the number of uses
    revoked: bool = False
    tried_since: float = -_TRIED_SECONDS  # the beginning of the minute in which `tried` bytes were moved
    tried: int = 0


class Invitations:
    """The tokens of one cluster. All times are in seconds, on one clock, which the caller reads."""

    def __init__(self) -> None:
        self._grants: list[_Grant] = []

    def invite(self, now: float, seconds: float, uses: int) -> str:
        """Return a new token, valid for ``seconds`` from ``now`` on. UsageError unless it and ``uses`` are positive."""
        if not seconds > 0:
            raise UsageError(f"an invitation must be valid for more than 0 s, not {seconds:g} s")
        if uses < 1:
            raise UsageError(f"an invitation is for 1 worker or more, not {uses}")
        grant = _Grant(secrets.token_urlsafe(32), now + seconds, uses)
        self._grants.append(grant)
        return grant.token

    def revoke(self) -> int:
        """Make all tokens invalid; return how many had uses left, expired ones included."""
        valid = [grant for grant in self._grants if not grant.revoked and grant.left]
        for grant in self._grants:
            grant.revoked = True
        return len(valid)

    def use(self, token: str, now: float, workers: int = 1) -> None:
        """Take one use of a token for each of ``workers``. Raises SecurityError, with the reason, if `check` does."""
        self.check(token, now, workers).left -= workers

    def try_out(self, token: str, now: float, nbytes: int) -> None:
        """Count bytes that a trial with a token moves, and take no use; raises SecurityError if they are too many."""
        grant = self.check(token, now, 1)
        if not grant.tried_since <= now < grant.tried_since + _TRIED_SECONDS:
            grant.tried_since, grant.tried = now, 0
        if grant.tried + nbytes > _TRIED_BYTES:
            raise SecurityError(
                f"doctors with this invitation have moved {size(grant.tried)} within a minute, and may move "
                f"{size(_TRIED_BYTES)}: ask again in {duration(grant.tried_since + _TRIED_SECONDS - now)}"
            )
        grant.tried += nbytes

    def give_back(self, token: str, workers: int) -> None:
        """Give back uses of a token, for workers that were admitted and did not join."""
        for grant in self._grants:
            if grant.token == token:
                grant.left += workers

    def check(self, token: str, now: float, workers: int) -> _Grant:
        """Return the grant of a token, without a use; raises SecurityError if ``workers`` workers may not join now."""
        # Anybody may send tokens, so a comparison must not take longer for a better guess.
        grants = [grant for grant in self._grants if hmac.compare_digest(grant.token.encode(), token.encode())]
        if not grants:
            raise SecurityError("this cluster has not made this invitation: ask for a new one, %dist_invite")
        grant = grants[0]
        if grant.revoked:
            raise SecurityError("this invitation has been revoked: ask for a new one, %dist_invite")
        if now > grant.until:
            raise SecurityError(
                f"this invitation expired {duration(now - grant.until)} ago: ask for a new one, %dist_invite"
            )
        if grant.left < workers:
            left = f"has {counted(grant.left, 'use')} left" if grant.left else "has been used up"
            raise SecurityError(f"this invitation {left}, and {counted(workers, 'worker')} came: %dist_invite --uses N")
        return grant
