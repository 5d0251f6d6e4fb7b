"""Sees what one worker does of a pass that is watched, and halts it where the watcher wants that.

It hooks itself to the nodes that a call of the engine is going to run, and is gone after the call. A halt is the
engine's own thread that waits in such a hook: what is halted is the pass itself, so what the user changes meanwhile
(a hook on what is still to come, a gradient's value) counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from nbdist.autograd.edges import RECEIVE, Node, current_part
from nbdist.autograd.inherited import Inherited
from nbdist.autograd.leaves import halted
from nbdist.autograd.measuring import is_finite, measure
from nbdist.autograd.messages import Control, Happening, Watching
from nbdist.autograd.saved import Saved, saved_by
from nbdist.errors import NbdistError
from nbdist.rpc.futures import blocking_wait

if TYPE_CHECKING:
    from nbdist.autograd.contexts import Numbers

__all__ = ["Observer", "Stopped", "are_finite"]

_START = time.time() - time.monotonic()
"""Added to the monotonic clock: the time of day, which does not jump while this process runs."""
_AT_ONCE = 200
_AT_LATEST = 0.05
"""Seconds after which what is seen next is sent, and what was kept back with it."""

Gradients = Sequence[torch.Tensor | None]


class Stopped(NbdistError):
    """The pass was given up while it was halted."""


class Observer:
    """What is seen of one pass on one worker."""

    def __init__(
        self,
        worker: str,
        numbers: Numbers,
        watching: Watching,
        send: Callable[[int, list[Happening], int], None],
        explain: Callable[[Node, Sequence[Saved]], Inherited | None] = lambda node, saved: None,
        *,
        in_engine: bool = True,
    ) -> None:
        """``send(number, what happened, version of the control)`` tells the watcher.

        ``explain(node, what it had saved)`` returns where a NaN comes from that the node has made, if from the forward
        pass.

        With ``in_engine`` torch's engine runs the nodes, and while it halts, others are kept from the same leaves.
        """
        self._standing_still = halted if in_engine else nullcontext
        self.whose = (watching.watcher, watching.watch)
        self.sent = 0
        self._worker = worker
        self._numbers = numbers
        self._norms = watching.norms
        self._control = watching.control
        self._send = send
        self._explain = explain
        self._found = False
        """Whether a NaN or Inf has been found in a pass that is not to halt for it."""
        self._seen: list[Happening] = []
        self._sent_at = time.monotonic()
        self._sending = threading.Lock()
        self._waiting_for = set[int]()
        self._halts = 0
        self._over = 0
        self._stopped = False
        self._changed = threading.Condition(threading.Lock())
        self._halting = threading.Lock()
        """The threads of several devices halt one after the other."""

    # -- telling ------------------------------------------------------------------------------

    def note(self, what: str, **known: Any) -> None:
        """Something happened."""
        with self._sending:
            self._seen.append(Happening(_START + time.monotonic(), what, **known))
            soon = len(self._seen) < _AT_ONCE and time.monotonic() - self._sent_at < _AT_LATEST
        if not soon:
            self.flush()

    def waits_for(self, messages: set[int]) -> None:
        """Nothing more can run until the gradients of these messages have come."""
        for message in messages - self._waiting_for:
            self.note("waiting", message=message)
        self._waiting_for = messages
        self.note("resting")

    def flush(self) -> None:
        """Tell what has not been told."""
        with self._sending:
            if not self._seen:
                return
            self.sent += 1
            number, seen, self._seen = self.sent, self._seen, []
            self._sent_at = time.monotonic()
        self._send(number, seen, self._control.version)

    # -- being told ---------------------------------------------------------------------------

    def steer(self, control: Control | None, over: int) -> None:
        """How it is to go on, if otherwise than until now, and how many halts are over."""
        with self._changed:
            if control is not None and control.version > self._control.version:
                self._control = control
            self._over = max(self._over, over)
            self._changed.notify_all()

    def leave(self) -> None:
        """The watcher is gone: go on."""
        with self._changed:
            self._control = Control(self._control.version + 1)
            self._changed.notify_all()

    def stop(self) -> None:
        """The pass is given up: whoever is halted goes on to an error."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # -- in the engine ------------------------------------------------------------------------

    @contextmanager
    def around(self, part: Any, nodes: Collection[Node]) -> Iterator[None]:
        """See these nodes run, for the time of the block."""
        numbers = self._numbers.of(nodes)
        handles = []
        try:
            for node in nodes:
                before, after = self._hooks(part, node, numbers[node])
                handles.append(node.register_prehook(before))
                handles.append(node.register_hook(after))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, part: Any, node: Node, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        kind: Any = type(node)
        sends = kind is RECEIVE
        name = node.name()
        began = [0.0]
        saved: list[Saved] = []

        def before(gradients: Gradients) -> None:
            if current_part() is part:  # the node may be in another pass as well
                self.come_to(number, name, gradients, sends=sends)
                if self.looks:
                    saved[:] = saved_by(node)  # which it lets go of when it has run
                began[0] = time.perf_counter()

        def after(new: Gradients, given: Gradients) -> None:
            if current_part() is part:
                seconds = time.perf_counter() - began[0]
                try:
                    self.ran(number, name, seconds, new, given, lambda: self._explain(node, saved))
                finally:
                    saved.clear()

        return before, after

    def come_to(self, number: int, name: str, gradients: Gradients, *, sends: bool) -> None:
        """Tell of a node that is about to run; before, halt if the watcher says so.

        Raises:
            Stopped: the pass was given up meanwhile.
        """
        known: dict[str, Any] = {}
        if gradients and (self._norms or self._control.until == "nan"):
            with suppress(Exception):  # of a kind of tensor that cannot be measured: the pass is not to fail for that
                known["norm"], known["histogram"] = measure(gradients)
        self._check(number, name, gradients)
        if self._halts_before(self._control, number, sends=sends):
            self._halt(number, name, known, sends=sends)
        self.note("running", node=number, name=name, **known)

    def _halts_before(self, control: Control, number: int, *, sends: bool) -> bool:
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
        explain: Callable[[], Inherited | None] = lambda: None,
    ) -> None:
        """Tell of a node that has run, and has made the gradients ``new`` of those that it was ``given``.

        If they hold the first NaN or Inf, ``explain()`` tells of what the forward pass gave it.
        """
        self.note("done", node=number, name=name, seconds=seconds)
        self._check(number, name, new, given, explain)
        if self._control.paused:
            self.flush()

    def made(self, number: int, name: str, new: Gradients, given: Gradients) -> None:
        """Tell at once of a NaN or Inf that an operation of a pipeline has made, if what it was ``given`` has none."""
        if not are_finite(new) and are_finite(given):
            self._check(number, name, new, given, lambda: None)
            self.flush()

    @property
    def looks(self) -> bool:
        """Whether a NaN or Inf is looked for."""
        return self._control.until == "nan" or (self._norms and not self._found)

    def _check(
        self,
        number: int,
        name: str,
        gradients: Gradients,
        given: Gradients = (),
        explain: Callable[[], Inherited | None] | None = None,
    ) -> None:
        """Look for a NaN or Inf: halt before the next node if one was looked for; with norms, tell of the first."""
        control = self._control
        halts = control.until == "nan"
        if not halts and (explain is None or not self.looks):
            return
        if are_finite(gradients):
            return
        made = explain is not None and are_finite(given)
        if not halts and not made:
            return  # whoever has made it tells of it
        self._found = True
        found = None
        if made and explain is not None:
            with suppress(Exception):  # the pass is not to fail for that
                found = explain()
        self.note("nan", node=number, name=name, version=control.version if halts else -1, inherited=found)
        if halts:
            self._pause(control)

    def _pause(self, control: Control) -> None:
        """Halt before each node from now on: that to which it was to run is here."""
        with self._changed:
            if self._control is control:
                self._control = control._replace(paused=True, until="")

    def _halt(self, number: int, name: str, known: dict[str, Any], *, sends: bool) -> None:
        """Wait before a node until the watcher lets it go, or has it otherwise."""
        with self._halting:
            self._halts += 1
            announced = -1
            while self._halts_before(control := self._control, number, sends=sends) and self._over < self._halts:
                if announced != control.version:
                    # Again where it has been told something new: the watcher may have taken what it knew of this halt
                    # for over, when it let all go on, which has been overtaken here by that they halt again.
                    self.note("halted", node=number, name=name, halt=self._halts, version=control.version, **known)
                    self.flush()
                    announced = control.version
                    self._pause(control)
                with blocking_wait(), self._standing_still(), self._changed:
                    while self._control.version == control.version and self._over < self._halts and not self._stopped:
                        self._changed.wait()
                if self._stopped:
                    raise Stopped("the backward pass was given up while it was paused")


def are_finite(gradients: Gradients) -> bool:
    """Return whether there is no NaN and no Inf in any of these."""
    return all(is_finite(gradient) for gradient in gradients)
