"""Frees values that only the shell keeps: its record of shown results (`Out`, `_`) and of the last error.

::

    collect() ──> items that only `Out`, `_` and tracebacks keep ── _forget on every worker ──> collect() again
                                                                                                    │
                                       the result: items that are gone  <───────────────────────────┘
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any

from nbdist.cluster.inspection import pins
from nbdist.cluster.inspection.holdings import Holdings, ask_all, collect
from nbdist.cluster.inspection.pins import Roots
from nbdist.cluster.inspection.roots import LAST_RESULT, names_by_value, references, results, roots_of, shell
from nbdist.cluster.worker.debugger import DEBUGGER
from nbdist.ids import GlobalId
from nbdist.rpc.api import current_agent


def free() -> Holdings:
    """Free the values that nothing but `Out`, `_` and tracebacks holds, on all workers and in this process.

    The user's variables and running code keep their values. Drops the errors that workers keep for `%dist_debug`.
    Returns the freed values as `Holdings`: ``items`` has a row for each, ``workers`` the memory of each worker before
    the call.
    """
    before = collect()
    ask_all(_forget_last_error)
    idle = [item for item in before.items if item.idle]
    if idle:
        ask_all(partial(_forget, {item.id for item in idle if item.id is not None}))
        left = {item.id for item in collect().items}
        idle = [item for item in idle if item.id not in left]
    return Holdings(idle, before.workers, before.silent)


def _forget_last_error() -> None:
    DEBUGGER.last_error = None


def _forget(ids: set[GlobalId]) -> None:
    """Remove these values from `Out`, `_` and tracebacks. Called in each process; does nothing without a shell."""
    # References as well as values: a reference in `Out` on one worker keeps a value on another.
    agent, of = current_agent(), shell()
    if of is None:
        return
    roots = roots_of(agent)
    rrefs = [rref for rref in references(agent) if rref.id in ids]
    found = {pin for held in pins.find(rrefs, roots) for pin in held}
    names = names_by_value(roots)
    for id_, promise, _ in agent.owned():
        if id_ in ids and promise.done() and promise.exception() is None:
            found.update(pins.told({pins.variable(name) for name in names.get(id(promise.value()), ())}))
    _drop_shown(of, roots, {pin.name for pin in found if pin.kind == "out"})
    if any(pin.kind == "traceback" for pin in found):
        _drop_errors(of)
    del rrefs, roots  # which keep the references themselves, and the frames of errors
    gc.collect()
    agent.reap()


def _drop_shown(of: Any, roots: Roots, names: set[str]) -> None:
    """Drop the results of cells with these names, such as ``Out[3]``, under every name that the shell gave them."""
    gone = [roots.out.pop(number) for number in list(roots.out) if f"Out[{number}]" in names]
    own = [(space, name) for space in roots.variables for name in list(space) if pins.variable(name).kind == "out"]
    gone += [space[name] for space, name in own if pins.variable(name).name in names]
    known = {id(each) for each in gone if each is not None}
    for space, name in own:
        if id(space.get(name)) in known:
            space[name] = ""  # as the shell itself does, so that `_` stays defined
    for result in results(of):
        if id(result.result) in known or LAST_RESULT.name in names:
            result.result = None


def _drop_errors(of: Any) -> None:
    """Drop the errors that the shell ``of`` keeps for `%debug` and `%tb`, which then have no error to show."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    of.InteractiveTB.tb = None
    for result in results(of):
        result.error_in_exec = result.error_before_exec = None
