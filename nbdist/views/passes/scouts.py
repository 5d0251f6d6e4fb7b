"""Tells a `Watcher` in the notebook about contexts and local passes of other workers, so that it can watch them too.

::

    notebook                                  worker1
    Scouts     ---- `_send_out` ----------->  makes a `Scout`, whose `Pace` decides which contexts are worth watching
               <--- `look_at` --------------  the worker has opened such a context: watch it? The call is made in the
                                              context, so the notebook enters the context too
               ---- a Watching, or None --->  the context is watched; it is not if the answer is None, or late
               <--- `plan` -----------------  a pass is about to begin: its plan, while its graph still exists
               <--- `join`, `show`, `leave`   a local pass begins, has this plan, and ends (`LocalScout`)
    hold       ---- `hold` ---------------->  pause every pass before its first node, or stop that
    call_back  ---- `end` ----------------->  drops the `Scout`

The watcher and each Scout have the same key, in a name that their agents have published (`nbdist.rpc.named`): a Scout
calls the methods of the watcher itself. A worker waits for the answers, because the watcher must see and pause a pass
from its first node on. So a watched context costs two calls and a plan, and every other context costs only a comparison
of times.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from nbdist.autograd import api
from nbdist.autograd.graph import messages
from nbdist.autograd.graph.traces import Plan
from nbdist.autograd.passes.context import Context
from nbdist.errors import NbdistError
from nbdist.rpc.api import current_agent
from nbdist.rpc.asking import WorkerAnswers, ask_each
from nbdist.rpc.named import call_method
from nbdist.views.passes.local_scout import LocalScout
from nbdist.views.passes.pace import Pace
from nbdist.wire.messages import Record

_ANSWER_SECONDS = 2.0  # a worker or a context for which no answer comes in time is not watched

_log = logging.getLogger("nbdist.views")
_numbers = itertools.count(1)


class WatcherLike(Protocol):
    """The method of a `Watcher` that is called in its own process; other workers call those that are published."""

    def forget(self, worker: int) -> None:
        """End the shares of local passes on a lost worker."""


class Scouts:
    """The scouts of one `Watcher`: one on each other worker, also on those that join later."""

    def __init__(self, home: WatcherLike, *, held: bool) -> None:
        """Make a `Scout` on every other worker, and wait until they exist. If ``held``, they pause every pass."""
        self._agent = current_agent()
        self._contexts = api.recorder().contexts
        self._home = weakref.ref(home)
        self._key = f"{self._agent.me.incarnation}.{next(_numbers)}"
        methods = "look_at", "plan", "join", "show", "leave", "is_due"
        self._agent.named.publish(f"watcher {self._key}", home, *methods)
        self._called_back = False
        self._including = threading.Lock()  # held while `_workers` gets its records
        self._held = held
        self._numbers = itertools.count(1)
        with self._including:
            # `on_joined` first, so that no worker is missed; `include` waits for the lock.
            self._listening = ExitStack()
            self._listening.callback(self._agent.on_joined(partial(_on_joined, weakref.ref(self))))
            self._listening.callback(self._agent.on_lost(partial(_on_lost, weakref.ref(self))))
            self._workers = [record for record in self._agent.members() if record != self._agent.me]
        weakref.finalize(self, self._listening.close).atexit = False
        # A worker that is gone or busy: its passes are not seen.
        try:
            self._send_out(self._workers, held).or_raise(but=RuntimeError)
        except BaseException:  # also Ctrl-C: the scouts that exist would hold all passes, and nobody would end them
            self._agent.named.withdraw(f"watcher {self._key}")
            self.call_back()
            raise

    def include(self, record: Record) -> None:
        """Make a `Scout` on a worker that has joined, too. A thread of the agent's pool runs this; it waits."""
        with self._including:
            if record in self._workers:
                return
            self._workers.append(record)  # before the call, so that `hold` and `call_back` tell this worker, too
        held = self._held
        self._send_out([record], held)
        # Before the scout existed, it could not be told these.
        if self._called_back or self._home() is None:
            self._tell([record], "end")
        elif self._held != held:
            self._tell([record], "hold", next(self._numbers), self._held)

    def _send_out(self, workers: Sequence[Record], held: bool) -> WorkerAnswers:
        calls = {record.name: (self._key, self._agent.me, held) for record in workers}
        with self._contexts.outside():  # or the call would be recorded in the user's context
            return ask_each(self._agent, _send_out, calls, timeout=_ANSWER_SECONDS)

    def hold(self, held: bool) -> None:
        """Tell all scouts to pause every pass before its first node, or to stop that. Does not wait for them."""
        if held != self._held:
            self._held = held
            self._tell(self._workers, "hold", next(self._numbers), held)

    def watch(self, number: int) -> None:
        """Tell all scouts to watch the local pass with this number, too. Does not wait for them."""
        self._tell(self._workers, "watch", number)

    def unowned(self, workers: Sequence[str]) -> dict[str, dict[int, list[int]]]:
        """Return what `Owners` finds on these workers, without those that do not answer in time."""
        calls = dict.fromkeys(workers, (f"owners {self._key}", "unowned"))
        with self._contexts.outside():
            return ask_each(self._agent, call_method, calls, timeout=_ANSWER_SECONDS).values

    def call_back(self) -> None:
        """Tell the scouts to report no more contexts. Does not wait for them; a second call does nothing."""
        self._listening.close()
        if not self._called_back:
            self._called_back = True
            self._tell(self._workers, "end")

    def _tell(self, workers: Sequence[Record], method: str, *arguments: Any) -> None:
        """Call a method of the scout on each of these workers that is still a member. Does not wait for the calls."""
        with self._contexts.outside():
            for record in list(workers):
                if self._agent.member(record.incarnation) is not None:
                    there = self._agent.at(record.name, f"scout {self._key}")
                    there.cast(method, *arguments, timeout=_ANSWER_SECONDS)


def _on_joined(known: weakref.ref[Scouts], record: Record) -> None:
    scouts: Scouts | None = known()
    if scouts is not None:
        scouts._agent.submit(partial(scouts.include, record))  # not in this thread: it waits for the worker


def _on_lost(known: weakref.ref[Scouts], record: Record, why: str) -> None:
    scouts: Scouts | None = known()
    home = scouts._home() if scouts is not None else None
    if home is not None:
        home.forget(record.incarnation)


# -- on the other workers -------------------------------------------------------------------------


class Scout:
    """Reports the contexts that are opened on this worker to a `Watcher` on another worker, until `end`.

    A scout also ends when the watcher's worker is lost. It lives as long as the agent tells it of contexts.
    """

    def __init__(self, key: str, home: Record, held: bool) -> None:
        self._held = held
        self._told = 0
        self._agent = current_agent()
        self._recorder = api.recorder()
        self._home = self._agent.at(home.name, f"watcher {key}")
        self._local = LocalScout(self._recorder, self._call, self._home.cast, held=held)
        self._pace = Pace()
        self._opened = 0
        self._lock = threading.Lock()
        self._forget = self._recorder.when_opened(self._on_context, self._decide)
        self._heard = self._agent.on_lost(lambda lost, _: self.end() if lost.incarnation == home.incarnation else None)
        self._agent.named.publish(f"scout {key}", self, "hold", "watch", "end")
        self._agent.named.publish(f"owners {key}", self._local.owners, "unowned")

    def hold(self, version: int, held: bool) -> None:
        """Pause every pass before its first node, or stop that. The call with the last version counts."""
        with self._lock:
            if version > self._told:  # otherwise a later call has overtaken this one
                self._told, self._held = version, held
                self._local.hold(held)

    def watch(self, number: int) -> None:
        """Watch the local pass with this number, too."""
        self._local.watch(number)

    def end(self) -> None:
        """Report no more contexts; doing this twice is harmless."""
        self._forget()
        self._heard()
        self._local.end()

    def _decide(self) -> bool:
        """Return whether to watch the context that the calling thread is about to open."""
        now = time.monotonic()
        with self._lock:
            self._opened += 1
            self._pace.begins(now)
            due = self._held or self._pace.is_due(now)
            if due:
                self._pace.looks(now)
        return due

    def _on_context(self, context: Context) -> None:
        """Ask the notebook to watch a context that the calling thread has just opened."""
        watching = self._call("look_at", self._opened)  # in the context, so that the notebook enters it
        if watching is None:
            return
        observing = self._recorder.passes.observing
        if context.watching is None:  # the message that says so may come after the pass has begun
            observing.on_watch(messages.WatchChanged(context.id, context.maker, watching, False))
        context.before_pass = partial(self._show_plan, context.id)

    def _show_plan(self, context_id: int, make_plan: Callable[[], Plan]) -> None:
        """Send the notebook the plan of a pass, or of a step of a pipeline, that is about to begin on this worker."""
        with self._recorder.contexts.outside():
            try:
                plan = make_plan()
            except Exception:  # the pass must not fail because of its drawing
                _log.exception("a backward pass cannot be drawn in the notebook: its plan could not be made")
            else:
                self._call("plan", context_id, self._recorder.me, plan)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the watcher, and return its result; None if the notebook cannot be asked."""
        try:
            return self._home.ask(method, *arguments, timeout=_ANSWER_SECONDS)
        except (NbdistError, RuntimeError) as error:  # a view must not fail the user's step
            _log.info("a backward pass is not watched, because the notebook could not be asked: %s", error)
            return None


def _send_out(key: str, home: Record, held: bool) -> None:
    Scout(key, home, held)
