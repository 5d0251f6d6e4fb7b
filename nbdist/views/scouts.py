"""Tells a `Watcher` in the notebook of the contexts that other workers open, so that it can watch their passes too.

::

    notebook                                  worker1
    send_out   ---- how, from now on ------>  `Scout`: decides by its own `Pace` which contexts are worth a look
               <--- `_ask`, in the context -  a context is opened: is it to be watched? The call takes the notebook
                                              into the context, as any call would
               ---- by which watch --------->  goes on; without an answer, or with None, nobody looks
               <--- `_show_plan` -----------  a pass begins: what it consists of, while its graph is still there
    hold       ---- from now on ----------->  whether every pass is to be held before its first node
    call_back  ---- never mind ------------>

A worker waits for these answers, because a pass is to be seen and held from its first node on. That costs a context
that is looked at two calls and a drawing, and all others nothing but a comparison of times.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from nbdist.autograd import api, messages
from nbdist.autograd.contexts import Context
from nbdist.autograd.edges import Node
from nbdist.autograd.inspection import Plan, plan_from
from nbdist.autograd.messages import Watching
from nbdist.errors import NbdistError
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Future
from nbdist.views.pace import Pace

if TYPE_CHECKING:
    from typing import Protocol

    class Home(Protocol):
        """What scouts need of a `Watcher`."""

        def look_at(self, context: Context, opened: int) -> Watching | None:
            """Watch a context that another worker has opened, its ``opened``-th; return how, or None if not."""

        def plan(self, context_id: int, root: int, plan: Plan) -> None:
            """Take what a pass consists of that is about to begin on the worker ``root``."""


__all__ = ["Scouts"]

_PATIENCE = 2.0
"""Seconds for an answer; a worker or a notebook that holds the GIL for longer is left out."""

_log = logging.getLogger("nbdist.views")
_numbers = itertools.count(1)
_homes: WeakValueDictionary[int, Home] = WeakValueDictionary()
"""The watchers that have scouts, by their numbers."""


class Scouts:
    """The scouts of one `Watcher`, one on each other worker that there is when they are sent out."""

    def __init__(self, home: Home, *, held: bool) -> None:
        """Send scouts out, and wait until they look. If ``held``, they are to hold every pass."""
        self._agent = current_agent()
        self._contexts = api.recorder().contexts
        self._number = next(_numbers)
        self._key = self._agent.me.incarnation, self._number
        self._workers = [record for record in self._agent.members() if record != self._agent.me]
        self._held = held
        self._version = itertools.count(1)
        _homes[self._number] = home
        for sent in self._tell(_send_out, self._agent.me.id, held):
            with contextlib.suppress(NbdistError, RuntimeError):  # gone, or busy: its passes are not seen
                sent.wait()

    def hold(self, held: bool) -> None:
        """Have all scouts hold every pass from now on, or none; they hear of it soon."""
        if held != self._held:
            self._held = held
            self._tell(_hold, next(self._version), held)

    def call_back(self) -> None:
        """Have no scout look any more; they hear of it soon."""
        if _homes.pop(self._number, None) is not None:
            self._tell(_call_back)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> list[Future[Any]]:
        told = []
        with self._contexts.outside():
            for record in self._workers:
                with contextlib.suppress(NbdistError):  # it is gone, or all are
                    if self._agent.member(record.incarnation) is not None:
                        args = (self._key, *arguments)
                        told.append(self._agent.call(record.id, function, *args, timeout=_PATIENCE))
        return told


# -- on the notebook ------------------------------------------------------------------------------


def _ask(number: int, opened: int) -> Watching | None:
    """Answer a scout, in the context about which it asks."""
    home, context = _homes.get(number), api.recorder().contexts.current
    return home.look_at(context, opened) if home is not None and context is not None else None


def _show_plan(number: int, context_id: int, root: int, plan: Plan) -> None:
    home = _homes.get(number)
    if home is not None:
        home.plan(context_id, root, plan)


# -- on the other workers -------------------------------------------------------------------------

Key = tuple[int, int]
"""Which watcher it is: the incarnation of its worker, and its number there."""


class Scout:
    """Looks, on one worker, for contexts that are opened, on behalf of a `Watcher` on another one."""

    def __init__(self, key: Key, home: int, held: bool) -> None:
        self.held = held
        self.version = 0
        self._agent = current_agent()
        self._recorder = api.recorder()
        self._number = key[1]
        self._home = home
        self._pace = Pace()
        self._opened = 0
        self._due = set[int]()
        """The threads that open a context which is to be looked at."""
        self._lock = threading.Lock()
        self._forget = self._recorder.when_opened(self._on_context, self._decide)
        self._heard = self._agent.on_lost(lambda record, why: self.end() if record.incarnation == key[0] else None)

    def end(self) -> None:
        """Look no more."""
        self._forget()
        self._heard()

    def _decide(self) -> bool:
        """Return whether the context that the calling thread is about to open is to be looked at."""
        now = time.monotonic()
        with self._lock:
            self._opened += 1
            self._pace.begins(now)
            due = self.held or self._pace.is_due(now)
            if due:
                self._pace.looks(now)
                self._due.add(threading.get_ident())
        return due

    def _on_context(self, context: Context) -> None:
        with self._lock:
            if threading.get_ident() not in self._due:
                return
            self._due.discard(threading.get_ident())
        watching = self._call(_ask, self._number, self._opened)  # in the context, which so comes to the notebook
        if watching is None:
            return
        observing = self._recorder.passes.observing
        if context.watching is None:
            observing.on_watch(messages.Watch(context.id, context.maker, watching, False))
        context.before_pass = partial(self._plan, context.id)
        context.before_step = partial(self._show, context.id)

    def _plan(self, context_id: int, mode: api.Mode, roots: Sequence[tuple[Node, int]]) -> None:
        """Tell the notebook of what a pass consists that is about to begin."""
        with self._recorder.contexts.outside():
            try:
                plan = plan_from(self._recorder.contexts.get(context_id), roots, mode)
            except Exception:  # the pass is not to fail for that
                _log.exception("a backward pass could not be drawn")
            else:
                self._show(context_id, plan)

    def _show(self, context_id: int, plan: Plan) -> None:
        with self._recorder.contexts.outside():
            self._call(_show_plan, self._number, context_id, self._recorder.me, plan)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the notebook; return None if it does not answer."""
        try:
            return self._agent.call(self._home, function, *arguments, timeout=_PATIENCE).wait()
        except (NbdistError, RuntimeError) as error:
            _log.info("a backward pass is not watched: %s", error)
            return None


_scouts: dict[tuple[int, Key], Scout] = {}
"""By the incarnations of their workers, of which there are several in one process of `nbdist.testing.World`."""


def _mine(key: Key) -> tuple[int, Key]:
    return current_agent().me.incarnation, key


def _send_out(key: Key, home: int, held: bool) -> None:
    _scouts[_mine(key)] = Scout(key, home, held)


def _hold(key: Key, version: int, held: bool) -> None:
    scout = _scouts.get(_mine(key))
    if scout is not None and version > scout.version:  # else it has been overtaken
        scout.version, scout.held = version, held


def _call_back(key: Key) -> None:
    scout = _scouts.pop(_mine(key), None)
    if scout is not None:
        scout.end()
