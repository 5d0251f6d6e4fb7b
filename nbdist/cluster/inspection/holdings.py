"""Lists the values with references, contexts and variables that live on each worker, and the names that hold them.

Every worker reports what it owns, and under which of its own names it refers to values of other workers::

    on each worker     contexts ──┐
                       values ────┼──> Census: every buffer once ──> Report ──> the notebook: collect() ──> Holdings
                       variables ─┘        in that order

The reports come by RPC, so that a worker whose main thread is busy answers too. The report calls no code of the objects
that it looks at.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from nbdist.autograd.api import recorder
from nbdist.autograd.memory_use import Place, kept_by, storage_of
from nbdist.cluster.inspection import pins, variables
from nbdist.cluster.inspection.census import Amount, Census, CensusWalk
from nbdist.cluster.inspection.pins import Pin
from nbdist.cluster.inspection.roots import named_values, names_by_value, references, roots_of
from nbdist.cluster.inspection.status_report import gpu_memory
from nbdist.cluster.inspection.variables import Variable
from nbdist.cluster.processes import process_memory
from nbdist.cluster.processes.process_memory import Usage
from nbdist.code_lines import CodeLine, users_lines
from nbdist.ids import GlobalId
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.promise import Promise
from nbdist.rpc.references import inert
from nbdist.rpc.references.describing import describe_value
from nbdist.torch_private import no_torch_function
from nbdist.wire.messages import State

_REPORT_WITHIN = 10.0
"""Seconds to wait for a worker's report."""
_MOST_LOOKS = 4
"""The most times that `collect` asks all workers, until their reports agree."""
_BETWEEN_LOOKS = 0.05
"""Seconds between two looks: enough for a message that was on its way to arrive, unless a worker stands still."""
_MOST_OBJECTS = 150_000
"""Objects that a report visits at most in all values that have references, together."""
_MOST_OF_ONE = 20_000
"""Objects that a report visits at most in one of these values."""


class Owned(msgspec.Struct, frozen=True):
    """A referenced value, as its owner reports it."""

    id: GlobalId
    users: list[str]
    """The names of the other workers that hold references to the value."""
    state: State | None
    """The value's type, shape and size, or its error; None if the value has not been computed yet."""
    nbytes: int | None = None
    """Bytes in the worker's memory; None if the value has not been computed, or its size is not known."""
    gpu: int = 0
    """Bytes on other devices."""
    is_partial: bool = False
    """True if the value may hold more than was visited."""
    pins: list[Pin] = []
    """The names on the owner itself that keep the value."""
    contents: str = ""
    """The elements of a container by kind, and autograd graphs, in words."""


class Kept(msgspec.Struct, frozen=True):
    """A context, as one of its workers reports it."""

    id: int
    maker: str
    """The name of the worker that opened the context."""
    nbytes: int
    gpu: int


class WorkerMemory(msgspec.Struct, frozen=True):
    """The memory that one worker uses, and its uses."""

    name: str
    incarnation: int
    """A number that differs for each life of the worker."""
    usage: Usage | None
    """None where the system does not report it."""
    started_with: int | None
    """Bytes that the worker used right after it had started."""
    amounts: dict[str, Amount]
    """The counted bytes of the categories ``references``, ``contexts`` and ``variables``."""
    variables: list[Variable]
    gpu_taken: int | None
    """Bytes that torch has reserved on the worker's GPUs."""


class MemoryReport(msgspec.Struct, frozen=True):
    """One worker's answer to `collect`."""

    owned: list[Owned]
    contexts: list[Kept]
    used: dict[GlobalId, list[Pin]]
    """The names on this worker that hold references, by the id of the value, which may be its own or another's."""
    made_at: dict[GlobalId, str]
    """The lines on this worker that made references, such as ``In[3]:4``, by the id of the value."""
    memory: WorkerMemory


class Holding(msgspec.Struct, frozen=True):
    """A value or context that lives on a worker, with everything that keeps it there."""

    worker: str
    nbytes: int | None
    pins: list[tuple[str, list[Pin]]]
    """The reasons that keep it, by the name of the worker on which they are."""
    id: GlobalId | None = None
    """The id of a value; None for a context."""
    state: State | None = None
    """The value's type, shape and size, or its error; None for a context or a value that is not computed yet."""
    gpu: int = 0
    is_partial: bool = False
    contents: str = ""
    """The elements of a container by kind, autograd graphs, and the line that made the reference if known, in words."""
    context: int | None = None
    """The id of a context; None for a value."""

    @property
    def idle(self) -> bool:
        """True if `%dist_free` would drop it: nothing but `Out`, `_` and tracebacks keep it."""
        return bool(self.pins) and all(pins and all(pin.idle for pin in pins) for _, pins in self.pins)


class Holdings(msgspec.Struct, frozen=True):
    """All values and contexts that live on all workers, and the memory of each worker."""

    items: list[Holding]
    """Sorted by worker, the largest first."""
    workers: list[WorkerMemory]
    silent: list[str]
    """The names of the workers that did not answer."""


def collect() -> Holdings:
    """Return all referenced values and contexts that live on the workers and in this process, and the memory of each.

    Asks all agents, and waits up to 10 s for each round of answers; ``silent`` in the result names the agents that did
    not answer. An owner may answer before it hears that a reference was released on another worker, even if the release
    was sent first, because the two messages come from different workers. Then this asks all agents again, up to
    `_MOST_LOOKS` times in all.
    """
    ask_all(_tell_owners)
    reports, silent = ask_all(_report)
    for _ in range(_MOST_LOOKS - 1):
        if not _owners_list_more(reports):
            break
        time.sleep(_BETWEEN_LOOKS)
        reports, silent = ask_all(_report)
    order = {worker: number for number, worker in enumerate(reports)}
    used = {worker: report.used for worker, report in reports.items()}
    made_at = {id_: place for report in reports.values() for id_, place in report.made_at.items()}
    items = []
    for worker, report in reports.items():
        for owned in report.owned:
            held = [(name, used.get(name, {}).get(owned.id) or [_UNKNOWN]) for name in owned.users]
            own = pins.told({*report.used.get(owned.id, []), *owned.pins})
            if own or not held:
                held.append((worker, own or [_UNKNOWN]))
            held.sort(key=lambda each: order.get(each[0], len(order)))
            told = owned.contents + (f", made at {made_at[owned.id]}" if owned.id in made_at else "")
            items.append(Holding(worker, owned.nbytes, held, owned.id, owned.state, owned.gpu, owned.is_partial, told))
        for kept in report.contexts:
            pin = Pin("context", f"context {kept.id}, which is open")
            items.append(Holding(worker, kept.nbytes, [(kept.maker, [pin])], gpu=kept.gpu, context=kept.id))
    items.sort(key=lambda item: (order[item.worker], -(item.nbytes or 0) - item.gpu))
    return Holdings(items, [report.memory for report in reports.values()], silent)


_UNKNOWN = Pin("other", "a call, or a function that is running")


def _owners_list_more(reports: dict[str, MemoryReport]) -> bool:
    """Return whether an owner lists a user of its value, but that user reports no reference to the value (any more)."""
    return any(
        name in reports and owned.id not in reports[name].used
        for report in reports.values()
        for owned in report.owned
        for name in owned.users
    )


def ask_all(what: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
    """Call a function on all other agents and here; return the results by name, and the names that did not answer."""
    agent = current_agent()
    names = [member.name for member in agent.members()]
    others = [name for name in names if name != agent.me.name]
    with recorder().contexts.outside():
        found = ask_each(agent, what, dict.fromkeys(others, ()), timeout=_REPORT_WITHIN).values
    with contextlib.suppress(Exception):  # one failed agent must not hide the others
        found[agent.me.name] = what()
    return {name: found[name] for name in names if name in found}, [name for name in names if name not in found]


# -- on each worker -------------------------------------------------------------------------------


def _tell_owners() -> None:
    current_agent().reap()  # before the reports: else owners would list users that are gone


def _report() -> MemoryReport:
    """Return the report that this worker sends to `collect`, which must not keep the values alive. Runs by RPC."""
    agent = current_agent()
    roots = roots_of(agent)
    census = Census()
    census.skip([*roots.variables, roots.out])
    # In this order: a buffer that several of them hold counts for the first. But the buffer of a tensor that is itself
    # a value or variable does not count for a context.
    contexts, kept = [], {}
    for context in recorder().contexts.all():  # 1. what each context keeps
        found = kept[context.id] = kept_by(context)
        census.put("contexts", found)
        here = sum(nbytes for (device, _), nbytes in found.items() if device == "cpu")
        gpu = sum(found.values()) - here
        contexts.append(Kept(context.id, agent.name_of(context.maker), here, gpu))
    values = _values(agent, census)  # 2. values with references
    numbers = _watch(census, values)
    rrefs = references(agent)
    rref_numbers = [census.watched.setdefault(id(rref), len(values) + at) for at, rref in enumerate(rrefs)]
    rows, leading = variables.count(census, named_values(roots))  # 3. variables, and which values they lead to
    names = names_by_value(roots)
    owned = []
    for number, value in zip(numbers, values, strict=True):
        by = [Pin("context", f"context {context}") for context, known in kept.items() if value.place in known]
        by += [pins.variable(name) for name in names.get(value.key, ())]
        # The value is somewhere inside of these variables.
        by += leading.get(number, [])
        owned.append(msgspec.structs.replace(value.owned, pins=pins.told({*by})))
    used: dict[GlobalId, list[Pin]] = {}
    for number, rref, held in zip(rref_numbers, rrefs, pins.find(rrefs, roots), strict=True):
        held += leading.get(number, [])
        used[rref.id] = pins.told({*used.get(rref.id, []), *(held or [_UNKNOWN])})
    lines = [(rref.id, rref.made_at) for rref in rrefs] + [(id_, made.made_at) for id_, made, _ in agent.owned()]
    made_at = {id_: at.place for id_, line in lines if line for at in users_lines([CodeLine(*line, "")])}
    return MemoryReport(owned, contexts, used, made_at, _memory(agent, census, rows))


class _Value(NamedTuple):
    """A value that this worker owns or will own; without the object itself, so that the report keeps nothing alive."""

    owned: Owned
    """The report about the value, still without its pins."""
    key: int = 0
    """The ``id`` of the value's object; 0 without one, and for numbers and texts, which may be shared by chance."""
    place: Place | None = None
    """The place of a tensor's memory."""


def _values(agent: Agent, census: Census) -> list[_Value]:
    """Count the memory of the values that this worker owns and that have references; return a `_Value` for each."""
    found, left = [], _MOST_OBJECTS
    for id_, promise, holders in agent.owned():
        users = [agent.name_of(holder) for holder in holders]
        value, spent = _count_value(id_, promise, users, agent, census, min(left, _MOST_OF_ONE))
        left = max(1, left - spent)  # of every value, at least the object itself is visited
        found.append(value)
    return found


def _count_value(
    id_: GlobalId, promise: Promise[Any], users: list[str], agent: Agent, census: Census, most: int
) -> tuple[_Value, int]:
    """Count one value; return its `_Value`, and how many objects were visited, ``most`` at most."""
    if not promise.done():
        return _Value(Owned(id_, users, None)), 0
    if promise.exception() is not None:  # described when it was raised: its `str` would call the user's code
        return _Value(Owned(id_, users, agent.references.forks.state(id_, None))), 0
    value = promise.value()
    state = describe_value(value)
    walk = CensusWalk(census, "references", value)
    spent = walk.go(most)
    known = state.nbytes if state.nbytes is not None and not walk.gpu else 0
    nbytes = max(walk.nbytes, known) if walk.nbytes or known or state.nbytes is not None else None
    key = id(value) if value is not None and not inert.is_a(value, int, float, str, bytes) else 0
    with no_torch_function():
        at = storage_of(value) if inert.is_a(value, torch.Tensor) else None
    place = at[0] if at is not None else None
    owned = Owned(id_, users, state, nbytes, walk.gpu, walk.is_partial or not walk.done, contents=walk.contents())
    return _Value(owned, key, place), spent


def _watch(census: Census, values: list[_Value]) -> list[int]:
    """Make the census note which variables lead to these values; return a number for each value."""
    # A later walk that meets the object of a value, or a tensor's buffer, has this number in `CensusWalk.met`. Two
    # references to one object share a number.
    numbers = []
    for number, value in enumerate(values):
        if value.key:
            number = census.watched.setdefault(value.key, number)
        if value.place is not None:
            census.watched.setdefault(value.place, number)
        numbers.append(number)
    return numbers


def _memory(agent: Agent, census: Census, rows: list[Variable]) -> WorkerMemory:
    usage, regions = process_memory.measure()
    started_with, amounts = process_memory.started_with(), census.amounts(regions)
    return WorkerMemory(agent.me.name, agent.me.incarnation, usage, started_with, amounts, rows, gpu_memory())
