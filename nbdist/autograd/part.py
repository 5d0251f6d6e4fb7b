"""One worker's share of one pass: what has come, what is still to come, and what can run now.

torch's engine runs it, as a local pass: each node once, with its full gradient and with all of its hooks. The
one thing that it cannot do is wait, so it is called again with every gradient that arrives. Nodes behind a gate
whose gradient is still to come are *held back*. As long as no edge leads from what can run into what is held
back, a call is a plain one. Otherwise the missing gates are roots of that call as well, of the lowest priority:
the engine holds back all that depends on them, and when it comes to one of them, nothing else is left to run.
The gate ends the call by an error, and what had crossed into nodes held back is *kept* for a later one.

What has nothing in common with what runs (but leaves, which any number of calls may add to) is a *step* of its own, and
another thread may run it at the same time: so what came first goes on first, and does not wait for what came with it.

Whether a gate takes part at all is found out by marking (`nbdist.autograd.passes`); until that is over, the gates
not marked might.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from nbdist.autograd import ddp
from nbdist.autograd.edges import RECEIVE, Held, Node, Received, Sent, Slot, swap_part
from nbdist.autograd.engine import run_backward
from nbdist.autograd.graph import ACCUMULATE, Region, walk
from nbdist.autograd.leaves import Claim, Gradients
from nbdist.autograd.messages import Head
from nbdist.autograd.ordering import Lines

if TYPE_CHECKING:
    from nbdist.autograd.observer import Observer

__all__ = ["Entry", "Marks", "Part", "Roots", "State"]

_LAST = 0
_FIRST = 1 << 62
_MOST = 16
"""If more messages than this have come together, they are run together: they are likely to be small."""
_one = torch.ones((), device="cpu")


class State(Enum):
    """How far a gate is, in one pass."""

    UNSURE = "unsure"  # it has not been marked, and may still be
    EXPECTED = "expected"
    ARRIVED = "arrived"
    UNUSED = "unused"


class Crossing(NamedTuple):
    """A gradient on its way into a node."""

    node: Node
    output: int
    gradient: torch.Tensor


class Roots:
    """The roots of a pass, on the worker that began it."""

    def __init__(self, edges: Sequence[tuple[Node, int]], gradients: Sequence[torch.Tensor]) -> None:
        self.edges = list(edges)
        self.gradients: list[torch.Tensor | None] = list(gradients)
        self.slot: Slot | None = None


class _Arrived(msgspec.Struct, eq=False):
    """A gate, and the gradient that has come for it."""

    edges: list[tuple[Node, int]]
    gradients: list[torch.Tensor | None]
    slot: Slot | None


class _Step(msgspec.Struct, eq=False):
    """One call of the engine."""

    call: Callable[[], None]
    region: Region
    entries: Sequence[Entry]
    alone: bool = False
    """True if no other call of the engine may run at the same time."""


Entry = Roots | _Arrived
Marks = dict[Received, list[int]]
"""Which tensors of which messages are going to get gradients."""


class Part:
    """One worker's share of one pass."""

    def __init__(
        self,
        sends: Iterable[Sent],
        head: Head,
        send_back: Callable[[Received, Sequence[int], Sequence[torch.Tensor | None]], None],
        send_marks: Callable[[Marks], None],
        observer: Observer | None = None,
    ) -> None:
        self.gradients = Gradients()
        self.smart = head.smart
        self._head = head
        self._send_back = send_back
        self._send_marks = send_marks
        self._observer = observer
        self._due: dict[Received, list[int]] = {}
        self._lock = threading.Lock()
        self._sends: dict[int, Sent] = {}
        self.states: dict[Slot, State] = {}
        for sent in sends:
            self._sends[sent.message] = sent
            self.states.update(dict.fromkeys(sent.slots, State.UNSURE if head.smart else State.EXPECTED))
        self._lines = Lines(self.states)
        self.ready: list[Entry] = []
        """The roots and gradients that have arrived, and that no call of the engine has taken yet."""
        self._running: list[_Step] = []
        self._hooks: dict[Node, list[Callable[[], Mapping[int, Any] | None]]] = {}
        self._kept: list[Crossing] = []
        self._regions: dict[object, Region] = {}
        self._holders: dict[Node, int] = {}
        self._counted: set[Slot] = set()
        self._awaited: dict[Received, set[int]] = {}
        self._crossed: dict[Received, dict[int, torch.Tensor | None]] = {}
        self._gone_back: dict[Received, set[int]] = {}
        self.root_edges: list[tuple[Node, int]] = []
        self._barriers: set[Slot] = set()
        self.reduces = False
        """Whether a DDP module here is reached."""
        self._may_reduce = not head.smart  # which needs to know of all that take part
        self._stopped = False

    # -- marking ------------------------------------------------------------------------------

    def mark(self, message: int, outputs: Sequence[int]) -> Marks:
        """Those of a message's tensors are going to get gradients; what is to be marked because of that."""
        found: Marks = {}
        with self._lock:
            for index in outputs:
                slot = self._sends[message].slots[index]
                if self.states[slot] is State.UNSURE:
                    self.states[slot] = State.EXPECTED
                    self._reach(slot, found)
        return found

    def _reach(self, of: Slot | Entry, marks: Marks | None) -> None:
        """In SMART mode: all behind this is going to run, at once or after others have been told so by ``marks``."""
        region = self._regions.get(of) or self._region(of)
        if ddp.living and ddp.own(region.leaves):
            self.reduces = True
        for end, reached in region.receives.items():
            awaited = self._awaited.setdefault(end, set())
            if new := reached - awaited:
                awaited |= new
                if marks is not None:
                    marks.setdefault(end, []).extend(sorted(new))

    def end_marking(self) -> None:
        """All has been marked that is going to be: the gates left over take no part, and what reduces may do so."""
        with self._lock:
            self._may_reduce = True
            for slot, state in self.states.items():
                if state is State.UNSURE:
                    self.states[slot] = State.UNUSED
                    self._release(slot)
                    self._lines.leave(slot)

    # -- arriving -----------------------------------------------------------------------------

    def begin(self, roots: Roots) -> None:
        """Here the pass begins."""
        self.ready.append(roots)
        self.root_edges = list(roots.edges)

    def arrive(self, message: int, outputs: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of some of a message's tensors have come, with a mark before, after, or none."""
        slots = self._sends[message].slots
        with self._lock:
            for index, gradient in zip(outputs, gradients, strict=True):
                slot = slots[index]
                self.states[slot] = State.ARRIVED
                self._release(slot)
                entry = _Arrived([slot.edge], [gradient], slot)
                if (region := self._regions.pop(slot, None)) is not None:
                    self._regions[entry] = region  # the same edge leads there
                self.ready.append(entry)

    def missing(self) -> list[Slot]:
        """The gates whose gradients have not come."""
        with self._lock:
            return [slot for slot, state in self.states.items() if state is State.EXPECTED]

    def peers(self) -> set[int]:
        """The workers to which gradients are going from here, or have gone."""
        with self._lock:
            return {end.peer for end in self._awaited}

    @property
    def unsure(self) -> bool:
        """Whether something waits for the end of the marking."""
        left = bool(self.ready or self._kept)
        return left and (State.UNSURE in self.states.values() or (self.reduces and not self._may_reduce))

    def stop(self) -> None:
        """Run nothing more."""
        self._stopped = True

    # -- running ------------------------------------------------------------------------------

    def run(self, before_step: Callable[[], None]) -> bool:
        """Run what can run, until there is nothing more; whether something waits for the end of the marking.

        Any number of threads may do so, each of which calls ``before_step()`` before it runs something. The answer is
        as it was when nothing more could run, and tells something if no other thread has run anything since. Asked for
        later, it might have come to an end meanwhile, and what waited, though not run yet, would be taken for dealt
        with.
        """
        while not self._stopped:
            with self._lock:
                step = self._next_step()
                marks, self._due = self._due, {}
                waits = step is None and bool(self.ready or self._kept) and self.unsure
                if step is not None:
                    self._running.append(step)
            if marks:
                self._send_marks(marks)
            if step is None:
                return waits
            try:
                before_step()
                step.call()
                if self.smart:
                    # What has run was not marked first, so its gradients must go before it is reported as dealt with.
                    for end in step.region.receives:
                        if end in self._crossed:
                            self._return(end)
            finally:
                with self._lock:
                    self._running.remove(step)
                    for entry in step.entries:
                        self._leave(entry)
        return False

    def _leave(self, entry: Entry) -> None:
        """It has run: nothing of it is kept for as long as the pass goes on."""
        if entry.slot is not None and self._lines.places:
            self._lines.leave(entry.slot)
        self._regions.pop(entry, None)
        entry.gradients = []

    def _next_step(self) -> _Step | None:
        if not self.ready and not self._kept:
            return None
        if self._running and any(step.alone for step in self._running):
            return None
        if self._lines.places or ddp.living:
            entries = self._take_ready()
        else:
            entries, self.ready = self.ready, []
        pending = [slot for slot, state in self.states.items() if state in (State.UNSURE, State.EXPECTED)]
        if not pending and (self._may_reduce or not ddp.living):
            if self.smart:
                for entry in entries:
                    self._reach(entry, None)
            return self._plain_step(entries)
        if len(self._counted) < len(pending):  # it has none but those
            self._hold(pending)
        held = self._held_nodes(entries) if ddp.living else self._holders.keys()
        launched: list[Entry] = []
        for entry in entries:
            free_to_run = held.isdisjoint((self._regions.get(entry) or self._region(entry)).nodes)
            if self.smart:
                self._reach(entry, None if free_to_run else self._due)
            if free_to_run or self._keep_if_held(entry, held):
                launched.append(entry)
        kept = [crossing for crossing in self._kept if crossing.node not in held] if self._kept else []
        if not launched and not kept:
            return None
        if len(launched) == 1 and not kept:
            region = self._regions.get(launched[0]) or self._region(launched[0])
        else:
            region = self._joint([self._region(entry) for entry in launched], kept)
        held_here = region.nodes & held
        if not held_here or self._are_plain(held_here):
            return self._plain_step(launched, held)
        free = [node for node in region.nodes if node not in held]
        if self._running or not any(type(node) is RECEIVE for node in free):
            # What runs may come to the same nodes. Or nobody waits for what could run: one call later does instead of
            # one now and one later.
            self.ready = launched + self.ready
            return None
        self._kept = [crossing for crossing in self._kept if crossing.node in held]
        missing = [slot for slot in pending if not self._regions[slot].nodes.isdisjoint(held_here)]
        # What waits without a gate before it gets one.
        missing += [Slot(-1, 0, node.variable) for node in held_here if node not in self._holders]
        crossings = {
            node: crossing
            for node in free
            if (crossing := [(i, to, nr) for i, (to, nr) in enumerate(node.next_functions) if to in held])
        }  # all of this now, with the lock held: what arrives during the call changes who holds what
        call = partial(self._contested_call, launched, kept, free, crossings, missing)
        return _Step(call, region, launched, alone=True)

    def _plain_step(self, entries: Sequence[Entry], held: Set[Node] = frozenset()) -> _Step | None:
        """Of what can run at once, all that hangs together and has nothing to do with what runs already."""
        if len(entries) == 1 and not self._kept and not self._running:  # as nearly always
            region = self._regions.get(entries[0]) or self._region(entries[0])
            return _Step(partial(self._call, entries, (), region.nodes, region.leaves), region, entries)
        kept = [crossing for crossing in self._kept if crossing.node not in held]
        if not entries and not kept:
            return None
        chosen = list(entries)
        if not kept and not ddp.living and len(groups := _by_message(entries)) <= _MOST:
            chosen = self._first_free(groups) if len(groups) > 1 or self._running else chosen
            region = self._joint([self._region(entry) for entry in chosen], ())
        else:
            region = self._joint([self._region(entry) for entry in entries], kept)
            if any(self._touch(region, step.region) for step in self._running):
                chosen, kept = [], []
        if len(chosen) < len(entries):
            self.ready = [entry for entry in entries if entry not in chosen] + self.ready
        if not chosen and not kept:
            return None
        self._kept = [crossing for crossing in self._kept if crossing.node in held]
        return _Step(partial(self._call, chosen, kept, region.nodes, region.leaves), region, chosen)

    def _first_free(self, groups: Sequence[list[Entry]]) -> list[Entry]:
        """The first of these messages that does not touch what runs, with all others that touch it."""
        left = [(group, self._joint([self._region(entry) for entry in group], ())) for group in groups]
        while left:
            chosen, region = left.pop(0)
            while touching := [one for one in left if self._touch(region, one[1])]:
                left = [one for one in left if one not in touching]
                chosen = [*chosen, *(entry for group, _ in touching for entry in group)]
                region = self._joint([region, *(other for _, other in touching)], ())
            if not any(self._touch(region, step.region) for step in self._running):
                return chosen
        return []

    def _take_ready(self) -> list[Entry]:
        """What has come; but roots that reach what reduces wait as a whole for the pass's turn.

        That comes soon, as nothing has been begun yet that the marking would have to wait for. And then the averaging
        goes on while gradients are computed, as in a local pass.
        """
        entries, self.ready = self._in_turn(self.ready)
        if ddp.living and not self._may_reduce:
            for entry in list(entries):
                if isinstance(entry, Roots) and ddp.own(self._region(entry).leaves):
                    self._reach(entry, self._due)
                    self.ready.append(entry)
                    entries.remove(entry)
        return entries

    def _in_turn(self, ready: list[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Those that may go in now, and those that have to wait for others (`nbdist.autograd.ordering`)."""
        now = [entry for entry in ready if entry.slot is None or self._lines.has_turn(entry.slot)]
        return now, [entry for entry in ready if entry not in now] if len(now) < len(ready) else []

    def _held_nodes(self, entries: Sequence[Entry]) -> Set[Node]:
        """The nodes that have to wait; a DDP module's leaves wait for each other, and for the pass's turn."""
        holders = self._holders
        kind: Any = ACCUMULATE
        held = (id(node.variable) for node in holders if type(node) is kind)
        blocked = ddp.blocked_by(held) if self._may_reduce else ddp.owned_by_any()
        if not blocked:
            return holders.keys()
        leaves = [leaf for entry in entries for leaf in self._region(entry).leaves]
        leaves += [leaf for crossing in self._kept for leaf in walk([(crossing.node, crossing.output)]).leaves]
        return holders.keys() | {leaf for leaf in leaves if id(leaf.variable) in blocked}

    def _keep_if_held(self, entry: Entry, held: Set[Node]) -> bool:
        """Keep those gradients of an entry that lead into held nodes; whether some are left to launch."""
        if not any(node in held for node, _ in entry.edges):
            return True
        edges, gradients = entry.edges, entry.gradients
        entry.edges, entry.gradients = [], []
        for (node, output), gradient in zip(edges, gradients, strict=True):
            if node not in held:
                entry.edges.append((node, output))
                entry.gradients.append(gradient)
            elif gradient is not None:  # a node that gets none from here still runs, by what holds it back
                self._kept.append(Crossing(node, output, gradient))
        self._regions.pop(entry, None)
        return bool(entry.edges)

    def _touch(self, one: Region, other: Region) -> bool:
        """Whether two calls have more in common than leaves at which nothing but accumulation happens."""
        if one.nodes.isdisjoint(other.nodes):
            return not one.receives.keys().isdisjoint(other.receives)
        return not self._are_plain(one.nodes & other.nodes)

    def _are_plain(self, nodes: Iterable[Node]) -> bool:
        owned = ddp.owned_by_any() if ddp.living else set[int]()
        return all(type(node) is ACCUMULATE and self._is_plain(node, owned) for node in nodes)

    def _is_plain(self, node: Node, owned: Set[int]) -> bool:
        """Whether nothing but accumulation happens at a leaf, so that it may as well happen in instalments."""
        leaf = node.variable
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or id(leaf) in owned:
            return False
        hooks = self._hooks.get(node)
        if hooks is None:
            if any(node in step.region.nodes for step in self._running):
                return False  # to look at it is to change it, and the engine may be reading it now
            hooks = self._hooks[node] = [_hooks_of(node.register_prehook), _hooks_of(node.register_hook)]
        return not any(known() for known in hooks)

    def _joint(self, regions: Sequence[Region], kept: Sequence[Crossing]) -> Region:
        if len(regions) == 1 and not kept:
            return regions[0]
        joint = Region()
        for region in regions:
            joint.leaves += [node for node in region.leaves if node not in joint.nodes]
            joint.nodes |= region.nodes
            joint.receives.update(region.receives)
        return walk([(crossing.node, crossing.output) for crossing in kept], joint)

    # -- what is held back --------------------------------------------------------------------

    def _region(self, of: Slot | Entry) -> Region:
        region = self._regions.get(of)
        if region is None:
            region = self._regions[of] = walk([of.edge] if isinstance(of, Slot) else of.edges)
        return region

    def _hold(self, slots: Iterable[Slot]) -> None:
        """Hold back all that lies behind these gates."""
        holders = self._holders
        for slot in slots:
            if slot not in self._counted:
                self._counted.add(slot)
                for node in self._region(slot).nodes:
                    holders[node] = holders.get(node, 0) + 1

    def _release(self, slot: Slot) -> None:
        if slot in self._counted:
            self._counted.discard(slot)
            holders = self._holders
            for node in self._regions[slot].nodes:
                if holders[node] == 1:
                    del holders[node]
                else:
                    holders[node] -= 1

    # -- calling the engine -------------------------------------------------------------------

    def _call(
        self, entries: Sequence[Entry], kept: Sequence[Crossing], nodes: Collection[Node], leaves: Iterable[Node]
    ) -> None:
        roots: list[Any] = []
        gradients: list[torch.Tensor] = []
        for entry in entries:
            for (node, output), gradient in zip(entry.edges, entry.gradients, strict=True):
                if gradient is not None:
                    roots.append(torch.autograd.graph.GradientEdge(node, output))
                    gradients.append(gradient)
                else:  # the engine takes no root without a gradient, but a node may give none
                    assert entry.slot is not None  # roots have gradients
                    entry.slot.node._set_sequence_nr(_FIRST)  # it may have been a barrier before
                    roots.append(entry.slot.gate)
                    gradients.append(_one)
        for crossing in kept:
            roots.append(torch.autograd.graph.GradientEdge(crossing.node, crossing.output))
            gradients.append(crossing.gradient)
        into = None if self._head.accumulate else self.gradients
        retain_graph = self._head.retain_graph
        with Claim(leaves, into, self):
            outer = swap_part(self)
            try:
                if self._observer is None:
                    run_backward(roots, gradients, retain_graph=retain_graph)
                else:
                    with self._observer.around(self, nodes):
                        run_backward(roots, gradients, retain_graph=retain_graph)
            finally:
                swap_part(outer)

    def _contested_call(
        self,
        entries: Sequence[Entry],
        kept: Sequence[Crossing],
        free: Sequence[Node],
        crossings: Mapping[Node, Sequence[tuple[int, Node, int]]],
        missing: Sequence[Slot],
    ) -> None:
        self._barriers = set(missing)
        handles = [node.register_hook(self._keeper(crossing)) for node, crossing in crossings.items()]
        for node in free:
            if node._sequence_nr() == _LAST:
                node._set_sequence_nr(_LAST + 1)
        barriers = Roots([], [])
        for slot in missing:
            slot.node._set_sequence_nr(_LAST)
            barriers.edges.append((slot.node, 0))
            barriers.gradients.append(_one)
        try:
            self._call([*entries, barriers], kept, free, [node for node in free if type(node) is ACCUMULATE])
        except Held:
            pass
        finally:
            self._barriers = set()
            for handle in handles:
                handle.remove()

    def _keeper(self, crossing: Sequence[tuple[int, Node, int]]) -> Callable[..., None]:
        def keep(gradients: Sequence[torch.Tensor | None], _: Any) -> None:
            for index, node, output in crossing:
                gradient = gradients[index]
                if gradient is not None:
                    self._kept.append(Crossing(node, output, gradient))

        return keep

    # -- from the nodes -----------------------------------------------------------------------

    def enter(self, slot: Slot) -> torch.Tensor | None:
        """A gate runs: because no gradient came for it, or because none has come and nothing else can run."""
        if slot in self._barriers:
            raise Held
        return None

    def cross(self, end: Received, first: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """A receive runs: what it got goes to where its tensors came from, with all that is to go there."""
        crossed = self._crossed.setdefault(end, {})
        crossed.update(enumerate(gradients, first))
        back = self._gone_back.setdefault(end, set())
        awaited = self._awaited[end] if self.smart or self._awaited else self._awaited_of(end)
        if crossed.keys() >= awaited - back:
            self._return(end)

    def _return(self, end: Received) -> None:
        crossed = self._crossed.pop(end)
        self._gone_back[end].update(crossed)
        if self.smart:
            outputs = sorted(crossed.keys() & self._awaited[end])  # one node may have made several
            self._send_back(end, outputs, list(map(crossed.get, outputs)))
        else:
            self._send_back(
                end, range(len(end.like)), [_or_zeros(crossed.get(i), end, i) for i in range(len(end.like))]
            )

    def _awaited_of(self, end: Received) -> set[int]:
        """In FAST mode, find out once which tensors of which messages get gradients; return those of one."""
        self._awaited = walk([*self.root_edges, *(slot.edge for slot in self.states)]).receives
        return self._awaited[end]


def _by_message(entries: Iterable[Entry]) -> list[list[Entry]]:
    groups: dict[int | None, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.slot.message if entry.slot is not None else None, []).append(entry)
    return list(groups.values())


def _or_zeros(gradient: torch.Tensor | None, end: Received, output: int) -> torch.Tensor:
    """In FAST mode what is not used gets zeros, as in torch: its history runs, and hooks there expect a tensor."""
    if gradient is not None:
        return gradient
    shape, dtype, device = end.like[output]
    return torch.zeros(shape, dtype=dtype, device=device)


def _hooks_of(register: Callable[[Callable[..., None]], Any]) -> Callable[[], Mapping[int, Any] | None]:
    """Those of a node, now and later: there is no other way to see them than to register one."""
    handle = register(_nothing)
    handle.remove()
    hooks: Callable[[], Mapping[int, Any] | None] = handle.hooks_dict_ref
    return hooks


def _nothing(*_: Any) -> None:
    """A hook registered to see which others there are."""
