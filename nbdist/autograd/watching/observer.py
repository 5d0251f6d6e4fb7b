"""Observes one worker's part of a watched pass, reports it to the watcher, and halts the pass where the watcher wants.

::

    come_to(node)                                                  ran(node)
        |   halts?  -- no --------------------------> running ...... done
        |      `-- yes --> halted -- steer, leave -->                 |
        |                     `----- stop --> Stopped                 `-- NaN or Inf --> nan

The words ``halted``, ``running``, ``done`` and ``nan`` are happenings, which are noted and sent to the watcher. So is
``timed``, which tells how long a GPU has run a node; it comes later, as the GPU lags behind the processor. While a
watch runs until a NaN, ``nan`` also comes before ``running``, for a node that is given one; it halts there.

In the engine, hooks on the nodes call these methods (`nbdist.autograd.watching.node_hooks`). A halt is a thread of the
engine that waits in such a hook. So the pass itself stands still: a change that the user makes meanwhile, such as a
hook on a node still to run or another value of a gradient, takes effect.

For a step of a pipeline, `nbdist.nn.watched` calls `come_to`, `ran` and `made` instead of the hooks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import msgspec
import torch

from nbdist.autograd.graph.edges import Node
from nbdist.autograd.graph.inherited import Inherited
from nbdist.autograd.graph.measuring import Gradients, Norms, are_finite, histograms, measure
from nbdist.autograd.graph.messages import Control, Happening, Watching
from nbdist.autograd.graph.numbers import NodeNumbers
from nbdist.autograd.graph.saved import Saved
from nbdist.errors import NbdistError
from nbdist.gpus import spans
from nbdist.gpus.spans import GpuSpan
from nbdist.rpc.references.peeking import Histogram
from nbdist.rpc.waits import blocking_wait

_CLOCK_OFFSET = time.time() - time.monotonic()  # makes the monotonic clock a time of day, which does not jump
_BATCH_SIZE = 1000  # happenings at which a batch is sent
_BATCH_SECONDS = 0.05  # since the last batch, after which the next happening is sent at once, with all kept back

Explain = Callable[[], Inherited | None]  # returns where a NaN or Inf comes from, if it is from the forward pass


class Stopped(NbdistError):
    """The pass was given up while it was halted."""


class _Measured(msgspec.Struct):
    """A happening at a node whose gradients were measured. The histogram is made when it is sent, of many at once."""

    time: float
    what: str
    node: int | None
    name: str
    norm: float | None
    sample: torch.Tensor | None
    halt: int = -1
    version: int = -1

    def happening(self, histograms: Iterator[Histogram | None]) -> Happening:
        """Return the happening; the histogram is the next one, if this has a sample."""
        drawn = next(histograms, None) if self.sample is not None else None
        known = self.time, self.what, self.node, self.name
        return Happening(*known, norm=self.norm, histogram=drawn, halt=self.halt, version=self.version)


class Observer:
    """The observer of one pass, or of one step of a pipeline, on one worker.

    The threads that run the pass call `come_to`, `ran` and `note`. Any thread may call `steer`, `leave` and `stop`,
    which wake a halted thread; most often the thread that reads messages does.
    """

    def __init__(
        self,
        worker: str,
        numbers: NodeNumbers,
        watching: Watching,
        send: Callable[[int, list[Happening], int], None],
        explain: Callable[[Node, Sequence[Saved]], Inherited | None] = lambda node, saved: None,
        *,
        standing_still: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Set what to observe and how to tell the watcher; ``watching`` names the watch and carries its first control.

        ``send(number, happenings, version)`` sends a batch to the watcher; ``version`` is the version of the control
        under which it was made. ``explain(node, saved)`` returns where a NaN that the node has made comes from, if it
        comes from the forward pass; ``saved`` are the values that the node had saved before it ran. Each halt is a
        block of ``standing_still()``.
        """
        self._standing_still = standing_still
        self.is_local = False  # whether torch's own ``backward()`` is observed
        self.whose = (watching.watcher, watching.watch)  # the incarnation of the watcher, and the number of the watch
        self.sent = 0  # batches; the root tells it to the watcher, which awaits that many
        self._worker = worker
        self.numbers = numbers
        self._norms = watching.norms
        self._known = Norms()
        self._control = watching.control
        self._send = send
        self.explain = explain
        # ``run(until="nan")`` was ended by a pause, as when another worker found a NaN: nodes may run that began in it.
        self._looked = False
        self._found = False  # a NaN or Inf has been noted; a pass that does not halt for it notes the first one only
        # The happenings that are not sent yet. Any thread may append; `_sending` is held to take something out.
        self._seen: deque[Happening | _Measured] = deque()
        self._sent_at = _now()
        self._sending = threading.Lock()
        # The nodes that have run and whose time on the GPU is not known yet: when, number, name, and the span.
        self._on_gpu: deque[tuple[float, int, str, GpuSpan]] = deque()
        self._promised = 0  # batches that `finish` has counted, not sent yet as the GPU still runs nodes
        self._waiting_for = set[int]()
        self._halts = 0  # so far, which is also the number of the last one
        self._over = 0  # the number up to which the watcher has ended halts
        self._stopped = False
        self._changed = threading.Condition(threading.Lock())
        self._halting = threading.Lock()  # so that the engine threads of several devices halt one after the other

    # -- reports to the watcher ---------------------------------------------------------------

    def note(self, what: str, **known: Any) -> None:
        """Note an event for the watcher: ``what`` is as in `Event.what`, ``known`` has more fields of a `Happening`."""
        self._add(Happening(_now(), what, **known))

    def _add(self, happening: Happening | _Measured) -> None:
        # Without a lock, as this is called twice for each node of a pass.
        self._seen.append(happening)
        if len(self._seen) >= _BATCH_SIZE or happening.time - self._sent_at >= _BATCH_SECONDS:
            self.flush()

    def waits_for(self, messages: set[int]) -> None:
        """Note that nothing more can run here until the gradients of these messages, sent from here, have arrived."""
        for message in messages - self._waiting_for:
            self.note("waiting", message=message)
        self._waiting_for = messages
        self.note("resting")

    def flush(self) -> None:
        """Send the happenings that `note` has kept back to the watcher, as one batch, if there are any."""
        with self._sending:
            if self._on_gpu and not self._promised:  # else a batch is promised for their times
                self._note_gpu_times()
            if not self._seen:
                return
            number, seen = self._take_batch()
        self._send(number, seen, self._control.version)

    def finish(self) -> int:
        """Send all that is noted; return how many batches the watcher must await before the pass is complete."""
        self.flush()
        with self._sending:
            # One batch more, if the GPU still runs nodes: another thread waits for it, and sends their times. The
            # number counts it already.
            lasting = [span for _, _, _, span in self._on_gpu]
            self._promised += bool(lasting)
            awaited = self.sent + self._promised
        if lasting:
            spans.when_over(lasting, self._send_promised)
        return awaited

    def _send_promised(self) -> None:
        with self._sending:
            self._note_gpu_times()
            self._promised -= 1
            number, seen = self._take_batch()
        self._send(number, seen, self._control.version)

    def _take_batch(self) -> tuple[int, list[Happening]]:
        self.sent += 1
        self._sent_at = _now()
        return self.sent, _complete([self._seen.popleft() for _ in range(len(self._seen))])

    def _note_gpu_times(self) -> None:
        """Note the times of the nodes that the GPU has run, up to the first that it still runs; waits for nothing."""
        while self._on_gpu and self._on_gpu[0][3].is_over():
            ended, number, name, span = self._on_gpu.popleft()
            if (seconds := span.seconds) is not None:
                self._seen.append(Happening(ended, "timed", number, name, seconds=seconds))

    # -- orders of the watcher ----------------------------------------------------------------

    def steer(self, control: Control | None, over: int) -> None:
        """Take the watcher's newer order on where to halt, if one is given, and end the halts up to number ``over``."""
        with self._changed:
            if control is not None and control.version > self._control.version:  # else a newer one has overtaken it
                self._replace(control)
            self._over = max(self._over, over)
            self._changed.notify_all()

    def leave(self) -> None:
        """Halt no more, because the watch is closed or the watcher is gone: the pass runs on to its end."""
        with self._changed:
            self._control = Control(self._control.version + 1)
            self._changed.notify_all()

    def stop(self) -> None:
        """Make a halted thread, and each that is about to halt later, raise `Stopped`: the pass has been given up."""
        if self.is_local:  # it outlives its context
            return self.leave()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # -- in the engine ------------------------------------------------------------------------

    def come_to(self, number: int, name: str, gradients: Gradients, *, sends: bool) -> None:
        """Halt before a node if the watcher says so, and then note that the node runs.

        ``gradients`` are measured if the watcher wants norms or looks for a NaN. ``sends`` is True for a node that
        sends gradients to another worker. Raises Stopped if the pass was given up during the halt.
        """
        control = self._control
        if not (self._norms or control.paused or control.until):
            self._add(Happening(_now(), "running", number, name))
            return
        measured: tuple[float | None, torch.Tensor | None] = None, None
        if gradients and (self._norms or control.until == "nan"):
            with suppress(Exception):  # a kind of tensor that cannot be measured must not fail the pass
                measured = measure(gradients, self._known)
        self._check(number, name, gradients)
        # `_check` may have found a NaN, so the control is read again.
        if self._halts_before(self._control, number, sends=sends):
            self._halt(number, name, measured, sends=sends)
        self._add(_Measured(_now(), "running", number, name, *measured))

    @property
    def is_paused(self) -> bool:
        """True if the pass halts before every node."""
        return self._control.paused

    def come_to_collective(self, name: str) -> None:
        """Halt before a collective, in words, if the pass halts before every node."""
        if self.is_paused:
            self._halt(None, name, (None, None), sends=False)
            self.note("issued", name=name)
            self.flush()

    def _halts_before(self, control: Control, number: int | None, *, sends: bool) -> bool:
        return (
            control.paused
            or (control.until == "message" and sends)
            or (control.until == "node" and (control.worker, control.node) == (self._worker, number))
        )

    def ran(
        self,
        number: int,
        name: str,
        seconds: float,
        new: Gradients,
        given: Gradients = (),
        explain: Explain = lambda: None,
        span: GpuSpan | None = None,
    ) -> None:
        """Note that a node has run for that many seconds, and has made the gradients ``new`` from those ``given``.

        ``span`` is the node's time on a GPU, which is noted once the GPU has run the node. ``explain()`` is called if
        the node is the first that made a NaN or Inf, and one is looked for (`looks`).
        """
        now = _now()
        if span is not None:
            self._on_gpu.append((now, number, name, span))
        self._add(Happening(now, "done", number, name, seconds=seconds))
        if self.looks and not (self._norms and self._known.note(new)):
            self._check(number, name, new, given, explain)
        if self.is_paused:  # a user who steps waits for this
            self.flush()

    def made(self, number: int, name: str, new: Gradients, given: Gradients) -> None:
        """Note a NaN or Inf that an operation of a pipeline has made, if one is looked for; send it at once."""
        if not are_finite(new) and are_finite(given):  # else the operation was given it
            self._check(number, name, new, given, lambda: None)
            self.flush()

    @property
    def looks(self) -> bool:
        """True if a NaN or Inf is looked for: always in ``run(until="nan")``, with norms until the first is found."""
        return self._control.until == "nan" or self._looked or (self._norms and not self._found)

    def _check(
        self, number: int, name: str, gradients: Gradients, given: Gradients = (), explain: Explain | None = None
    ) -> None:
        """Look for a NaN or Inf among the gradients that a node is given (``explain`` is None) or has made."""
        # In ``run(until="nan")``, note it and halt before the next node, which is this node if it was given one.
        # Otherwise note only the first one on this worker, and only for the node that made it.
        control = self._control
        halts = control.until == "nan"
        if not (halts or (explain is not None and self.looks)) or are_finite(gradients):
            return
        if not are_finite(given):
            explain = None
        if not halts and explain is None:
            return  # noted at the node that made it
        self._found = True
        found = None
        if explain is not None:
            with suppress(Exception):  # an error in the search must not fail the pass
                found = explain()
        self.note("nan", node=number, name=name, version=control.version if halts else -1, inherited=found)
        if halts:
            self._pause(control)

    def _pause(self, control: Control) -> None:
        """Halt before every node from now on, until the watcher sends a newer control."""
        with self._changed:
            if self._control is control:  # else a newer one has arrived
                self._replace(control._replace(paused=True, until=""))

    def _replace(self, control: Control) -> None:
        self._looked = control.paused and (self._looked or self._control.until == "nan")
        self._control = control

    def _halt(
        self, number: int | None, name: str, measured: tuple[float | None, torch.Tensor | None], *, sends: bool
    ) -> None:
        """Wait before a node or collective until the watcher ends the halt, or a newer control does not halt here."""
        with self._halting:
            self._halts += 1
            announced = -1
            while self._halts_before(control := self._control, number, sends=sends) and self._over < self._halts:
                # Again under every newer control: if the watcher has resumed and paused again while the first
                # announcement was on its way, it has ignored that one
                # (test_it_is_told_again_where_letting_go_was_overtaken_by_halting).
                if announced != control.version:
                    halt = self._halts, control.version
                    self._add(_Measured(_now(), "halted", number, name, *measured, *halt))
                    self.flush()
                    announced = control.version
                    self._pause(control)
                with blocking_wait(), self._standing_still(), self._changed:
                    while self._control.version == control.version and self._over < self._halts and not self._stopped:
                        self._changed.wait()
                if self._stopped:
                    raise Stopped("the backward pass was given up while it was paused")


def _complete(seen: Sequence[Happening | _Measured]) -> list[Happening]:
    """Return the happenings, those with a sample with its histogram."""
    drawn: Iterator[Histogram | None] = iter(())
    with suppress(Exception):  # as for norms: it must not fail the pass
        measured = [each.sample for each in seen if isinstance(each, _Measured)]
        drawn = iter(histograms([sample for sample in measured if sample is not None]))
    return [each if isinstance(each, Happening) else each.happening(drawn) for each in seen]


def _now() -> float:
    return _CLOCK_OFFSET + time.monotonic()
