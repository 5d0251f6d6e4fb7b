"""A network without sockets, threads or time: the pure parts joined, for tests.

`Wire` holds the messages under way; a test decides which arrives when, which is lost and which comes twice.
`Node` is an agent reduced to `Peer` and `Forks`: it does with references what nbdist.rpc.references, caller
and executor do.
"""

from collections import deque
from dataclasses import dataclass, field

from nbdist.ids import IdSource
from nbdist.rpc.forks import Drop, Forks, Send, Standing
from nbdist.testing import ManualClock
from nbdist.wire.messages import (
    Call,
    ChildAccept,
    Fork,
    ForkConfirm,
    ForkRequest,
    Mode,
    Payload,
    Ping,
    Pong,
    Reply,
    RRefState,
    State,
    UserDelete,
    decode_envelope,
    encode_envelope,
)
from nbdist.wire.peer import Lost, Peer, PeerLimits, Transmit, Undelivered

PATIENT = PeerLimits(retries=10_000)
STATE = State("builtins", "int")


@dataclass
class Wire:
    """Messages under way, as (receiver's incarnation, first frame)."""

    flying: list[tuple[int, bytes]] = field(default_factory=list)

    def put(self, to, outgoing):
        self.flying.append((to, bytes(outgoing.frames[0])))


class Handle:
    """What an RRef object is to the reference counting: when Python forgets it, its node hears of it."""

    def __init__(self, node, rref, fork):
        self.node, self.rref, self.fork = node, rref, fork

    def __del__(self):
        self.node.released.append((self.rref, self.fork))

    def __repr__(self):
        return f"<handle of {self.node.name} on {self.rref.local_id} by {self.fork and self.fork.local_id}>"


class Node:
    """One agent."""

    def __init__(self, name, id, incarnation, wire, clock, limits=PATIENT):
        self.name, self.id, self.incarnation = name, id, incarnation
        self.wire, self.clock, self.limits = wire, clock, limits
        self.forks = Forks(incarnation, IdSource(id, incarnation))
        self.ids = self.forks._ids
        self.peers: dict[int, Peer] = {}
        self.lost: set[int] = set()
        self.alive = True
        self.handles: list[Handle] = []
        self.released = deque()
        self.numbers = iter(range(1, 1 << 60))
        self.pending: dict[int, tuple[int, Call]] = {}
        self.refused: set[int] = set()
        self.running: list[tuple[int, Call]] = []
        self.created: set = set()
        self.dropped: list = []
        self.denied: list = []
        self.log: list = []
        self.connect(self)

    def __repr__(self):
        return f"<{self.name} {self.incarnation}>"

    def connect(self, other):
        self.peers[other.incarnation] = Peer(
            self.incarnation, other.incarnation, self.limits, self.clock.now(), watch_silence=False
        )

    # -- what a program does ------------------------------------------------------------------

    def own(self):
        rref = self.ids.next()
        self.forks.retain(rref)
        self.created.add(rref)
        self.perform(self.forks.set_state(rref, STATE))
        self.handles.append(Handle(self, rref, None))
        return self.handles[-1]

    def remote(self, owner):
        rref, fork = self.ids.next(), self.ids.next()
        if owner is self:
            self.forks.retain(rref)
            handle = Handle(self, rref, None)
        else:
            self.forks.begin(rref, fork, owner.incarnation)
            handle = Handle(self, rref, fork)
        self.handles.append(handle)
        result = Fork(rref, fork, owner.incarnation, self.incarnation)
        call = Call(next(self.numbers), Mode.REMOTE, "f", Payload(), result=result)
        self.pending[call.id] = (owner.incarnation, call)
        self.post(owner.incarnation, call)
        return handle

    def share(self, handle, to):
        """Pass a reference to another node, as an argument of a call."""
        if handle.fork is not None and self.forks.standing(handle.fork) in (Standing.DEAD, Standing.FAILED):
            return False
        if to.incarnation not in self.peers:
            return False
        handed = self.forks.hand_over(handle.rref, handle.fork, to.incarnation)
        call = Call(next(self.numbers), Mode.CALL, "f", Payload(forks=[handed]))
        self.post(to.incarnation, call, holds=handle)
        return True

    def time_out(self, id):
        """Give up waiting for the reply to a `remote`."""
        to, call = self.pending.pop(id)
        if to != self.incarnation:
            self.perform(self.forks.fail(call.result.fork, may_exist=True))

    def finish(self, index):
        """A running call that makes a value ends."""
        sender, call = self.running.pop(index)
        rref = call.result.rref
        self.perform(self.forks.set_state(rref, STATE))
        if sender in self.peers:
            self.post(sender, Reply(call.id, True, Payload(), STATE))
        self.perform(self.forks.release_owned(rref))

    def refuse_for_definitions(self, index):
        """A running call turns out to lack a definition: its caller is asked to repeat it."""
        sender, call = self.running.pop(index)
        self.created.discard(call.result.rref)
        self.perform(self.forks.uncreate(call.result.rref, call.result.fork) or [])
        if sender in self.peers:
            self.post(sender, Reply(call.id, False, Payload(), missing=[("f", "digest")]))

    def lose(self, incarnation):
        """Learn (or decide) that another agent is gone."""
        peer = self.peers.pop(incarnation, None)
        if peer is None:
            return
        peer.lose()
        self.lost.add(incarnation)
        self.perform(self.forks.on_lost(incarnation))
        for id, (to, call) in list(self.pending.items()):
            if to == incarnation:
                del self.pending[id]
                self.perform(self.forks.fail(call.result.fork, may_exist=False))
        self.reap()

    def crash(self):
        self.alive = False
        self.peers.clear()
        self.handles.clear()

    # -- messages -----------------------------------------------------------------------------

    def post(self, to, message, holds=None):
        peer = self.peers.get(to)
        if peer is not None:
            self.wire.put(to, peer.send(message, (), self.clock.now(), holds))
        elif isinstance(message, ForkRequest):
            self.perform(self.forks.on_fork_confirm(ForkConfirm(message.rref, message.fork, gone=True)))

    def perform(self, instructions):
        for instruction in instructions:
            self.log.append(instruction)
            if isinstance(instruction, Send):
                if isinstance(instruction.message, ForkConfirm) and instruction.message.gone:
                    self.denied.append((instruction.message.rref, instruction.message.fork))
                self.post(instruction.to, instruction.message)
            elif isinstance(instruction, Drop) and instruction.rref in self.created:
                self.dropped.append(instruction.rref)

    def reap(self):
        while self.released:
            rref, fork = self.released.popleft()
            if self.alive:
                event = self.forks.release_owned(rref) if fork is None else self.forks.release(fork)
                self.perform(event)

    def take(self, frame):
        envelope = decode_envelope(frame)
        peer = self.peers.get(envelope.sender)
        if not self.alive or peer is None or envelope.receiver != self.incarnation:
            return
        if peer.receive(envelope, len(frame), self.clock.now()):
            self.act(envelope.message, envelope.sender, peer)
        self.reap()

    def act(self, message, sender, peer):
        match message:
            case Call():
                for handed in message.payload.forks:
                    self.perform(self.forks.accept(handed))
                    mine = handed.owner == self.incarnation
                    self.handles.append(Handle(self, handed.rref, None if mine else handed.fork))
                if message.result is not None:
                    if sender == self.incarnation:
                        self.forks.retain(message.result.rref)
                    else:
                        self.forks.create(message.result.rref, message.result.fork, sender)
                    self.created.add(message.result.rref)
                    self.running.append((sender, message))
            case Reply():
                _, call = self.pending.pop(message.id, (0, None))
                if call is None:
                    return
                if message.missing:
                    self.refused.discard(call.id)
                    self.pending[call.id] = (sender, call)
                    self.post(sender, call)
                else:
                    self.perform(self.forks.confirm(call.result.fork, message.state))
            case ForkRequest():
                self.perform(self.forks.on_fork_request(message, sender))
            case ForkConfirm():
                self.perform(self.forks.on_fork_confirm(message))
            case ChildAccept():
                self.perform(self.forks.on_child_accept(message))
            case UserDelete():
                self.perform(self.forks.on_user_delete(message, sender))
            case RRefState():
                self.forks.on_state(message)
            case Ping():
                self.post(sender, Pong(message.number))
            case Pong():
                self.follow(sender, peer.ponged(message, self.clock.now()))

    def follow(self, to, actions):
        for action in actions:
            assert not isinstance(action, Lost | Undelivered), action
            if isinstance(action, Transmit):
                self.wire.put(to, action.outgoing)

    def tick(self):
        for incarnation, peer in list(self.peers.items()):
            self.follow(incarnation, peer.tick(self.clock.now()))
        self.reap()

    # -- looking ------------------------------------------------------------------------------

    @property
    def next_tick(self):
        return min((peer.next_tick() for peer in self.peers.values()), default=float("inf"))

    def leaks(self):
        """What is left where nothing should be."""
        counters = {name: getattr(self.forks, name) for name in ("owners", "forks", "users", "pending")}
        tables = {name: value for name, value in vars(self.forks).items() if name in TABLES and value}
        kept = {to: peer.outstanding for to, peer in self.peers.items() if peer.outstanding}
        return {name: count for name, count in counters.items() if count} | tables | ({"kept": kept} if kept else {})


TABLES = ("_owned", "_users", "_children", "_early")


def settle(wire, nodes, clock, rounds=10_000):
    """Deliver everything, with time passing as it must, until all is quiet."""
    by_incarnation = {node.incarnation: node for node in nodes if node.alive}
    for _ in range(rounds):
        while wire.flying:
            to, frame = wire.flying.pop(0)
            if to in by_incarnation:
                by_incarnation[to].take(frame)
        for node in by_incarnation.values():
            node.reap()
        if wire.flying:
            continue
        due = min(node.next_tick for node in by_incarnation.values())
        if due == float("inf"):
            return
        clock.advance(max(due - clock.now(), 0.0))
        for node in by_incarnation.values():
            node.tick()
    raise AssertionError("the network does not come to rest")


def reseal(frame, **changes):
    """The same first frame with some fields of the envelope changed."""
    import msgspec

    return encode_envelope(msgspec.structs.replace(decode_envelope(frame), **changes))


__all__ = ["STATE", "Handle", "ManualClock", "Node", "Wire", "reseal", "settle"]
