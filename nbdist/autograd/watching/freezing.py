"""Stops the clocks of calls on all members while a watched pass is paused, or a debugger stands."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from nbdist.autograd.graph.messages import Freeze
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.watching.group_limits import GROUP_LIMITS
from nbdist.rpc.agent import Agent
from nbdist.wire.messages import Record


class Freezing:
    """The pauses of one agent, of which it tells all members, and the pauses of which other agents have told it."""

    def __init__(self, agent: Agent, transport: Transport) -> None:
        self._agent, self._transport = agent, transport
        # The contexts with a pass that is paused from here, and the debuggers that stand here.
        self._paused: set[Hashable] = set()
        self._sent = 0  # Freeze messages
        self._lock = threading.Lock()  # guards the two
        self._newest: dict[int, int] = {}  # the number of the newest Freeze message of each other agent, by incarnation
        agent.on_joined(self._on_joined)
        transport.handle(Freeze, self._on_freeze)

    def freeze(self, holder: Hashable, frozen: bool) -> None:
        """Tell all members that ``holder``, such as a context, stops the clocks from here, or does not any more."""
        with self._lock:
            before = bool(self._paused)
            (self._paused.add if frozen else self._paused.discard)(holder)
            if bool(self._paused) == before:
                return
            self._sent += 1
            message = Freeze(self._sent, bool(self._paused))
            for record in self._agent.membership.members():
                self._transport.tell(record.incarnation, message)

    def _on_joined(self, record: Record) -> None:
        """Tell a new member that a pass is paused from here, if one is: its calls must not time out either."""
        with self._lock:
            message = Freeze(self._sent, True) if self._paused else None
        if message is not None:  # sent without the lock; if a newer message overtakes it, its number says so
            self._transport.tell(record.incarnation, message)

    def _on_freeze(self, message: Freeze, sender: int) -> None:
        """Stop the clocks of all calls of this agent, because the sender has paused a pass, or let them run again."""
        if message.number < self._newest.get(sender, 0):
            return  # a newer message has overtaken it
        self._newest[sender] = message.number
        if message.frozen:
            self._agent.freeze(sender)
            GROUP_LIMITS.hold((id(self), sender), True)
        # A sender that has just joined may not be known yet.
        if not message.frozen or self._agent.membership.is_gone(sender):
            self._thaw(sender)

    def on_lost(self, worker: int) -> None:
        """Let the clocks run that a lost worker has stopped."""
        self._newest.pop(worker, None)
        self._thaw(worker)

    def _thaw(self, who: int) -> None:
        self._agent.thaw(who)
        GROUP_LIMITS.hold((id(self), who), False)
