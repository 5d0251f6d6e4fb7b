"""One worker's part of one pass: decides what can run now, and has torch's engine run it.

torch's engine runs each node once, with its full gradient and all of its hooks, but it cannot wait for another worker.
So the part calls it again as gradients arrive; each call is a *step*. A graph in the middle of a pass, with gradients
that flow downwards::

    gate 1: ARRIVED          gate 2: EXPECTED
       |                        |
       a  free                  b  held back by gate 2
       |                        |
       +------- kept ---------> c  held back by gate 2
       |                        |
    receive  free             leaf  held back by gate 2

=========== ==============================================================================================
gate        the node in front of the history of one sent tensor (a slot), where the tensor's gradient enters;
            its `GateState` says whether the gradient has arrived. UNSURE and EXPECTED gates are *pending*
held back   of a node: it lies behind a pending gate, so it cannot run yet (`Part._holders`)
free        of a node: it lies behind no pending gate, so it can run now
kept        of a gradient: a free node has computed it for a held-back one, here ``a`` for ``c``. It is
            stored as a `Crossing` (`Part._kept`), and a later step enters it into that node
=========== ==============================================================================================

The states of a gate. In SMART mode, gradients may arrive without a mark before them: a worker does not mark gradients
that it can compute at once::

    SMART:  UNSURE --- mark() ---> EXPECTED --- arrive() ---> ARRIVED
              |                                                  ^
              +-------------------- arrive() --------------------+
              |
              +--- end_marking() ---> UNUSED

    FAST:   EXPECTED --- arrive() ---> ARRIVED

There are two kinds of steps:

plain
    No graph edge leads from the nodes that run into held-back ones, except into leaves at which only accumulation
    happens: such a leaf may get its gradient in several parts. This is one ordinary call of torch's engine.
contested
    Other graph edges lead into held-back nodes, as from ``a`` to ``c``. The pending gates become *barriers*: more roots
    of the call, with the lowest priority. The engine does not run ``c``, which still waits for a gradient from gate 2.
    It reaches gate 2 when no other node is left to run, and the gate ends the call by raising `HeldBack`. Hooks on the
    free nodes have kept the gradients for held-back nodes. A contested step runs alone, and only if a receive node is
    free: otherwise no other worker waits for its results, and its entries wait for the next gradient.

Two steps may run at the same time, in different threads, if they share no received message, and no nodes except leaves
at which only accumulation happens. So a message does not wait for others that came with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from nbdist.autograd.graph.countdown import Countdown, devices_of
from nbdist.autograd.graph.edges import RECEIVE, EdgeSlot, GraphEdge, HeldBack, Node, Received, Sent, swap_part
from nbdist.autograd.graph.measuring import Gradients
from nbdist.autograd.graph.messages import Head
from nbdist.autograd.graph.walk import ACCUMULATE, Region, walk
from nbdist.autograd.passes import ddp
from nbdist.autograd.passes.claims import Claim
from nbdist.autograd.passes.engine import edge_of, run_backward
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.autograd.passes.ordering import GateQueues
from nbdist.autograd.watching.node_hooks import CallHooks
from nbdist.autograd.watching.observer import Observer
from nbdist.gpus import side_streams, spans, staging
from nbdist.gpus.spans import CUDA_IS_BUILT

_RUNS_LAST = 0  # the sequence number of barriers: torch's engine always runs the ready node with the highest number
_RUNS_FIRST = 1 << 62  # the sequence number of a gate that is to run before all other nodes
_MOST_MESSAGES_APART = 16  # if more messages are ready, they run in one step, because they are probably small
_one = torch.ones((), device="cpu")


class GateState(Enum):
    """The state of a gate in one pass; the head of this file shows how it changes."""

    UNSURE = "unsure"  # not marked, but may still be
    EXPECTED = "expected"
    ARRIVED = "arrived"
    UNUSED = "unused"


class Crossing(NamedTuple):
    """A gradient that is kept for an output of a held-back node."""

    node: Node
    output: int
    gradient: torch.Tensor


class Entry(msgspec.Struct, eq=False):
    """Graph edges with a gradient for each: the roots of a pass, or the one gradient that has arrived for a slot."""

    # Both lists are empty once the gradients are kept or have run.
    edges: list[GraphEdge]
    gradients: list[torch.Tensor | None]
    slot: EdgeSlot | None = None  # None for the roots, which only the worker has on which the pass begins


class _Step(msgspec.Struct, eq=False):
    """One call of torch's engine."""

    call: Callable[[], None]
    region: Region
    entries: Sequence[Entry]
    alone: bool = False  # for a contested step, during which no other step of the part may run


Marks = dict[Received, list[int]]  # the indices of the tensors that will get a gradient, for each received message


class Part:
    """One worker's part of one pass: gates, arrived gradients (*entries*), calls of torch's engine (*steps*).

    ``sends`` are the messages that this worker has sent in the context; their slots are the part's gates.
    ``send_back(received, indices, gradients)`` sends gradients back to the worker that sent the tensors, and
    ``send_marks(marks)`` tells workers which of their tensors will get gradients. Neither is called with a lock held.
    Several threads may call the methods at the same time. `_note_reached`, `_release`, and the methods by which
    `_next_step` chooses a step, are called with `_lock` held; those that call the engine are not.
    """

    def __init__(
        self,
        sends: Iterable[Sent],
        head: Head,
        send_back: Callable[[Received, Sequence[int], Gradients], None],
        send_marks: Callable[[Marks], None],
        observer: Observer | None = None,
    ) -> None:
        self.gradients = GradientStore()
        self.smart = head.smart
        self._head = head
        self._send_back = send_back
        self._send_marks = send_marks
        self._observer = observer
        self._due: dict[Received, list[int]] = {}  # marks that `_next_step` wants; `run` sends them without the lock
        self._lock = threading.Lock()
        self._sends: dict[int, Sent] = {}
        self.states: dict[EdgeSlot, GateState] = {}
        for sent in sends:
            self._sends[sent.message] = sent
            self.states.update(dict.fromkeys(sent.slots, GateState.UNSURE if head.smart else GateState.EXPECTED))
        self._lines = GateQueues(self.states)
        self.ready: list[Entry] = []  # that no step has taken yet
        self._running: list[_Step] = []
        # For each leaf's node: functions that return the hooks it has now.
        self._node_hooks: dict[Node, list[Callable[[], Mapping[int, Any] | None]]] = {}
        self._kept: list[Crossing] = []
        self._regions: dict[object, Region] = {}  # behind each slot or entry that has been walked
        self._holders: dict[Node, int] = {}  # the held-back nodes, each with the number of pending gates before it
        self._counted: set[EdgeSlot] = set()  # whose gates are counted in `_holders`
        # By received message: the tensors that will get a gradient, as far as is known; the gradients that have reached
        # receive nodes, and wait for others of their message; and the tensors whose gradients have been sent back.
        self._awaited: dict[Received, set[int]] = {}
        self._crossed: dict[Received, dict[int, torch.Tensor | None]] = {}
        self._gone_back: dict[Received, set[int]] = {}
        self.root_edges: list[GraphEdge] = []
        self._barriers: set[EdgeSlot] = set()
        self.reduces = False  # the pass reaches a DistributedDataParallel module on this worker; False in FAST mode
        self._may_reduce = not head.smart  # else such modules wait: for the end of the marking, and the pass's turn
        self._stopped = False

    # -- marking ------------------------------------------------------------------------------

    def mark(self, message: int, outputs: Sequence[int]) -> Marks:
        """Note that tensors ``outputs`` of a sent message will get gradients; return the marks to be sent now."""
        found: Marks = {}
        with self._lock:
            for index in outputs:
                slot = self._sends[message].slots[index]
                if self.states[slot] is GateState.UNSURE:  # else a mark has come again, or after the gradient
                    self.states[slot] = GateState.EXPECTED
                    self._note_reached(slot, found)
        return found

    def _note_reached(self, of: EdgeSlot | Entry, marks: Marks | None) -> None:
        """In SMART mode, note that all nodes behind a slot or an entry will run; add received tensors to ``marks``."""
        region = self._regions.get(of) or self._region(of)
        if ddp.living and ddp.own(region.leaves):
            self.reduces = True
        for end, reached in region.receives.items():
            awaited = self._awaited.setdefault(end, set())
            if new := reached - awaited:
                awaited |= new
                # Else the nodes run at once, and the gradients themselves tell the other workers.
                if marks is not None:
                    marks.setdefault(end, []).extend(sorted(new))

    def end_marking(self) -> None:
        """Set the gates that are still UNSURE to UNUSED, as no gradient will come for them; let DDP modules average."""
        with self._lock:
            # The gradients that waited for this run when the caller calls `run`.
            self._may_reduce = True
            for slot, state in self.states.items():
                if state is GateState.UNSURE:
                    self.states[slot] = GateState.UNUSED
                    self._release(slot)
                    self._lines.leave(slot)

    # -- arriving -----------------------------------------------------------------------------

    def begin(self, roots: Entry) -> None:
        """Make the roots of the pass, with their gradients, the first entry."""
        self.ready.append(roots)
        self.root_edges = list(roots.edges)

    def brought(self, message: int, outputs: Sequence[int], gradients: Gradients) -> Gradients:
        """Return the gradients of the tensors ``outputs`` of a sent message, each on its tensor's device."""
        # No lock is held: this waits for the copies.
        slots = self._sends[message].slots
        return [
            gradient if gradient is None else _brought(gradient, slots[index].device)
            for index, gradient in zip(outputs, gradients, strict=True)
        ]

    def arrive(self, message: int, outputs: Sequence[int], gradients: Gradients) -> None:
        """Add an entry for each gradient that has arrived for the tensors ``outputs`` of a sent message."""
        slots = self._sends[message].slots
        with self._lock:
            for index, gradient in zip(outputs, gradients, strict=True):
                slot = slots[index]
                if gradient is not None and gradient.device != slot.device:
                    gradient = gradient.to(slot.device)  # to the CPU, where the tensor was
                self.states[slot] = GateState.ARRIVED
                self._release(slot)
                entry = Entry([slot.edge], [gradient], slot)
                if (region := self._regions.pop(slot, None)) is not None:
                    self._regions[entry] = region  # slot and entry have the same graph edge
                self.ready.append(entry)

    def missing(self) -> set[int]:
        """Return the sent messages with a gate that is EXPECTED: gradients for them must still arrive."""
        with self._lock:
            return {slot.message for slot, state in self.states.items() if state is GateState.EXPECTED}

    def peers(self) -> set[int]:
        """Return the workers to which this part sends gradients, by incarnation."""
        with self._lock:
            return {end.peer for end in self._awaited}

    @property
    def unsure(self) -> bool:
        """True if gradients are left here that the end of the marking may let run."""
        left = bool(self.ready or self._kept)
        return left and (GateState.UNSURE in self.states.values() or (self.reduces and not self._may_reduce))

    def stop(self) -> None:
        """Begin no further step, because the pass has been given up. Steps that run now continue to their end."""
        self._stopped = True

    # -- running ------------------------------------------------------------------------------

    def run(self, before_step: Callable[[], None]) -> bool:
        """Call torch's engine until no node can run; return whether gradients then wait for the end of the marking.

        Any number of threads may do this at the same time. Each calls ``before_step()`` before each of its steps. The
        result is valid only if no other thread has begun a step since.

        An error of a step is raised here, after the step's entries have been dropped. Returns False after `stop`.
        """
        while not self._stopped:
            with self._lock:
                step = self._next_step()
                marks, self._due = self._due, {}
                # Under the lock under which no step was found. Later, the marking might be over, and gradients that
                # have not run would be reported as settled
                # (test_what_waits_is_not_dealt_with_because_the_marking_ends_at_that_moment).
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
                    # What has run was not marked first: its gradients must be sent before the entry counts as settled.
                    for end in step.region.receives:
                        if end in self._crossed:
                            self._return_gradients(end)
            finally:
                with self._lock:
                    self._running.remove(step)
                    for entry in step.entries:
                        if entry.slot is not None and self._lines.places:
                            self._lines.leave(entry.slot)
                        self._regions.pop(entry, None)
                        entry.gradients = []  # freed now, as the pass may last much longer
        return False

    def _next_step(self) -> _Step | None:
        """Return the next step, made of entries in `ready` and gradients in `_kept`; None if nothing can run now."""
        if not self.ready and not self._kept:
            return None
        if self._running and any(step.alone for step in self._running):
            return None
        if self._lines.places or ddp.living:
            entries = self._take_ready()
        else:
            entries, self.ready = self.ready, []
        pending = [slot for slot, state in self.states.items() if state in (GateState.UNSURE, GateState.EXPECTED)]
        if not pending and (self._may_reduce or not ddp.living):
            if self.smart:
                for entry in entries:
                    self._note_reached(entry, None)
            return self._plain_step(entries)
        if len(self._counted) < len(pending):  # every counted slot is pending: with fewer, some are missing
            self._hold_back(pending)
        held = self._held_nodes(entries) if ddp.living else self._holders.keys()
        launched: list[Entry] = []
        for entry in entries:
            free_to_run = held.isdisjoint((self._regions.get(entry) or self._region(entry)).nodes)
            if self.smart:
                # An entry that cannot run at once sends marks.
                self._note_reached(entry, None if free_to_run else self._due)
            if free_to_run or self._keep_if_held(entry, held):
                launched.append(entry)
        kept = [crossing for crossing in self._kept if crossing.node not in held] if self._kept else []
        if not launched and not kept:
            return None
        if len(launched) == 1 and not kept:
            region = self._regions.get(launched[0]) or self._region(launched[0])
        else:
            region = self._join_regions([self._region(entry) for entry in launched], kept)
        held_here = region.nodes & held
        if not held_here or self._are_plain(held_here):
            return self._plain_step(launched, held)
        free = [node for node in region.nodes if node not in held]
        if self._running or not any(type(node) is RECEIVE for node in free):
            # Wait for the running steps, which may reach the same nodes. Or, without a free receive node, no other
            # worker waits for a result: then one step later costs less than one step now and one later.
            self.ready = launched + self.ready
            return None
        self._kept = [crossing for crossing in self._kept if crossing.node in held]
        missing = [slot for slot in pending if not self._regions[slot].nodes.isdisjoint(held_here)]
        # Leaves of DistributedDataParallel modules may be held back without a gate: they get one as a barrier.
        missing += [EdgeSlot(-1, 0, node.variable) for node in held_here if node not in self._holders]
        crossings = {
            node: crossing
            for node in free
            if (crossing := [(i, to, nr) for i, (to, nr) in enumerate(node.next_functions) if to in held])
        }  # computed here, with the lock held: what arrives during the call changes which nodes are held back
        call = partial(self._contested_call, launched, kept, free, crossings, missing)
        return _Step(call, region, launched, alone=True)

    def _plain_step(self, entries: Sequence[Entry], held: Set[Node] = frozenset()) -> _Step | None:
        """Return a step for some of these entries, which all can run; None if all must wait for running steps.

        Entries that touch each other (`_touch`) run in one step. Entries that touch a running step go back to `ready`,
        like all others that are left out. ``held`` has the nodes that may not run yet.
        """
        if len(entries) == 1 and not self._kept and not self._running:  # the usual case
            region = self._regions.get(entries[0]) or self._region(entries[0])
            return _Step(partial(self._call, entries, (), region.nodes, region.leaves), region, entries)
        kept = [crossing for crossing in self._kept if crossing.node not in held]
        if not entries and not kept:
            return None
        chosen = list(entries)
        if not kept and not ddp.living and len(groups := _by_message(entries)) <= _MOST_MESSAGES_APART:
            chosen = self._first_free(groups) if len(groups) > 1 or self._running else chosen
            region = self._join_regions([self._region(entry) for entry in chosen], ())
        else:
            region = self._join_regions([self._region(entry) for entry in entries], kept)
            if any(self._touch(region, step.region) for step in self._running):
                chosen, kept = [], []
        if len(chosen) < len(entries):
            self.ready = [entry for entry in entries if entry not in chosen] + self.ready
        if not chosen and not kept:
            return None
        self._kept = [crossing for crossing in self._kept if crossing.node in held]
        return _Step(partial(self._call, chosen, kept, region.nodes, region.leaves), region, chosen)

    def _first_free(self, groups: Sequence[list[Entry]]) -> list[Entry]:
        """Return the entries of the first message that can run beside the running steps, and of messages tied to it."""
        left = [(group, self._join_regions([self._region(entry) for entry in group], ())) for group in groups]
        while left:
            chosen, region = left.pop(0)
            # Messages are tied if their entries touch, directly or by way of others.
            while touching := [one for one in left if self._touch(region, one[1])]:
                left = [one for one in left if one not in touching]
                chosen = [*chosen, *(entry for group, _ in touching for entry in group)]
                region = self._join_regions([region, *(other for _, other in touching)], ())
            if not any(self._touch(region, step.region) for step in self._running):
                return chosen
        return []

    def _take_ready(self) -> list[Entry]:
        """Take the entries out of `ready` whose gradients may go to torch's engine now; the others stay there."""
        ready = self.ready
        # An entry of an ordered gate stays until it is first in its line.
        entries = [entry for entry in ready if entry.slot is None or self._lines.has_turn(entry.slot)]
        self.ready = [entry for entry in ready if entry not in entries] if len(entries) < len(ready) else []
        # Roots that reach a DDP module stay until the pass has its turn to average. The marking has no gradient to wait
        # for, so this costs little; and the module can average while other gradients are computed, as in a local pass.
        if ddp.living and not self._may_reduce:
            for entry in list(entries):
                if entry.slot is None and ddp.own(self._region(entry).leaves):
                    self._note_reached(entry, self._due)
                    self.ready.append(entry)
                    entries.remove(entry)
        return entries

    def _held_nodes(self, entries: Sequence[Entry]) -> Set[Node]:
        """Return the nodes that may not run yet, in a process with DistributedDataParallel modules."""
        # Those behind pending gates. If one leaf of such a module is held back, so are all its leaves that are reached;
        # and those of all such modules, before the pass may average gradients.
        holders = self._holders
        held = (id(node.variable) for node in holders if type(node) is ACCUMULATE)
        blocked = ddp.blocked_by(held) if self._may_reduce else ddp.owned_by_any()
        if not blocked:
            return holders.keys()
        leaves = [leaf for entry in entries for leaf in self._region(entry).leaves]
        leaves += [leaf for crossing in self._kept for leaf in walk([(crossing.node, crossing.output)]).leaves]
        return holders.keys() | {leaf for leaf in leaves if id(leaf.variable) in blocked}

    def _keep_if_held(self, entry: Entry, held: Set[Node]) -> bool:
        """Move the gradients of an entry that go into held-back nodes to `_kept`; return whether others are left."""
        if not any(node in held for node, _ in entry.edges):
            return True
        edges, gradients = entry.edges, entry.gradients
        entry.edges, entry.gradients = [], []
        for (node, output), gradient in zip(edges, gradients, strict=True):
            if node not in held:
                entry.edges.append((node, output))
                entry.gradients.append(gradient)
            elif gradient is not None:  # without a gradient from here, the node still runs: by the pending gate
                self._kept.append(Crossing(node, output, gradient))
        self._regions.pop(entry, None)
        return bool(entry.edges)

    def _touch(self, one: Region, other: Region) -> bool:
        """Return whether entries of these two regions must run in one step, or one after the other."""
        # The gradients of one message go back together, and one thread at a time counts them (`cross`).
        if not one.receives.keys().isdisjoint(other.receives):
            return True
        return not one.nodes.isdisjoint(other.nodes) and not self._are_plain(one.nodes & other.nodes)

    def _are_plain(self, nodes: Iterable[Node]) -> bool:
        owned = ddp.owned_by_any() if ddp.living else set[int]()
        return all(type(node) is ACCUMULATE and self._is_plain(node, owned) for node in nodes)

    def _is_plain(self, node: Node, owned: Set[int]) -> bool:
        """Return whether nothing but accumulation happens at a leaf: no hooks, no DistributedDataParallel."""
        leaf = node.variable
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or id(leaf) in owned:
            return False
        hooks = self._node_hooks.get(node)
        if hooks is None:
            if any(node in step.region.nodes for step in self._running):
                return False  # `_hooks_of` changes the node, which the engine may be reading now
            hooks = self._node_hooks[node] = [_hooks_of(node.register_prehook), _hooks_of(node.register_hook)]
        return not any(known() for known in hooks)

    def _join_regions(self, regions: Sequence[Region], kept: Sequence[Crossing]) -> Region:
        """Return one region with the nodes of several regions and those behind kept gradients; changes none of them."""
        if len(regions) == 1 and not kept:
            return regions[0]
        joint = Region()
        for region in regions:
            joint.leaves += [node for node in region.leaves if node not in joint.nodes]
            joint.nodes |= region.nodes
            joint.receives.update(region.receives)
        return walk([(crossing.node, crossing.output) for crossing in kept], joint)

    # -- nodes that are held back -------------------------------------------------------------

    def _region(self, of: EdgeSlot | Entry) -> Region:
        region = self._regions.get(of)
        if region is None:
            region = self._regions[of] = walk([of.edge] if isinstance(of, EdgeSlot) else of.edges)
        return region

    def _hold_back(self, slots: Iterable[EdgeSlot]) -> None:
        # Until all gradients that a node may get are there: an early run would lose the later ones.
        holders = self._holders
        for slot in slots:
            if slot not in self._counted:
                self._counted.add(slot)
                for node in self._region(slot).nodes:
                    holders[node] = holders.get(node, 0) + 1

    def _release(self, slot: EdgeSlot) -> None:
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
        """Call torch's engine once, with entries and kept gradients as its roots; return when their nodes have run."""
        roots: list[Any] = []
        gradients: list[torch.Tensor] = []
        for entry in entries:
            for (node, output), gradient in zip(entry.edges, entry.gradients, strict=True):
                if gradient is not None:
                    roots.append(torch.autograd.graph.GradientEdge(node, output))
                    gradients.append(gradient)
                else:  # the engine takes no root without a gradient; but the gate's node may return None
                    assert entry.slot is not None  # roots have gradients
                    entry.slot.node._set_sequence_nr(_RUNS_FIRST)  # it may have been a barrier of an earlier step
                    roots.append(entry.slot.gate)
                    gradients.append(_one_for(entry.slot))
        for crossing in kept:
            roots.append(torch.autograd.graph.GradientEdge(crossing.node, crossing.output))
            gradients.append(crossing.gradient)
        if CUDA_IS_BUILT:  # other threads may have computed the kept ones
            side_streams.catch_up(gradients)
        into = None if self._head.accumulate else self.gradients
        retain_graph = self._head.retain_graph
        # Waits until no other pass uses the ``.grad`` of these leaves, and keeps others from them.
        with Claim(leaves, into, self):
            outer = swap_part(self)
            try:
                if self._observer is None:
                    run_backward(roots, gradients, retain_graph=retain_graph)
                else:
                    with CallHooks(self._observer, self, nodes, [edge_of(root)[0] for root in roots]):
                        run_backward(roots, gradients, retain_graph=retain_graph)
            finally:
                swap_part(outer)

    def _contested_call(
        self,
        entries: Sequence[Entry],
        kept: Sequence[Crossing],
        free: Sequence[Node],
        crossings: Mapping[Node, Sequence[tuple[int, Node, int]]],
        missing: Sequence[EdgeSlot],
    ) -> None:
        """Call torch's engine for the free nodes only, with the gates of ``missing`` as barriers, at which it stops."""
        self._barriers = set(missing)
        # By free node, its graph edges into held-back ones, as (index, node, output).
        handles = [type(node).register_hook(node, self._keeping_hook(crossing)) for node, crossing in crossings.items()]
        for node in free:  # no free node may have the lowest number, by which the barriers run last
            if node._sequence_nr() == _RUNS_LAST:
                node._set_sequence_nr(_RUNS_LAST + 1)
        devices = devices_of([*free, *(slot.node for slot in missing)])
        for slot in missing:
            slot.node._set_sequence_nr(_RUNS_LAST)
        barriers = Entry([(slot.node, 0) for slot in missing], [_one_for(slot) for slot in missing])
        # A barrier sees only the queue of its own device, so on several devices a chain of waits comes before the
        # barriers.
        countdown = Countdown(free) if len(devices) > 1 else None
        if countdown is not None:
            barriers = Entry([countdown.chain([slot.gate for slot in missing], _RUNS_LAST)], [_one])
        try:
            self._call([*entries, barriers], kept, free, [node for node in free if type(node) is ACCUMULATE])
        except HeldBack:
            if countdown is not None and countdown.left:
                raise RuntimeError(
                    f"{countdown.left} of {len(free)} nodes of a backward pass, which is on "
                    f"{', '.join(sorted(map(str, devices)))}, did not run: the devices have stood still for minutes. "
                    "See what they do, and repeat the step, forward pass included"
                ) from None
        finally:
            self._barriers = set()
            if countdown is not None:
                countdown.remove()
            for handle in handles:
                handle.remove()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a call that a barrier ends does not join the streams of its nodes

    def _keeping_hook(self, crossing: Sequence[tuple[int, Node, int]]) -> Callable[..., None]:
        """Return a hook that puts the gradients a free node has made for held-back nodes into `_kept`."""

        def keep(gradients: Gradients, _: Any) -> None:  # in a thread of the engine
            if CUDA_IS_BUILT:
                side_streams.publish(gradients)
            for index, node, output in crossing:
                gradient = gradients[index]
                if gradient is not None:
                    self._kept.append(Crossing(node, output, gradient))

        return keep

    def gpu(self) -> torch.device | None:
        """Return the GPU of the first gradient on a GPU that no step has taken yet; None if there is none."""
        return spans.device_of(gradient for entry in list(self.ready) for gradient in list(entry.gradients))

    # -- from the nodes -----------------------------------------------------------------------

    def enter(self, slot: EdgeSlot) -> torch.Tensor | None:
        """Return None, the gradient that has arrived for a gate; raise `HeldBack` if the gate is a barrier."""
        if slot in self._barriers:
            raise HeldBack
        return None

    def cross(self, end: Received, first: int, gradients: Gradients) -> None:
        """Take the gradients of a received message's tensors from index ``first`` on; called by the receive node."""
        if CUDA_IS_BUILT:  # another thread may send them
            side_streams.publish(gradients)
        # Without the lock: steps that run at the same time share no received message (`_touch`).
        crossed = self._crossed.setdefault(end, {})
        crossed.update(enumerate(gradients, first))
        back = self._gone_back.setdefault(end, set())
        if (
            not self.smart and not self._awaited
        ):  # in FAST mode all gates take part: one walk finds this for all messages
            self._awaited = walk([*self.root_edges, *(slot.edge for slot in self.states)]).receives
        if crossed.keys() >= self._awaited[end] - back:
            self._return_gradients(end)

    def _return_gradients(self, end: Received) -> None:
        crossed = self._crossed.pop(end)
        self._gone_back[end].update(crossed)
        if self.smart:
            outputs = sorted(crossed.keys() & self._awaited[end])  # one node may have made several tensors
            self._send_back(end, outputs, list(map(crossed.get, outputs)))
        else:
            # Zeros for None, as torch does: hooks on the other worker may expect a tensor.
            every = [
                gradient if gradient is not None else torch.zeros(shape, dtype=dtype, device=device)
                for gradient, (shape, dtype, device) in zip(
                    map(crossed.get, range(len(end.like))), end.like, strict=True
                )
            ]
            self._send_back(end, range(len(every)), every)


def _brought(gradient: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a gradient on a device, copied there if it is on another one; the copy is complete."""
    if gradient.device == device:
        return gradient
    copied = staging.to_gpu(gradient, str(device))
    return copied if copied is not None else gradient.to(device)


def _one_for(slot: EdgeSlot) -> torch.Tensor:
    return _one if slot.gate.is_cpu else torch.ones_like(slot.gate)


def _by_message(entries: Iterable[Entry]) -> list[list[Entry]]:
    groups: dict[int | None, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.slot.message if entry.slot is not None else None, []).append(entry)
    return list(groups.values())


def _hooks_of(register: Callable[[Callable[..., None]], Any]) -> Callable[[], Mapping[int, Any] | None]:
    """Return a function that returns a node's hooks as they are when it is called."""
    # torch shows them only to someone who registers a hook.
    handle = register(lambda *_: None)
    handle.remove()
    hooks: Callable[[], Mapping[int, Any] | None] = handle.hooks_dict_ref
    return hooks
