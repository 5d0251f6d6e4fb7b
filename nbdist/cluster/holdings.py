"""What lives on each worker because something refers to it: values with references, and contexts; and who holds them.

Every worker says what it owns, and through which names of its own it refers to what others own. What nobody holds but
the shell's memory of what it has shown, and of the last error, can be let go of.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from nbdist.autograd.api import recorder
from nbdist.autograd.kept import kept_by, storage_of
from nbdist.cluster import pins
from nbdist.cluster.pins import Pin, Roots
from nbdist.errors import NbdistError
from nbdist.ids import GlobalId
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Future
from nbdist.rpc.rref import RRef, describe_error, describe_value
from nbdist.wire.messages import State

__all__ = ["Holding", "Holdings", "collect", "free"]

_PATIENCE = 10.0


class Owned(msgspec.Struct, frozen=True):
    """A value, as its owner knows it."""

    id: GlobalId
    state: State | None
    users: list[str]
    """The workers that hold references to it."""
    pins: list[Pin]
    """What keeps it there besides."""


class Kept(msgspec.Struct, frozen=True):
    """A context, as one of its workers knows it."""

    id: int
    maker: str
    nbytes: int


class Report(msgspec.Struct, frozen=True):
    """What one worker says."""

    owned: list[Owned]
    contexts: list[Kept]
    used: dict[GlobalId, list[Pin]]
    """Who holds the references to others' values, and to its own, that are here."""
    nbytes: int
    """Of all tensors together that it owns or keeps, none of them counted twice."""


class Holding(msgspec.Struct, frozen=True):
    """One thing that lives on a worker."""

    worker: str
    nbytes: int | None
    pins: list[tuple[str, list[Pin]]]
    """By worker, who holds it."""
    id: GlobalId | None = None
    """Of a value; without one it is what a context keeps."""
    state: State | None = None
    """What the value is, if it has come to be."""

    @property
    def idle(self) -> bool:
        """Whether `free` would let go of it."""
        return bool(self.pins) and all(pins and all(pin.idle for pin in pins) for _, pins in self.pins)


class Holdings(msgspec.Struct, frozen=True):
    """All that lives on all workers."""

    items: list[Holding]
    totals: dict[str, int]
    silent: list[str]
    """Workers that did not answer."""


def collect() -> Holdings:
    """Ask all workers, this one among them."""
    _ask(_settle)
    reports, silent = _ask(_report)
    order = {worker: number for number, worker in enumerate(reports)}
    items = []
    for worker, report in reports.items():
        for owned in report.owned:
            held = [
                (name, reports[name].used.get(owned.id) or [_UNKNOWN] if name in reports else [_UNKNOWN])
                for name in owned.users
            ]
            own = [*report.used.get(owned.id, []), *owned.pins]
            if own or not held:
                held.append((worker, own or [_UNKNOWN]))
            held.sort(key=lambda each: order.get(each[0], len(order)))
            nbytes = owned.state.nbytes if owned.state is not None else None
            items.append(Holding(worker, nbytes, held, owned.id, owned.state))
        for kept in report.contexts:
            pin = Pin("context", f"context {kept.id}, which is open")
            items.append(Holding(worker, kept.nbytes, [(kept.maker, [pin])]))
    items.sort(key=lambda item: (order[item.worker], -(item.nbytes or 0)))
    return Holdings(items, {worker: report.nbytes for worker, report in reports.items()}, silent)


def free() -> Holdings:
    """Let go of what nobody holds but `Out`, `_` and tracebacks, on all workers; what that was."""
    before = collect()
    idle = [item for item in before.items if item.idle]
    if idle:
        _ask(partial(_forget, {item.id for item in idle if item.id is not None}))
        left = {item.id for item in collect().items}
        idle = [item for item in idle if item.id not in left]
    totals: dict[str, int] = {}
    for item in idle:
        totals[item.worker] = totals.get(item.worker, 0) + (item.nbytes or 0)
    return Holdings(idle, totals, before.silent)


_UNKNOWN = Pin("other", "a call, or something that runs")


def _ask(what: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
    """Have this run on all workers."""
    agent = current_agent()
    asked: dict[str, Future[Any]] = {}
    found: dict[str, Any] = {}
    members = sorted(agent.membership.members(), key=lambda member: member.id)
    with recorder().contexts.outside():
        for member in members:
            if member.incarnation != agent.me.incarnation:
                with contextlib.suppress(NbdistError):
                    asked[member.name] = agent.caller.asynchronous(member.id, what, (), None, _PATIENCE)
    found[agent.me.name] = what()
    for name, answer in asked.items():
        with contextlib.suppress(Exception):  # whatever went wrong there: the others are shown
            found[name] = answer.wait()
    names = [member.name for member in members]
    return {name: found[name] for name in names if name in found}, [name for name in names if name not in found]


# -- on each worker -------------------------------------------------------------------------------


def _settle() -> None:
    """Tell the others what has been let go of here."""
    current_agent().references.reap()


def _report() -> Report:
    agent = current_agent()
    roots = _roots(agent)
    memory: dict[int, int] = {}
    contexts = []
    kept: dict[int, dict[int, int]] = {}
    for context in recorder().contexts.all():
        found = kept[context.id] = kept_by(context)
        memory.update(found)
        contexts.append(Kept(context.id, agent.membership.name_of(context.maker), sum(found.values())))
    owned = []
    for id, promise, users in agent.references.owned():
        state, value = None, None
        if promise.done():
            error = promise.exception()
            value = promise.value() if error is None else None
            state = describe_error(error) if error is not None else describe_value(value)
        place = _measure(value, memory)
        by = [Pin("context", f"context {context}") for context, known in kept.items() if place in known]
        names = [agent.membership.name_of(user) for user in users]
        owned.append(Owned(id, state, names, [*by, *_names(value, roots)]))
        del value
    used: dict[GlobalId, list[Pin]] = {}
    rrefs = _references(agent)
    for rref, held in zip(rrefs, pins.find(rrefs, roots), strict=True):
        used[rref._id] = pins.told({*used.get(rref._id, []), *(held or [_UNKNOWN])})
    return Report(owned, contexts, used, sum(memory.values()))


def _references(agent: Agent) -> list[RRef[Any]]:
    """All references that are here."""
    found = [each for each in gc.get_objects() if type(each) is RRef]
    # Others may be making one just now, of which not all is there.
    return [
        each for each in found if getattr(each, "_agent", None) is agent and getattr(each, "_hold", None) is not None
    ]


def _measure(value: Any, memory: dict[int, int]) -> int | None:
    """Count a value's memory; where a tensor's is."""
    import torch

    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        with contextlib.suppress(Exception):  # of a class of the user's
            tensors = [*value.parameters(), *value.buffers()]
    place = None
    for tensor in tensors:
        at = storage_of(tensor)
        if at is not None:
            place = at[0]
            memory[at[0]] = at[1]
    return place if len(tensors) == 1 else None


def _names(value: Any, roots: Roots) -> list[Pin]:
    """The user's variables on the owner that are the value itself."""
    if value is None or isinstance(value, int | float | str | bytes):
        return []  # which may be the same by chance
    names = {name for namespace in roots.variables for name, known in list(namespace.items()) if known is value}
    return pins.told({pins.variable(name) for name in names})


def _shell() -> Any:
    interactive = sys.modules.get("IPython")
    return interactive.get_ipython() if interactive is not None else None


def _errors(shell: Any) -> list[BaseException | None]:
    found = [getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    for result in _results(shell):
        found += [result.error_in_exec, result.error_before_exec]
    return found


def _results(shell: Any) -> list[Any]:
    """What the shell keeps of the cells that ran last."""
    if shell is None:
        return []
    kind = getattr(sys.modules.get("IPython.core.interactiveshell"), "ExecutionResult", None)
    return [each for each in gc.get_objects() if type(each) is kind]


def _roots(agent: Agent) -> Roots:
    """Where this process keeps what its user knows."""
    shell = _shell()
    errors = _errors(shell)
    named = {id(promise): _HERE for _, promise, _ in agent.references.owned()}
    if shell is None:
        return Roots([vars(sys.modules["__main__"])], named=named, tracebacks=pins.frames_of(errors))
    named |= {id(shell.InteractiveTB): _RAISED, id(vars(shell.InteractiveTB)): _RAISED}
    named |= {id(shell): _SHELL, id(vars(shell)): _SHELL}
    for result in _results(shell):
        named |= {id(result): _RESULT, id(vars(result)): _RESULT}
    # What a cell gave has a name in each of these.
    variables = [shell.user_ns, shell.user_ns_hidden, vars(shell.displayhook)]
    return Roots(variables, shell.user_ns.get("_oh", {}), named, pins.frames_of(errors))


_RAISED = Pin("traceback", "a traceback")
_HERE = Pin("other", "a value that lives there")
_RESULT = Pin("out", "the last result")
_SHELL = Pin("other", "the shell")


def _forget(ids: set[GlobalId]) -> None:
    """Drop what `Out`, `_` and tracebacks hold of these."""
    agent, shell = current_agent(), _shell()
    if shell is None:
        return
    roots = _roots(agent)
    rrefs = [rref for rref in _references(agent) if rref._id in ids]
    found = {pin for held in pins.find(rrefs, roots) for pin in held}
    for id, promise, _ in agent.references.owned():
        if id in ids and promise.done() and promise.exception() is None:
            found.update(_names(promise.value(), roots))
    del rrefs
    _drop_shown(shell, roots, {pin.name for pin in found if pin.kind == "out"})
    if any(pin.kind == "traceback" for pin in found):
        _drop_errors(shell)
    gc.collect()
    agent.references.reap()


def _drop_shown(shell: Any, roots: Roots, names: set[str]) -> None:
    """What cells gave, under all names that it has."""
    gone = [roots.out.pop(number) for number in list(roots.out) if f"Out[{number}]" in names]
    own = [(space, name) for space in roots.variables for name in list(space) if pins.variable(name).kind == "out"]
    gone += [space[name] for space, name in own if pins.variable(name).name in names]
    known = {id(each) for each in gone if each is not None}
    for space, name in own:
        if id(space.get(name)) in known:
            space[name] = ""  # as the shell itself does, for whoever asks for it
    for result in _results(shell):
        if id(result.result) in known or _RESULT.name in names:
            result.result = None


def _drop_errors(shell: Any) -> None:
    """What is kept of errors for `%debug` and `%tb`; who has kept an error himself still has all of it."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = None
    for result in _results(shell):
        result.error_in_exec = result.error_before_exec = None
