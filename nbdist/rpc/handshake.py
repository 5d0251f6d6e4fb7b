"""How an agent meets the others: every pair says who it is before any call is taken.

A fixed world is complete when each member has met each other one *and* knows that the others have too: then
a call that arrives may itself call anybody. In a dynamic world whoever knocks is let in.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.channel.contract import ChannelError, TooManyFiles
from nbdist.errors import NbdistError, NotUnique, RendezvousError, VersionMismatch, WorkerLost
from nbdist.rpc.futures import blocking_wait
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership
from nbdist.rpc.sharing import Sharing
from nbdist.wire.messages import VERSION, Hello, Ready, Record, Refused, Welcome

__all__ = ["Handshake"]

_AGAIN = 0.1
_log = logging.getLogger("nbdist.rpc")


class Handshake:
    """One agent's part in meeting the others."""

    def __init__(
        self,
        membership: Membership,
        links: Links,
        sharing: Sharing,
        *,
        lose: Callable[[int, str], None],
        lost_after: float,
    ) -> None:
        """Have met nobody.

        ``lose(incarnation, why)`` gives another agent up. Who does not answer within ``lost_after`` seconds is taken
        for dead where members come and go.
        """
        self._me = membership.me
        self._membership = membership
        self._links = links
        self._sharing = sharing
        self._lose = lose
        self._lost_after = lost_after
        self._changed = threading.Condition()
        self._world: set[int] | None = None
        self._welcomed: set[int] = set()
        self._ready: set[int] = set()
        self._complete = False
        self._error: NbdistError | None = None

    @property
    def is_dynamic(self) -> bool:
        """Whether members may come and go."""
        return self._me.world_size is None

    # -- joining ------------------------------------------------------------------------------

    def join_fixed(self, world: Sequence[Record], deadline: float) -> None:
        """Meet all members of a fixed world."""
        others = [record for record in world if record.incarnation != self._me.incarnation]
        for record in others:
            self._membership.add(record)
        with self._changed:
            self._world = {record.incarnation for record in others}
        for record in others:
            self._links.connect(record)
        self._until(others, lambda: (self._world or set()) <= self._welcomed & self._ready, deadline)

    def join_dynamic(self, present: Sequence[Record], deadline: float) -> list[Record]:
        """Meet those who are there; the ones that turn out to be dead."""
        dead: list[Record] = []
        for record in present:
            try:
                self._links.connect(record)
            except TooManyFiles:
                raise
            except ChannelError:
                dead.append(record)
        waiting = [record for record in present if record not in dead]
        patience = min(deadline, time.monotonic() + self._lost_after)

        def all_answered() -> bool:
            gone = {record.incarnation for record in waiting if not self._links.connected(record.incarnation)}
            return {record.incarnation for record in waiting} <= self._welcomed | gone

        with contextlib.suppress(RendezvousError):
            self._until(waiting, all_answered, patience)
        if self._error is not None:
            raise self._error  # who refuses is not dead
        for record in waiting:
            if record.incarnation not in self._welcomed:
                dead.append(record)
                self._links.disconnect(record.incarnation)
        self._complete = True
        return dead

    def _until(self, others: Sequence[Record], done: Any, deadline: float) -> None:
        with blocking_wait():
            while True:
                with self._changed:
                    if self._error is not None:
                        raise self._error
                    self._complete = {record.incarnation for record in others} <= self._welcomed
                    if done():
                        break
                if time.monotonic() > deadline:
                    missing = [
                        record.name
                        for record in others
                        if record.incarnation not in (self._welcomed if self.is_dynamic else self._ready)
                    ]
                    raise RendezvousError(f"no answer from {', '.join(missing)} while the RPC world formed")
                for record in others:
                    if record.incarnation not in self._welcomed or record.incarnation not in self._ready:
                        reads = self._sharing.can_read(record)
                        self._say(record.incarnation, Hello(self._me, reads))
                        if self._complete:
                            self._say(record.incarnation, Ready())
                with self._changed:
                    if not done() and self._error is None:
                        self._changed.wait(_AGAIN)
        if not self.is_dynamic:
            for record in others:
                self._say(record.incarnation, Ready())

    def _say(self, to: int, message: Hello | Welcome | Ready) -> None:
        with contextlib.suppress(NbdistError):
            self._links.post(to, message)

    # -- hearing ------------------------------------------------------------------------------

    def on_stranger(self, message: Hello) -> None:
        """Somebody knocks whom this agent does not know."""
        record = message.record
        if record.version != VERSION:
            self._refuse(record, f"{self._me.name} speaks version {VERSION}, not {record.version}")
        elif self.is_dynamic and record.world_size is None:
            try:
                self._links.connect(record)
                self._membership.add(record)  # last: a member without a connection could never be called
            except TooManyFiles as error:  # no reason to refuse: it will knock again
                _log.warning("%s cannot answer %s yet: %s", self._me.name, record.name, error)
            except (NotUnique, ChannelError) as error:
                self._links.disconnect(record.incarnation)
                self._refuse(record, str(error))
            else:
                self._sharing.on_met(record.incarnation, message.reads)
                self._welcome(record.incarnation)
        elif self._complete:
            self._refuse(record, f"the world of {self._me.name} is fixed and complete")
        # else: the roster with this member in it has not been read yet; it will knock again

    def _refuse(self, record: Record, reason: str) -> None:
        self._links.refuse(record, Refused(self._me.incarnation, reason))

    def on_hello(self, message: Hello, sender: int, _: list[bytes]) -> None:
        """Welcome a member that says who it is."""
        self._sharing.on_met(sender, message.reads)
        self._welcome(sender)
        if self._complete:
            self._say(sender, Ready())

    def _welcome(self, sender: int) -> None:
        record = self._links.connected(sender)
        if record is not None:  # else it was lost in between
            self._say(sender, Welcome(self._me, self._sharing.can_read(record)))

    def on_welcome(self, message: Welcome, sender: int, _: list[bytes]) -> None:
        """Note that a member has answered."""
        self._sharing.on_met(sender, message.reads)
        # The record is the one by which this agent reached the sender: a message must not give it another name or id.
        record = self._links.connected(sender)
        if self.is_dynamic and record is not None:
            with contextlib.suppress(NotUnique):
                self._membership.add(record)
        with self._changed:
            self._welcomed.add(sender)
            self._changed.notify_all()

    def on_ready(self, message: Ready, sender: int, _: list[bytes]) -> None:
        """Note that a member has met all others."""
        with self._changed:
            self._ready.add(sender)
            self._changed.notify_all()

    def on_refused(self, message: Refused) -> None:
        """A message of ours was not taken: by who has given us up, or by who is there in its place."""
        if self._links.connected(message.about) is None:
            return
        name = self._membership.name_of(message.about)
        if message.version != VERSION:
            error: NbdistError = VersionMismatch(f"{name} speaks version {message.version}, this agent {VERSION}")
        else:
            error = RendezvousError(f"{name} refused: {message.reason}")
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if self._complete:
            self._lose(message.about, f"refused further messages: {message.reason}")

    def on_lost(self, record: Record, why: str) -> None:
        """Give up forming the world if a member is lost before it was ready."""
        with self._changed:
            if self._world is not None and record.incarnation in self._ready & self._welcomed:
                # Its own world was complete: it has come and gone, which is no failure to form this one.
                self._world.discard(record.incarnation)
            elif self._world is not None and record.incarnation in self._world:
                self._error = self._error or WorkerLost(f"{record.name} {why} while the RPC world formed")
            self._changed.notify_all()
