"""Stops the clocks of calls on all members while a watched pass is paused, so that no call times out meanwhile."""

from __future__ import annotations

import threading

from nbdist.autograd.graph.messages import Freeze
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.watching.group_limits import GROUP_LIMITS
from nbdist.rpc.agent import Agent
from nbdist.wire.messages import Record


class Freezing:
    """The pauses of one agent, of which it tells all members, and the pauses of which other agents have told it."""

    def __init__(self, agent: Agent, transport: Transport) -> None:
        self._agent, self._transport = agent, transport
        self._paused: set[int] = set()  # the contexts with a pass that is paused from here
        self._sent = 0  # Freeze messages
        self._lock = threading.Lock()  # guards the two
        self._newest: dict[int, int] = {}  # the number of the newest Freeze message of each other agent, by incarnation
        agent.on_joined(self._on_joined)
        transport.handle(Freeze, self._on_freeze)

    def freeze(self, context_id: int, frozen: bool) -> None:
        """Tell all members that a pass of a context is paused from here, or that none is paused any more."""
        with self._lock:
            before = bool(self._paused)
            (self._paused.add if frozen else self._paused.discard)(context_id)
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
