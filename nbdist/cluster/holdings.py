"""What lives on each worker: values with references, contexts, and the worker's own variables; and who holds them.

Every worker says what it owns, and through which names of its own it refers to what others own::

    on each worker     contexts ──┐
                       values ────┼──> Census: every buffer once ──> Report ──> the notebook: collect() ──> Holdings
                       variables ─┘        in that order

It is asked by calls, so that a worker whose main thread is busy answers too, and nothing that it looks at is called.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from nbdist.autograd.api import recorder
from nbdist.autograd.kept import Place, kept_by, storage_of
from nbdist.cluster import pins, process_memory, variables
from nbdist.cluster.census import Amount, Census, Walk
from nbdist.cluster.pins import Pin
from nbdist.cluster.process_memory import Usage
from nbdist.cluster.roots import Named, named_values, names_by_value, references, roots_of
from nbdist.cluster.status import gpu_memory
from nbdist.cluster.variables import Variable
from nbdist.ids import GlobalId
from nbdist.rpc import inert
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.describing import describe_value
from nbdist.rpc.futures import Promise
from nbdist.torch_private import no_torch_function
from nbdist.wire.messages import State

__all__ = ["Holding", "Holdings", "WorkerMemory", "ask_all", "collect"]

_PATIENCE = 10.0
_LOOKS = 4
_BETWEEN_LOOKS = 0.05
"""Seconds; after them whatever was said before has arrived, unless a worker stands still."""
_MOST_OBJECTS = 150_000
"""So many objects are met in all values that have references."""
_MOST_OF_ONE = 20_000


class Owned(msgspec.Struct, frozen=True):
    """A value, as its owner knows it."""

    id: GlobalId
    state: State | None
    nbytes: int | None
    """Of a value that has come to be."""
    gpu: int
    is_partial: bool
    users: list[str]
    """The workers that hold references to it."""
    pins: list[Pin]
    """What keeps it there besides."""


class Kept(msgspec.Struct, frozen=True):
    """A context, as one of its workers knows it."""

    id: int
    maker: str
    nbytes: int
    gpu: int


class WorkerMemory(msgspec.Struct, frozen=True):
    """How much memory one worker uses, and for what."""

    name: str
    incarnation: int
    """Another one for each life of the worker."""
    usage: Usage | None
    """None where the system does not say."""
    started_with: int | None
    """Bytes that the worker used when it had started."""
    amounts: dict[str, Amount]
    """What is counted as ``references``, ``contexts`` and ``variables``."""
    variables: list[Variable]
    gpu_taken: int | None
    """Bytes that torch has taken of GPUs."""


class Report(msgspec.Struct, frozen=True):
    """What one worker says."""

    owned: list[Owned]
    contexts: list[Kept]
    used: dict[GlobalId, list[Pin]]
    """Who holds the references to others' values, and to its own, that are here."""
    memory: WorkerMemory


class Holding(msgspec.Struct, frozen=True):
    """One thing that lives on a worker by reference."""

    worker: str
    nbytes: int | None
    pins: list[tuple[str, list[Pin]]]
    """By worker, who holds it."""
    id: GlobalId | None = None
    """Of a value; without one it is what a context keeps."""
    state: State | None = None
    """What the value is, if it has come to be."""
    gpu: int = 0
    is_partial: bool = False
    context: int | None = None
    """The id of the context that keeps it."""

    @property
    def idle(self) -> bool:
        """Whether `free` would let go of it."""
        return bool(self.pins) and all(pins and all(pin.idle for pin in pins) for _, pins in self.pins)


class Holdings(msgspec.Struct, frozen=True):
    """All that lives on all workers."""

    items: list[Holding]
    """What lives there by reference."""
    workers: list[WorkerMemory]
    silent: list[str]
    """Workers that did not answer."""


def collect() -> Holdings:
    """Ask all workers, this one among them, what they own and use.

    An owner may answer before it hears that a reference was released elsewhere, although that was said before: the two
    messages come from different workers. Then all are asked again, up to `_LOOKS` times.
    """
    ask_all(_settle)
    reports, silent = ask_all(_report)
    for _ in range(_LOOKS - 1):
        if not _disagree(reports):
            break
        time.sleep(_BETWEEN_LOOKS)
        reports, silent = ask_all(_report)
    order = {worker: number for number, worker in enumerate(reports)}
    items = []
    for worker, report in reports.items():
        for owned in report.owned:
            held = [
                (name, reports[name].used.get(owned.id) or [_UNKNOWN] if name in reports else [_UNKNOWN])
                for name in owned.users
            ]
            own = pins.told({*report.used.get(owned.id, []), *owned.pins})
            if own or not held:
                held.append((worker, own or [_UNKNOWN]))
            held.sort(key=lambda each: order.get(each[0], len(order)))
            items.append(Holding(worker, owned.nbytes, held, owned.id, owned.state, owned.gpu, owned.is_partial))
        for kept in report.contexts:
            pin = Pin("context", f"context {kept.id}, which is open")
            items.append(Holding(worker, kept.nbytes, [(kept.maker, [pin])], gpu=kept.gpu, context=kept.id))
    items.sort(key=lambda item: (order[item.worker], -(item.nbytes or 0) - item.gpu))
    return Holdings(items, [report.memory for report in reports.values()], silent)


_UNKNOWN = Pin("other", "a call, or something that runs")


def _disagree(reports: dict[str, Report]) -> bool:
    """Return whether some owner lists a user of a value that says it has no reference to it (any more)."""
    return any(
        name in reports and owned.id not in reports[name].used
        for report in reports.values()
        for owned in report.owned
        for name in owned.users
    )


def ask_all(what: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
    """Run a function on all workers and here; return its values by worker, and which workers did not answer."""
    agent = current_agent()
    found: dict[str, Any] = {}
    names = [member.name for member in agent.members()]
    with recorder().contexts.outside():
        asked = agent.call_each([name for name in names if name != agent.me.name], what, timeout=_PATIENCE)
    found[agent.me.name] = what()
    for name, answer in asked.items():
        with contextlib.suppress(Exception):  # whatever went wrong there: the others are shown
            found[name] = answer.wait()
    return {name: found[name] for name in names if name in found}, [name for name in names if name not in found]


# -- on each worker -------------------------------------------------------------------------------


def _settle() -> None:
    """Tell the owners which references have been released here."""
    current_agent().reap()


def _report() -> Report:
    agent = current_agent()
    roots = roots_of(agent)
    census = Census()
    census.skip([*roots.variables, roots.out])
    contexts, kept = [], {}
    for context in recorder().contexts.all():
        found = kept[context.id] = kept_by(context)
        census.put("contexts", found)
        here = sum(nbytes for (device, _), nbytes in found.items() if device == "cpu")
        gpu = sum(found.values()) - here
        contexts.append(Kept(context.id, agent.name_of(context.maker), here, gpu))
    values = _values(agent, census)
    numbers = _watch(census, values)
    rows, leading = variables.count(census, named_values(roots))
    names = names_by_value(roots)
    owned = []
    for number, value in zip(numbers, values, strict=True):
        by = [Pin("context", f"context {context}") for context, known in kept.items() if value.place in known]
        by += [pins.variable(name) for name in names.get(value.key, ())]
        by += [pin for each in leading.get(number, ()) for pin in _pins_within(each)]
        owned.append(
            Owned(value.id, value.state, value.nbytes, value.gpu, value.is_partial, value.users, pins.told({*by}))
        )
    del leading
    used: dict[GlobalId, list[Pin]] = {}
    rrefs = references(agent)
    for rref, held in zip(rrefs, pins.find(rrefs, roots), strict=True):
        used[rref._id] = pins.told({*used.get(rref._id, []), *(held or [_UNKNOWN])})
    return Report(owned, contexts, used, _memory(agent, census, rows))


class _Value(NamedTuple):
    """A value that this worker owns, or is to own; not the value itself, which nothing here must keep."""

    id: GlobalId
    users: list[str]
    state: State | None
    nbytes: int | None = None
    gpu: int = 0
    is_partial: bool = False
    key: int = 0
    """The ``id`` of the value's object; 0 without one, or where others may be the same object by chance."""
    place: Place | None = None
    """Where a tensor's memory is."""


def _values(agent: Agent, census: Census) -> list[_Value]:
    """Count what has references."""
    found, left = [], _MOST_OBJECTS
    for id_, promise, holders in agent.owned():
        users = [agent.name_of(holder) for holder in holders]
        value, spent = _value(id_, promise, users, agent, census, min(left, _MOST_OF_ONE))
        left = max(1, left - spent)  # every value is met itself
        found.append(value)
    return found


def _value(
    id_: GlobalId, promise: Promise[Any], users: list[str], agent: Agent, census: Census, most: int
) -> tuple[_Value, int]:
    if not promise.done():
        return _Value(id_, users, None), 0
    if promise.exception() is not None:  # described when it came: to ask it for its text would call it
        return _Value(id_, users, agent.references.forks.state(id_, None)), 0
    value = promise.value()
    state = describe_value(value)
    walk = Walk(census, "references", value)
    spent = walk.go(most)
    known = state.nbytes if state.nbytes is not None and not walk.gpu else 0
    nbytes = max(walk.nbytes, known) if walk.nbytes or known or state.nbytes is not None else None
    key = id(value) if value is not None and not inert.is_a(value, int, float, str, bytes) else 0
    with no_torch_function():
        at = storage_of(value) if inert.is_a(value, torch.Tensor) else None
    place = at[0] if at is not None else None
    return _Value(id_, users, state, nbytes, walk.gpu, walk.is_partial or not walk.done, key, place), spent


def _watch(census: Census, values: list[_Value]) -> list[int]:
    """Have the census tell which variables lead to these values; returns by which number it does."""
    numbers = []
    for number, value in enumerate(values):
        if value.key:
            number = census.watched.setdefault(value.key, number)
        if value.place is not None:
            census.watched.setdefault(value.place, number)
        numbers.append(number)
    return numbers


def _pins_within(named: Named) -> list[Pin]:
    return [Pin(named.kind, name, within=True) for name in named.names]


def _memory(agent: Agent, census: Census, rows: list[Variable]) -> WorkerMemory:
    usage, regions = process_memory.measure()
    return WorkerMemory(
        agent.me.name,
        agent.me.incarnation,
        usage,
        process_memory.started_with(),
        census.amounts(regions),
        rows,
        gpu_memory(),
    )
