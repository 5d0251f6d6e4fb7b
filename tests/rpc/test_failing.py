"""Futures that fail and are waited for are freed, with their errors, frames and tensors (G4).

Weak references cannot tell: the collector clears them before it finds that an object must stay. So these tests
count the objects that it still knows.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.processes import workers
from helpers.threads import in_thread
from helpers.waiting import wait_until

import nbdist
from nbdist import durations, rpc, torch_private
from nbdist.rpc.api import current_agent
from nbdist.rpc.failures import describe
from nbdist.rpc.futures import Future
from nbdist.testing import World

BATCH = 100
SOON = 20.0


class Large:
    """A local of whoever waits."""

    def __init__(self) -> None:
        self.bytes = bytearray(100_000)


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def lock() -> Any:
    return threading.Lock()


@rpc.functions.async_execution
def never() -> Any:
    return Future()


@rpc.functions.async_execution
def torchs_own(text: str) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(ValueError(text))  # one with a traceback that has the future is a circle in any program
    return future


class Refuses(Exception):
    """Cannot be copied."""

    def __reduce__(self) -> Any:
        raise TypeError("no copies")


def group() -> BaseException:
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ExceptionGroup("several", [OSError("one"), Refuses("two")]) from error
    except ExceptionGroup as error:
        error.add_note("noted")
        return error


def settled(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Any:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


# -- kinds of failing futures: each makes a batch, and says what they raise ------------------------


def remote_error(world: World) -> tuple[list[Any], type, str]:
    return [rpc.rpc_async("worker1", raise_value_error, ("there",)) for _ in range(BATCH)], ValueError, "there"


def timeout(world: World) -> tuple[list[Any], type, str]:
    return [rpc.rpc_async("worker1", never, timeout=0.01) for _ in range(BATCH)], nbdist.RpcTimeout, "RPC ran for more"


def dead_worker(world: World) -> tuple[list[Any], type, str]:
    return [rpc.rpc_async("worker2", lock) for _ in range(BATCH)], nbdist.WorkerLost, "worker2"


_numbers = itertools.count()


def dying_worker(world: World) -> tuple[list[Any], type, str]:
    name = f"late{next(_numbers)}"
    agent = world.add(name, id=100 + next(_numbers))
    wait_until(lambda: any(record.name == name for record in world[0].membership.members()))
    futures = [rpc.rpc_async(name, never) for _ in range(BATCH)]
    world.kill(world.agents.index(agent))
    world.agents.remove(agent)
    return futures, nbdist.WorkerLost, name


def then(world: World) -> tuple[list[Any], type, str]:
    done = settled(1)
    return [done.then(lambda _: 1 // 0) for _ in range(BATCH)], ZeroDivisionError, "division"


def set_exception(world: World) -> tuple[list[Any], type, str]:
    return [failed(group()) for _ in range(BATCH)], ExceptionGroup, "several"


def unencodable(world: World) -> tuple[list[Any], type, str]:
    return [rpc.rpc_async("worker1", lock) for _ in range(BATCH)], nbdist.EncodeError, "the result of"


def interrupted(world: World) -> tuple[list[Any], type, str]:
    futures = [rpc.rpc_async("worker1", never) for _ in range(BATCH)]
    agent = current_agent()
    agent.outcomes.interrupt(agent.pending.all(), nbdist.Interrupted("Ctrl-C"))
    return futures, nbdist.Interrupted, "Ctrl-C"


def failed_reference(world: World) -> tuple[list[Any], type, str]:
    rref = rpc.remote("worker1", raise_value_error, ("made",))
    return [rref.rpc_async().anything() for _ in range(BATCH)], ValueError, "made"


def future_of_torch(world: World) -> tuple[list[Any], type, str]:
    return [rpc.rpc_async("worker1", torchs_own, ("torch",)) for _ in range(BATCH)], ValueError, "torch"


KINDS: list[Callable[[World], tuple[list[Any], type, str]]] = [
    remote_error,
    timeout,
    dead_worker,
    dying_worker,
    then,
    set_exception,
    unencodable,
    interrupted,
    failed_reference,
    future_of_torch,
]


# -- ways of waiting -------------------------------------------------------------------------------


async def awaited(future: Any) -> Any:
    return await future


WAYS: dict[str, Callable[[Any], Any]] = {
    "wait": lambda future: future.wait(),
    "value": lambda future: (future.exception() if future.done() else future.wait()) and future.value(),
    "then": lambda future: future.then(lambda done: done.value()).wait(),
    "await": lambda future: asyncio.run(awaited(future)),
    "rpc.wait_all": lambda future: rpc.wait_all([settled(1), future]),
    "torch.wait_all": lambda future: torch.futures.wait_all([settled(1), future]),
    "torch.collect_all": lambda future: torch.futures.collect_all([future, settled(1)]).wait(),
}


@pytest.fixture
def world() -> Iterator[World]:
    with World(3, dynamic=True) as world, world[0].activate():
        wait_until(lambda: len(world[0].membership.members()) == 3)
        world.kill(2)
        yield world


def error_of(way: str, future: Any) -> BaseException:
    large = Large()
    try:
        WAYS[way](future)
    except Exception as error:
        assert large.bytes
        return error
    raise AssertionError("it did not fail")


def waste(world: World, kind: Callable[[World], tuple[list[Any], type, str]], ways: list[str]) -> None:
    futures, cls, text = kind(world)
    for future, way in zip(futures, itertools.cycle(ways), strict=False):
        error = error_of(way, future)
        assert type(error) is cls
        assert text in str(error)


def known() -> tuple[int, int, int]:
    """Count the locals, futures and errors that there are."""
    gc.collect()
    found = gc.get_objects()
    kinds = [type(each) for each in found]
    return (
        sum(kind is Large for kind in kinds),
        sum(kind is Future for kind in kinds),
        sum(issubclass(kind, Exception) for kind in kinds),
    )


@pytest.mark.parametrize(
    "ways", [pytest.param(list(WAYS), id="all"), *(pytest.param([way], id=way, marks=pytest.mark.soak) for way in WAYS)]
)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_a_future_that_fails_is_freed(world: World, kind: Any, ways: list[str]) -> None:
    waste(world, kind, ways)
    before, resident = known(), workers.resident()
    for _ in range(2000 // BATCH):
        waste(world, kind, ways)
    wait_until(lambda: known()[0] == 0, within=5)
    after = known()
    grown = workers.resident() - resident
    print(f"objects {before} -> {after}, {grown:+.1f} MB")
    assert after[1] - before[1] <= 20
    assert after[2] - before[2] <= 20
    assert grown < 20


# -- several at once -------------------------------------------------------------------------------


TOGETHER: dict[str, Callable[[list[Any]], Any]] = {
    "rpc.wait_all": rpc.wait_all,
    "torch.wait_all": torch.futures.wait_all,
    "torch.collect_all": lambda futures: torch.futures.collect_all(futures).wait(),
}


@pytest.mark.parametrize("others", [Future, torch.futures.Future], ids=["ours", "torchs"])
@pytest.mark.parametrize("way", TOGETHER)
def test_the_first_error_ends_a_wait_for_several(way: str, others: Callable[[], Any]) -> None:
    """One of the others never comes."""
    for early in (False, True):
        wrong: Future[Any] = Future()
        if early:
            wrong.set_exception(KeyError("k"))
        outcome = in_thread(lambda wrong=wrong: TOGETHER[way]([others(), settled(1), wrong]))
        if not early:
            wrong.set_exception(KeyError("k"))
        with pytest.raises(KeyError, match="k"):
            outcome.result(SOON)


def test_an_error_of_torchs_own_future_ends_a_wait_for_several() -> None:
    for way in TOGETHER.values():
        theirs: torch.futures.Future[Any] = torch.futures.Future()
        outcome = in_thread(lambda way=way, theirs=theirs: way([Future(), theirs]))
        theirs.set_exception(KeyError("k"))
        with pytest.raises(KeyError, match="k"):
            outcome.result(SOON)


def test_lists_without_a_future_of_ours_stay_torchs_own() -> None:
    one, other = torch.futures.Future[int](), torch.futures.Future[int]()
    collected = torch.futures.collect_all([one, other])
    assert not isinstance(collected, Future)
    one.set_result(1)
    other.set_result(2)
    assert torch.futures.wait_all([one, other]) == [1, 2]
    assert [future.wait() for future in collected.wait()] == [1, 2]


def test_a_future_that_never_comes_keeps_nothing_of_those_that_waited_for_it() -> None:
    never: Future[Any] = Future()
    others: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def other(future: Future[Any]) -> Future[Any]:
        others.add(future)
        return future

    for way in TOGETHER.values():
        for first in (True, False):
            pair = [never, other(failed(KeyError("k")))]
            with pytest.raises(KeyError):
                way(pair if first else pair[::-1])
    with pytest.raises(nbdist.RpcTimeout):
        rpc.wait_all([never, other(settled(1))], timeout=0.001)
    del pair
    gc.collect()
    assert not others


# -- what stays as it was --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_error_keeps_its_type_text_notes_and_causes(way: str) -> None:
    for error in (group(), Refuses("no"), KeyError("k")):
        before = str(error), error.__cause__, getattr(error, "__notes__", None)
        found = error_of(way, failed(error))
        assert found is error
        assert (str(found), found.__cause__, getattr(found, "__notes__", None)) == before


def test_a_traceback_does_not_grow_with_waits() -> None:
    def raises() -> None:
        raise KeyError("k")

    future = settled(1).then(lambda _: raises())

    def depth() -> int:
        frames, traceback = [], error_of("wait", future).__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert frames[-1] == "raises"
        return len(frames)

    assert len({depth() for _ in range(10)}) == 1


def test_the_members_of_a_group_are_told_without_frames_of_nbdist() -> None:
    def wait_for_nothing() -> None:
        durations.positive(-1)

    def raise_group() -> None:
        try:
            wait_for_nothing()
        except nbdist.UsageError as error:
            error.add_note("noted")
            raise ExceptionGroup("several", [error]) from None

    with pytest.raises(ExceptionGroup) as caught:
        raise_group()
    said = describe(caught.value, "worker1", "f")[2]
    assert "in wait_for_nothing" in said
    assert "in positive" not in said
    assert "noted" in said


def test_torchs_part_of_a_future_that_is_gone_has_the_errors_text() -> None:
    future = failed(KeyError("k"))
    assert torch_private.collect_all_of_torch is not None
    collected = torch_private.collect_all_of_torch([future])  # C++ keeps its part of the future
    with pytest.raises(KeyError, match="k"):
        collected.wait()
    del future
    gc.collect()
    with pytest.raises(RuntimeError, match=r"^KeyError: 'k'$"):
        collected.wait()
