"""Watches the backward passes of a context from one worker: shows the work of all workers, pauses and steps the passes.

::

    Watch, on the watcher                       Observer, on each worker that runs the pass
      pause() run() step()   --- Steer, Go --->   changes its Control, or ends a halt
      on_observed            <--- Observed ----   what happened there, in batches
      on_over                <--- Over --------   from the root: the pass is over

A `Control` says how passes run; the watch sends a new version of it to all workers that run one of its passes:

=============== =========================================================================
paused          halt before every node
until "nan"     halt where the first NaN or Inf comes up
until "message" halt before the next node that sends gradients to another worker
until "node"    halt before one node of one worker
none of these   run
=============== =========================================================================

A worker numbers its halts 1, 2, … in each pass. `Share.halt` is the number of its last halt, `Share.at` the event of
that halt while it lasts, and `Share.gone` the number up to which halts are ended by `run` or `step`. So an order to
continue does not end a halt that begins while the order is on its way.

The pass itself is paused, not a record of it. Workers send events without being asked, and record nothing as long as
there is no watch.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from nbdist.autograd.graph import messages
from nbdist.autograd.graph.events import Event, Key, Pass, Share
from nbdist.autograd.graph.messages import Control, Happening, PassId, Watching
from nbdist.autograd.graph.traces import Plan
from nbdist.autograd.graph.transport import Transport
from nbdist.errors import UsageError
from nbdist.rpc.waits import blocking_wait

LOCAL = "local"
"""The mode of a pass whose shares are torch's own ``backward()`` on each worker, which may wait for each other."""
_WAITS_INSIDE_AFTER = 1.0  # seconds without news after which a worker of a local pass is taken to wait for the others

_ids = itertools.count(1)
_log = logging.getLogger("nbdist.autograd")

Until = Literal["nan", "message"] | Key | None
"""Where `Watch.run` halts: at a NaN or Inf, at a message, or before a node, given by its worker and number."""


class Watch:
    """A view of the backward passes of one context, which can pause and step them; `nbdist.autograd.watch` makes one.

    A watch sees the passes that begin after it, on whichever worker they begin, until `close` or the context's end. As
    a context manager it closes itself. `pause`, `run` and `step` raise UsageError on a closed watch. Any thread may
    call the methods.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.exp, args=(x,)).sum()
        ...     with dist_autograd.watch(context_id, paused=True) as watch:
        ...         handle = dist_autograd.backward_async(context_id, loss)
        ...         [first] = watch.step()
        ...         watch.run()
        ...         handle.wait()
        >>> first.what, first.worker
        ('done', 'worker0')
    """

    def __init__(
        self,
        transport: Transport,
        context: int,
        *,
        paused: bool,
        norms: bool,
        ended: Callable[[Watch], None],
        freeze: Callable[[int, bool], None],
    ) -> None:
        self.id = next(_ids)
        self.context_id = context
        self._transport = transport
        self._norms = norms
        self._ended = ended
        self._freeze = freeze
        self._control = Control(1, paused)
        self._passes: dict[PassId, Pass] = {}
        self._reached: Event | None = None  # the event at which the passes halted that `run` was waiting for
        self._lost = set[int]()
        self._frozen = False
        self.closed = False
        """True if the watch has ended, by `close` or with its context."""
        self._changed = threading.Condition(threading.RLock())
        self.on_plan: Callable[[Callable[[], Plan]], None] | None = None
        """Called before a pass, or a step of a pipeline, begins on this worker, by the thread that begins it.

        The argument is a function that makes the plan."""
        self.on_news: Callable[[], None] | None = None
        """Called after something was seen, by any thread; it must not block."""
        self.view: Any = None
        """The view that draws this watch, if any."""
        # The workers that have seemed to wait in a node for others since the last step of a local pass.
        self.inside = set[str]()

    # -- looking ------------------------------------------------------------------------------

    @property
    def watching(self) -> Watching:
        """A record of this watch and its `Control`, for the messages of new passes; on a closed watch, the last one."""
        return Watching(self._transport.me, self.id, self._norms, self._control)

    @property
    def passes(self) -> list[Pass]:
        """The passes, oldest first.

        Waits until all events of finished passes have arrived, unless the watch is closed; Ctrl-C ends the wait. A pass
        under way has the events that are known now. Raises no error of a pass: `Pass.error` has it. The list is new,
        its passes grow.
        """
        with blocking_wait(), self._changed:
            while any(seen.over and not seen.complete for seen in self._passes.values()) and not self.closed:
                self._changed.wait()
            for seen in self._passes.values():
                seen.events.sort(key=lambda event: event.time)
            return list(self._passes.values())

    @property
    def complete(self) -> bool:
        """True if every pass is over and all its events have arrived (see `Pass.complete`); True without passes."""
        with self._changed:
            return all(seen.complete for seen in self._passes.values())

    @property
    def halted(self) -> list[Event]:
        """The events at which passes are halted now; the one that has waited longest is first.

        Empty if none is halted, such as right after `pause`, and on a closed watch.
        """
        with self._changed:
            return [event for event, _, _ in self._halts()]

    def __repr__(self) -> str:
        how = "closed" if self.closed else "paused" if self._control.paused else "open"
        lines = [f"<Watch of context {self.context_id}, {how}>"]
        with self._changed:
            lines += [f"  {seen!r}" for seen in self._passes.values()]
        lines += [
            f"  {event.worker} is halted before {event.name}{f' (node {event.node})' if event.key else ''}"
            for event in self.halted
        ]
        return "\n".join(lines)

    def seen(self, id: PassId) -> tuple[Pass | None, list[Event], list[Event]]:
        """Return the pass ``id``, its events, and those at which it is halted, as known now, without waiting for news.

        The pass is None if nothing has been heard of it.
        """
        with self._changed:
            known = self._passes.get(id)
            if known is None:
                return None, [], []
            return known, list(known.events), [each.at for each in known.shares.values() if each.at is not None]

    @property
    def paused(self) -> bool:
        """True if workers are told to halt before every node; False once `close` has resumed them."""
        return self._control.paused

    @property
    def latest(self) -> PassId | None:
        """The id of the newest pass: the one whose first message came last. None if there is no pass."""
        with self._changed:
            return next(reversed(self._passes), None)

    def _open_passes(self) -> list[Pass]:
        return [seen for seen in self._passes.values() if not seen.over]

    def _halts(self) -> list[tuple[Event, PassId, int]]:
        """Return the halts that last, oldest first, each with its pass and its worker; the lock is held."""
        found = [
            (share.at, id, worker)
            for id, seen in self._passes.items()
            for worker, share in seen.shares.items()
            if not seen.over and share.at is not None
        ]
        return sorted(found, key=lambda halt: halt[0].time)

    # -- acting -------------------------------------------------------------------------------

    def pause(self) -> None:
        """Halt every worker before its next node; this returns at once, before the workers have halted.

        Passes that begin later halt before their first node. While a pass is paused, no RPC of any worker times out. A
        second call changes nothing.

        Raises:
            UsageError: The watch is closed.
        """
        self._steer(paused=True)

    def run(self, until: Until = None) -> Event | None:
        """Resume the passes, and with ``until`` wait until they halt again.

        Args:
            until: None resumes and returns at once. ``"nan"`` runs to the first NaN or Inf, ``"message"`` to the next
                node that sends gradients to another worker, and a node such as ``("worker1", 5)``, by the numbers of
                the context's `trace`, to just before that node.

        Returns:
            The ``nan`` or ``halted`` event of the worker that reached the place; all other workers then halt too. None
            if all passes end before one reaches the place, if none is under way (later passes halt there all the same),
            or if the watch is closed meanwhile. For a NaN, ``Event.told`` says in a sentence, and ``Event.inherited``
            as data, whether the forward pass gave it to the node, and which message brought it. Whether a node exists
            is not checked: passes run to their end if it does not. Ctrl-C ends the wait, and the place stays set.

        Raises:
            UsageError: The watch is closed, or ``until`` is none of these.
        """
        if until is None:
            self._steer()
            return None
        how: str
        match until:
            case "nan" | "message":
                how, worker, node = until, "", -1
            case (str(worker), int(node)) if isinstance(until, tuple):
                how = "node"
            case _:
                raise UsageError(f'until must be "nan", "message", or a node such as ("worker1", 5), not {until!r}')
        with blocking_wait(), self._changed:
            self._reached = None
            self._steer(until=how, worker=worker, node=node)
            self._changed.wait_for(lambda: self._reached is not None or self.closed or self.complete)
            return self._reached

    def step(self, count: int = 1, worker: str | None = None) -> list[Event]:
        """Run nodes one after the other, and return their events.

        The node that has been halted longest runs next; of a local pass, one on each worker that is halted, since a
        node may wait for those of other workers. A watch that is not paused is paused first, also for a ``count`` of 0.
        Ctrl-C ends the wait; the passes stay paused.

        Args:
            count: The number of nodes to run.
            worker: The name of the only worker to step; None means any.

        Returns:
            One ``done`` event for each node that ran; of a local pass, also a ``halted`` event for each collective to
            which a node has come, and an ``issued`` event for each that went on. There are fewer if the passes end
            before, if the worker can run nothing until other workers have sent it gradients or have come to its
            collective, or if the watch is closed meanwhile; none if no pass is under way, or no worker has that name.
            An error of a node is no error here: it ends the pass.

        Raises:
            UsageError: The watch is closed.
        """
        if not self._control.paused:
            self.pause()
        ran: list[Event] = []
        steps = 0
        with blocking_wait(), self._changed:
            while steps < count:
                halts = [(id, on) for event, id, on in self._halts() if worker in (None, event.worker)]
                if halts and self._passes[halts[0][0]].mode == LOCAL:
                    ran += self._let_all_go(halts[0][0], worker)
                    steps += 1
                elif halts:
                    found = self._let_go(*halts[0])
                    ran += found
                    steps += len(found)
                elif self.closed or not self._may_go_on(worker):
                    break
                elif not self._changed.wait(_WAITS_INSIDE_AFTER) and worker is not None and self._holds_in_local_pass():
                    self.inside.add(worker)
                    break
        return ran

    def _holds_in_local_pass(self) -> bool:
        return any(self._passes[id].mode == LOCAL for _, id, _ in self._halts())

    def _may_go_on(self, name: str | None) -> bool:
        """Return whether `step` should wait, as a pass may still halt, on that worker if named. The lock is held."""
        for seen in self._open_passes():
            # A worker that waits for gradients does not count: it can run nothing until others have run.
            known = [worker for number, worker in seen.shares.items() if self._transport.name_of(number) == name]
            if seen.mode == LOCAL and name is not None and not any(each.resting and each.done for each in known):
                return True  # its share has not ended, or may begin yet
            if name is None or not all(worker.resting for worker in known) or (seen.root == name and not known):
                return True
        return False

    def _let_go(self, id: PassId, number: int) -> list[Event]:
        """End the halt of a pass on the worker of incarnation ``number``; list its ``done`` event once it has run."""
        seen = self._passes[id]
        worker = seen.shares[number]
        halt, node = worker.halt, worker.at.node if worker.at is not None else None
        worker.gone, worker.at = halt, None
        known = len(worker.done)
        self._transport.tell(number, messages.Go(id, self.context_id, halt))
        while True:
            if found := [event for event in worker.done[known:] if event.node == node]:
                return found[:1]
            if self.closed or (seen.over and seen.complete):
                return []
            self._changed.wait()  # which releases the lock meanwhile

    def _let_all_go(self, id: PassId, name: str | None) -> list[Event]:
        """Let each worker of a local pass, or the one of that name, run one node; return the events as `step` does."""
        seen = self._passes[id]
        gone: dict[int, tuple[int | None, int]] = {}  # by worker: its node, and how many it had run before
        is_news = True
        self.inside.clear()
        while True:
            alive = {on: each for on, each in seen.shares.items() if on in gone or not (each.resting and each.done)}
            shares = {on: each for on, each in alive.items() if name in (None, self._transport.name_of(on))}
            halted = {on: share.at for on, share in shares.items() if share.at is not None and on not in gone}
            go = [on for on, at in halted.items() if at.node is not None]
            # To collectives those that have begun go together, when all are at one, or the rest seem to wait in nodes.
            if not (go or gone) and (len(halted) == len(shares) or not is_news):
                go = list(halted)
            for number in go:
                share = shares[number]
                gone[number] = halted[number].node, len(share.done)
                share.gone, share.at = share.halt, None
                self._transport.tell(number, messages.Go(id, self.context_id, share.halt))
            ran: dict[int, Event] = {}
            for on, (node, before) in gone.items():
                # A node has run, or has come to a collective that it calls.
                news = (each for each in (*shares[on].done[before:], shares[on].at) if each is not None)
                ran |= next(({on: each} for each in news if each.node in (node, None)), {})
            inside = [on for on, share in shares.items() if on not in ran and (on in gone or share.at is None)]
            over = self.closed or (seen.over and seen.complete)
            # Not for ever: the nodes that have not ended may wait, inside, for those of other workers.
            others_stand = len(inside) < len(alive)
            if over or not shares or (gone and not inside) or (others_stand and not is_news):
                self.inside.update(map(self._transport.name_of, inside))
                return list(ran.values())
            is_news = self._changed.wait(_WAITS_INSIDE_AFTER)

    def _steer(self, *, paused: bool = False, until: str = "", worker: str = "", node: int = -1) -> None:
        """Send a new `Control` to all workers of its passes; unless ``paused``, end all halts that are known."""
        with self._changed:
            if self.closed:
                raise UsageError(
                    f"the watch of context {self.context_id} has ended: its context ended, or close() was called. Call "
                    "watch() in an open context for a new one"
                )
            self._control = Control(self._control.version + 1, paused, until, worker, node)
            if not paused:
                # Every halt that is known ends, even one at the node to which this run is to go.
                for seen in self._passes.values():
                    for each in seen.shares.values():
                        each.gone, each.at = each.halt, None
            for number in {number for seen in self._passes.values() for number in seen.shares}:
                self._send_control(number)
            self._stop_clocks()

    def _send_control(self, number: int) -> None:
        """Send a worker the control and the number of its last ended halt in every pass; the lock is held."""
        over = [(id, seen.shares[number].gone) for id, seen in self._passes.items() if number in seen.shares]
        self._transport.tell(number, messages.Steer(self.context_id, self.id, self._control, over))

    def _stop_clocks(self) -> None:
        """Stop the timeouts of all calls while a pass is paused, and start them again after; the lock is held."""
        frozen = not self.closed and self._control.paused and bool(self._open_passes())
        if frozen != self._frozen:
            self._frozen = frozen
            self._freeze(self.context_id, frozen)

    def close(self) -> None:
        """Resume the passes and stop watching; the recorded events stay. A second call does nothing.

        Every context closes its watch when it ends, also by the end of RPC. Calls that wait in `run` or `step` return.
        """
        with self._changed:
            if self.closed:
                return
            if self._control.paused or self._control.until:
                self._steer()
            self.closed = True
            self._stop_clocks()
            self._changed.notify_all()
        self._ended(self)
        self._tell_news()
        self.on_plan = None
        if self.complete:
            self.on_news = None  # else more events are on their way, which the view shows

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- messages that arrive -----------------------------------------------------------------

    def prepare(self, make_plan: Callable[[], Plan]) -> None:
        """Show a pass, or a step of a pipeline, that is about to begin on this worker: call `on_plan`.

        The pass or step calls this. An error of `on_plan`, or of ``make_plan``, is logged. Without `on_plan`, as after
        `close`, this does nothing.
        """
        if self.on_plan is not None:
            try:
                self.on_plan(make_plan)
            except Exception:  # of the view, whatever it is: an error in a drawing must not fail the user's pass
                _log.exception("drawing a backward pass, or a step of a pipeline, failed; it begins all the same")

    def begin(self, id: PassId, mode: str) -> None:
        """Record that the pass ``id``, or a step of a pipeline, begins on this worker in the mode ``mode``.

        The pass calls this. A second call is for a worker that takes part later: a pass that was over is not any more.
        """
        with self._news():
            self._record_of(id, mode).over = False

    def on_observed(self, message: messages.Observed, sender: int) -> None:
        """Handle ``message``, a batch of events of the worker ``sender``; on a closed watch, too.

        The thread that reads messages calls this. A batch that comes before earlier ones is kept until they arrive.
        """
        with self._news():
            seen = self._record_of(message.id, "smart" if message.smart else "fast")
            worker = seen.shares.setdefault(sender, Share())
            name = self._transport.name_of(sender)
            worker.overtaken[message.number] = message
            # A batch that overtakes earlier ones waits for them.
            while (following := worker.overtaken.pop(worker.taken + 1, None)) is not None:
                worker.taken += 1
                worker.version = following.version
                for happening in following.happenings:
                    self._enter_event(seen, worker, name, happening)
            if self._reached is not None and self._control.until:
                self._steer(paused=True)  # a worker is where `run` halts: halt the others too
            elif worker.version < self._control.version:  # it acted before it got the present one
                self._send_control(sender)

    def on_over(self, message: messages.Over) -> None:
        """Record by ``message`` that a pass has ended, and how many batches each worker has sent of it.

        Wakes the calls that wait in `run`, `step` and `passes`. A second message for the pass replaces the first.
        """
        with self._news():
            seen = self._record_of(message.id, "")
            seen.over, seen.error = True, message.error
            seen.told = {worker: n for worker, n in message.observed.items() if worker not in self._lost}

    def on_lost(self, worker: int) -> None:
        """Record that ``worker`` is gone: passes that began there are over, and the watch expects no more from it.

        Wakes the calls that wait in `run`, `step` and `passes`. An unknown worker, or a second call, changes nothing.
        """
        with self._news():
            self._lost.add(worker)
            for id, seen in self._passes.items():
                if id.root == worker and not seen.over:  # only the root would have sent Over
                    seen.over, seen.told = True, {}
                    seen.error = f"WorkerLost: {seen.root}, where the pass began, is gone"
                seen.told.pop(worker, None)
                if worker in seen.shares:
                    seen.shares[worker].at = None

    @contextmanager
    def _news(self) -> Iterator[None]:
        """Hold the lock in the block; then set the timeouts of calls, wake those that wait, and tell the view."""
        with self._changed:
            yield
            self._stop_clocks()
            self._changed.notify_all()
        self._tell_news()

    def _tell_news(self) -> None:
        """Call `on_news`, without the lock."""
        then = self.on_news
        if then is not None:
            then()

    def _record_of(self, id: PassId, mode: str) -> Pass:
        """Return the record of a pass, made now if it is new, with its mode if that was unknown; the lock is held."""
        seen = self._passes.get(id)
        if seen is None:
            seen = self._passes[id] = Pass(self._transport.name_of(id.root), id.number, mode)
        seen.mode = seen.mode or mode
        return seen

    def _enter_event(self, seen: Pass, worker: Share, name: str, happening: Happening) -> None:
        """Add one happening to the pass's events, and update where the worker is halted; the lock is held."""
        time, *known, _, _ = msgspec.structs.astuple(happening)  # without `halt` and `version`
        event = Event(time, name, *known)
        self.inside.discard(name)
        if event.what == "resting":  # the worker can run nothing until gradients arrive; no event for the user
            worker.resting = True
            return
        if event.what in ("arrived", "running") or (event.what == "began" and name == seen.root):
            worker.resting = False
        if worker.at is not None and event.what == "running" and event.node == worker.at.node:
            worker.at = None
        now = happening.version == self._control.version
        reached = self._reached is None and bool(self._control.until) and now
        if event.what == "halted" and worker.at is not None and happening.halt == worker.halt and not reached:
            return  # announced before
        if event.what == "halted" and happening.halt > worker.gone and (now or self._control.paused):
            worker.halt, worker.at = happening.halt, event  # else an order to continue is on its way
        if reached:  # the halt or NaN that `run` waits for
            self._reached = event
        seen.events.append(event)
        if event.what in ("done", "issued"):
            worker.done.append(event)
