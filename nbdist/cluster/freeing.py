"""Lets go of what nobody holds but the shell's memory of what it has shown, and of the last error."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any

from nbdist.cluster import pins
from nbdist.cluster.holdings import Holdings, ask_all, collect
from nbdist.cluster.pins import Roots
from nbdist.cluster.roots import LAST_RESULT, names_by_value, references, results, roots_of, shell
from nbdist.ids import GlobalId
from nbdist.rpc.api import current_agent

__all__ = ["free"]


def free() -> Holdings:
    """Let go of what nobody holds but `Out`, `_` and tracebacks, on all workers; return what that was."""
    before = collect()
    idle = [item for item in before.items if item.idle]
    if idle:
        ask_all(partial(_forget, {item.id for item in idle if item.id is not None}))
        left = {item.id for item in collect().items}
        idle = [item for item in idle if item.id not in left]
    return Holdings(idle, before.workers, before.silent)


def _forget(ids: set[GlobalId]) -> None:
    """Drop what `Out`, `_` and tracebacks hold of these."""
    agent, of = current_agent(), shell()
    if of is None:
        return
    roots = roots_of(agent)
    rrefs = [rref for rref in references(agent) if rref._id in ids]
    found = {pin for held in pins.find(rrefs, roots) for pin in held}
    names = names_by_value(roots)
    for id_, promise, _ in agent.owned():
        if id_ in ids and promise.done() and promise.exception() is None:
            found.update(pins.told({pins.variable(name) for name in names.get(id(promise.value()), ())}))
    del rrefs
    _drop_shown(of, roots, {pin.name for pin in found if pin.kind == "out"})
    if any(pin.kind == "traceback" for pin in found):
        _drop_errors(of)
    gc.collect()
    agent.reap()


def _drop_shown(of: Any, roots: Roots, names: set[str]) -> None:
    """Drop what cells gave, under all names that it has."""
    gone = [roots.out.pop(number) for number in list(roots.out) if f"Out[{number}]" in names]
    own = [(space, name) for space in roots.variables for name in list(space) if pins.variable(name).kind == "out"]
    gone += [space[name] for space, name in own if pins.variable(name).name in names]
    known = {id(each) for each in gone if each is not None}
    for space, name in own:
        if id(space.get(name)) in known:
            space[name] = ""  # as the shell itself does, for whoever asks for it
    for result in results(of):
        if id(result.result) in known or LAST_RESULT.name in names:
            result.result = None


def _drop_errors(of: Any) -> None:
    """Drop what is kept of errors for `%debug` and `%tb`; who has kept an error himself still has all of it."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    of.InteractiveTB.tb = None
    for result in results(of):
        result.error_in_exec = result.error_before_exec = None
