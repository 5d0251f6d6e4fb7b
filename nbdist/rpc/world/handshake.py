"""Introduces agents to each other: every pair of agents exchanges records before any call is accepted.

::

    worker0                                   worker1
    ───────                                   ───────
    Hello  (my record)          ────────▶     on_hello
    on_welcome                  ◀────────     Welcome (my record)      worker1 is in `_welcomed`
    ...                                       ...
    Ready  (I have met all)     ────────▶     on_ready                 worker0 is in `_ready`

Both send `Hello`, and repeat it every 0.1 s until it is answered. A member takes a fixed world for complete once all
others have welcomed it *and* are ready: then a function that another member calls here can itself call any member. In a
dynamic world there is no `Ready`, and a `Hello` from an unknown agent makes that agent a member. So while `init_rpc` of
a newcomer runs, some members may know it already, and others not yet: a call to it from those raises UnknownWorker.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from nbdist.channel.contract import ChannelError, TooManyFiles
from nbdist.channel.process_watch import is_alive
from nbdist.errors import NbdistError, NotUnique, RendezvousError, VersionMismatch, WorkerLost
from nbdist.rpc.core.members import Membership
from nbdist.rpc.links import Links, try_post
from nbdist.rpc.shared_tensors import Sharing
from nbdist.rpc.waits import blocking_wait
from nbdist.wire.messages import VERSION, Hello, Ready, Record, Refused, Welcome

# Seconds for which a joining member waits for the others at least: a busy member must not be taken for dead.
_LEAST_PATIENCE = 12.0
_GREET_EVERY = 0.1  # seconds after which an unanswered greeting is sent again
_log = logging.getLogger("nbdist.rpc")


@dataclass(eq=False, repr=False)
class Handshake:
    """The part of an agent that meets the other members.

    Deadlines are as of `time.monotonic`. The methods named after messages run in the reading thread.
    """

    _membership: Membership
    _links: Links
    _sharing: Sharing
    _: KW_ONLY
    lose: Callable[[int, str], None]  # `Agent.lose`
    ended: Callable[[int], None]  # loses the members of this host whose process, given by its pid, has ended
    joined: Callable[[Record], None]  # called with each member that joins a dynamic world
    lost_after: float  # seconds until a silent member of another host counts as dead
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _world: set[int] | None = None  # the others that a fixed world must have; None in a dynamic world
    _welcomed: set[int] = field(default_factory=set)  # the members that have answered this agent's greeting
    _ready: set[int] = field(default_factory=set)  # the members that have reported that they have met all others
    # True once all others have welcomed this agent. It then refuses strangers in a fixed world.
    _complete: bool = False
    _error: NbdistError | None = None  # the reason why this agent cannot join

    def __post_init__(self) -> None:
        self._me = self._membership.me

    @property
    def is_dynamic(self) -> bool:
        """True if members may come and go."""
        return self._me.world_size is None

    # -- joining ------------------------------------------------------------------------------

    def join_fixed(self, world: Sequence[Record], deadline: float) -> None:
        """Meet all members of a fixed world, and return when each of them has met all others, too.

        Raises RendezvousError at the deadline or if a member refuses this one, VersionMismatch if a member uses another
        version of the protocol, and WorkerLost if a member dies.
        """
        others = [record for record in world if record.incarnation != self._me.incarnation]
        for record in others:
            self._membership.add(record)
        with self._changed:
            self._world = {record.incarnation for record in others}
        for record in others:
            self._links.connect(record)
        self._greet_until(others, lambda: (self._world or set()) <= self._welcomed & self._ready, deadline)

    def join_dynamic(self, present: Sequence[Record], deadline: float) -> list[Record]:
        """Meet the members that are present in a dynamic world; return the records of those that turn out to be dead.

        Waits until the deadline, but at most ``lost_after`` seconds (12 if that is more). A member of another host that
        has not answered by then counts as dead: calls to it fail with WorkerLost. Raises RendezvousError or
        VersionMismatch if a member refuses this one.
        """
        dead: list[Record] = []
        for record in present:
            try:
                self._links.connect(record)
            except TooManyFiles:
                raise
            except ChannelError:
                dead.append(record)
        waiting = [record for record in present if record not in dead]
        patience = min(deadline, time.monotonic() + max(self.lost_after, _LEAST_PATIENCE))

        def all_answered() -> bool:
            gone = {record.incarnation for record in waiting if not self._links.connected(record.incarnation)}
            return {record.incarnation for record in waiting} <= self._welcomed | gone

        with contextlib.suppress(RendezvousError):
            self._greet_until(waiting, all_answered, patience)
        if self._error is not None:
            raise self._error  # a member that refuses is not dead
        for record in waiting:
            if record.incarnation in self._welcomed:
                continue
            if record.host == self._me.host and is_alive(record.pid, record.started):
                self._add(record)  # busy or stopped: it reads the greetings later
            else:
                dead.append(record)
        self._complete = True
        for record in dead:
            self._give_up(record)
        return dead

    def _give_up(self, record: Record) -> None:
        """Make a listed member that did not answer a former member: then errors name it, and its answer is refused."""
        why = f"did not answer when {self._me.name} joined"
        with contextlib.suppress(NotUnique):  # another member has its name, and errors are about that one
            self._membership.add(record)
        self.lose(record.incarnation, why)
        self._membership.remove(record.incarnation, why)  # if it was not connected any more

    def _greet_until(self, others: Sequence[Record], done: Any, deadline: float) -> None:
        """Greet the others until ``done()`` is true. Raises RendezvousError at the deadline, with the missing names."""
        with blocking_wait():
            while True:
                with self._changed:
                    # Stored by `on_refused` or `on_lost`, in the reading thread.
                    if self._error is not None:
                        raise self._error
                    self._complete = {record.incarnation for record in others} <= self._welcomed
                    if done():
                        break
                if time.monotonic() > deadline:
                    met = self._welcomed if self.is_dynamic else self._ready
                    missing = [record.name for record in others if record.incarnation not in met]
                    raise RendezvousError(
                        f"no answer from {', '.join(missing)} while the RPC world formed: see whether they still run, "
                        "and whether their host can be reached"
                    )
                for record in others:
                    if record.incarnation not in self._welcomed or record.incarnation not in self._ready:
                        reads = self._sharing.can_read(record)
                        try_post(self._links, record.incarnation, Hello(self._me, reads))  # the next turn repeats it
                        if self._complete:
                            try_post(self._links, record.incarnation, Ready())
                with self._changed:
                    if not done() and self._error is None:
                        self._changed.wait(_GREET_EVERY)
        if not self.is_dynamic:
            for record in others:
                try_post(self._links, record.incarnation, Ready())

    # -- receiving ----------------------------------------------------------------------------

    def on_stranger(self, message: Hello) -> None:
        """Handle a greeting from an agent without a connection: let the agent in, refuse it, or ignore it for now."""
        record = message.record
        if record.version != VERSION:
            self._refuse(record, f"{self._me.name} uses version {VERSION} of nbdist's protocol, not {record.version}")
        elif self.is_dynamic and record.world_size is None:
            holder = self._membership.holder(record)
            if holder is not None and holder.host == self._me.host and not is_alive(holder.pid, holder.started):
                self.ended(holder.pid)  # a new worker has taken its name before this process has noticed its end
            try:
                self._links.connect(record)
                self._membership.add(record)  # last: a member without a connection could never be called
            except TooManyFiles as error:  # do not refuse the agent: it will greet again
                _log.warning("%s cannot answer %s yet: %s", self._me.name, record.name, error)
            except (NotUnique, ChannelError) as error:
                self._links.disconnect(record.incarnation)
                self._refuse(record, str(error))
            else:
                self._sharing.on_met(record, message.reads)
                self._welcome(record.incarnation)
                self.joined(record)
        elif self._complete:
            self._refuse(
                record,
                f"the world of {self._me.name} is fixed and complete. Start all members again, or leave world_size out "
                "in all of them: then members may join at any time",
            )
        # else: this agent has not read the roster with the new member yet; the new member will greet again

    def _refuse(self, record: Record, reason: str) -> None:
        self._links.refuse(record, Refused(self._me.incarnation, reason))

    def on_hello(self, message: Hello, sender: int, _: list[bytes]) -> None:
        """Welcome a member that greets this one. A repeated greeting is answered again."""
        self._meet(sender, message.reads)
        self._welcome(sender)
        if self._complete:
            try_post(self._links, sender, Ready())

    def _welcome(self, sender: int) -> None:
        record = self._links.connected(sender)
        if record is not None:  # else the sender was lost meanwhile
            try_post(self._links, sender, Welcome(self._me, self._sharing.can_read(record)))

    def _meet(self, sender: int, reads: bool) -> Record | None:
        """Note whether a member can read this agent's arena; return the member's record, None if it was lost."""
        # Not the record in the message, which must not give the sender another name or id.
        record = self._links.connected(sender)
        if record is not None:
            self._sharing.on_met(record, reads)
        return record

    def on_welcome(self, message: Welcome, sender: int, _: list[bytes]) -> None:
        """Record that a member has answered this agent's greeting."""
        record = self._meet(sender, message.reads)
        if self.is_dynamic and record is not None:
            self._add(record)
        with self._changed:
            self._welcomed.add(sender)
            self._changed.notify_all()

    def _add(self, record: Record) -> None:
        """Add a member of a dynamic world, unless another one has its name or id. Adding it twice changes nothing."""
        is_new = self._membership.get(record.incarnation) is None
        with contextlib.suppress(NotUnique):
            self._membership.add(record)
            if is_new:
                self.joined(record)

    def on_ready(self, message: Ready, sender: int, _: list[bytes]) -> None:
        """Record that a member has met all others. `join_fixed` waits until all members have reported this."""
        with self._changed:
            self._ready.add(sender)
            self._changed.notify_all()

    def on_refused(self, message: Refused) -> None:
        """Handle the answer of an agent that did not accept a message of this one.

        That agent has lost this one, does not let this one join, or now listens at the address of an earlier agent.
        While the world forms, joining fails. Later, the agent at that address is lost.
        """
        if self._links.connected(message.about) is None:
            return
        name = self._membership.name_of(message.about)
        if message.version != VERSION:
            error: NbdistError = VersionMismatch(
                f"{name} uses version {message.version} of nbdist's protocol, this agent {VERSION}: install the same "
                "nbdist everywhere"
            )
        else:
            error = RendezvousError(f"{name} refused this process as a member of the RPC world: {message.reason}")
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if self._complete:
            self.lose(message.about, f"refused further messages: {message.reason}")
            self._links.doubt_all()

    def on_lost(self, record: Record, why: str) -> None:
        """Give up forming the world if a lost member was not ready yet: `join_fixed` then raises WorkerLost."""
        with self._changed:
            if self._world is not None and record.incarnation in self._ready & self._welcomed:
                # The member's own view of the world was complete before it left, so this world may still form.
                self._world.discard(record.incarnation)
            elif self._world is not None and record.incarnation in self._world:
                self._error = self._error or WorkerLost(
                    f"{record.name} {why} while the RPC world formed: start all members again"
                )
            self._changed.notify_all()
