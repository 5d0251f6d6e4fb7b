"""Calls between real processes."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc


@pytest.fixture(scope="module")
def others():
    with workers.world(3) as others:
        yield others


def test_to_a_name_an_id_and_a_worker_info(others):
    info = rpc.get_worker_info("worker1")
    assert (info.name, info.id) == ("worker1", 1)
    for to in ("worker1", 1, info):
        assert rpc.rpc_sync(to, workers.name) == "worker1"
    assert rpc.rpc_sync("worker0", workers.name) == "worker0"
    assert rpc.get_worker_info() == rpc.WorkerInfo("worker0", 0)


def test_arguments_and_results(others):
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)).tolist() == [4, 4]
    assert rpc.rpc_sync("worker1", max, args=([3, 9, 2],), kwargs={"key": int}) == 9
    assert rpc.rpc_sync("worker1", workers.identity, kwargs={"value": {"a": (1, None)}}) == {"a": (1, None)}
    assert rpc.rpc_sync("worker1", workers.Counter(4).add, args=(1,)) == 5
    assert rpc.rpc_sync("worker1", workers.scripted, args=(torch.ones(1),)).item() == 3
    assert rpc.rpc_sync("worker2", workers.sleep, args=(0.01,), timeout=0) == 0.01


def test_a_result_is_the_callers_own(others):
    tensor = torch.zeros(4)
    rref = rpc.remote("worker1", workers.identity, args=(tensor,))
    rref.to_here().add_(1)
    assert rref.to_here().tolist() == [0, 0, 0, 0]
    assert tensor.tolist() == [0, 0, 0, 0]
    mine = rpc.rpc_sync("worker0", workers.identity, args=(tensor,))
    mine.add_(1)
    assert tensor.sum() == 0


def test_the_value_sent_is_the_value_at_the_call(others):
    tensor = torch.zeros(1 << 20)
    future = rpc.rpc_async("worker1", workers.identity, args=(tensor,))
    tensor.fill_(7)
    assert future.wait().sum() == 0


def test_nested_recursive_and_circular(others):
    # Far deeper than the pool is wide: every level blocks a thread somewhere.
    assert rpc.rpc_sync("worker1", workers.recurse, args=(["worker0", "worker1", "worker2"], 120)) == 120
    assert rpc.rpc_sync("worker1", workers.recurse, args=(["worker1"], 60)) == 60


def test_from_many_threads(others):
    results: list[int] = []

    def run(start: int) -> None:
        results.extend(rpc.rpc_sync("worker1", workers.identity, args=(start + i,)) for i in range(50))

    threads = [threading.Thread(target=run, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(100 * n + i for n in range(8) for i in range(50))


def test_more_blocked_handlers_than_threads(others):
    """Handlers that wait for a later call, in a way the pool cannot see, do not lock it up."""
    held = [rpc.rpc_async("worker1", workers.hold) for _ in range(24)]
    rpc.rpc_sync("worker1", workers.release)
    assert all(rpc.wait_all(held))


def test_futures(others):
    future = rpc.rpc_async("worker1", workers.identity, args=(2,))
    chained = future.then(lambda done: done.wait() + 1)
    assert isinstance(chained, rpc.Future)
    assert isinstance(chained, torch.futures.Future)
    assert chained.wait() == 3
    assert future.done()
    assert torch.futures.wait_all([rpc.rpc_async("worker1", workers.identity, args=(i,)) for i in range(9)]) == list(
        range(9)
    )
    collected = torch.futures.collect_all([rpc.rpc_async("worker1", workers.identity, args=(i,)) for i in range(3)])
    assert [done.value() for done in collected.wait()] == [0, 1, 2]

    async def together() -> list[int]:
        return await asyncio.gather(
            *(_awaited(rpc.rpc_async("worker1", workers.identity, args=(i,))) for i in range(5))
        )

    assert asyncio.run(together()) == [0, 1, 2, 3, 4]


async def _awaited(future):
    return await future


def test_wait_all_does_not_wait_for_the_rest(others):
    slow = rpc.rpc_async("worker2", workers.sleep, args=(3,))
    with pytest.raises(ValueError, match="soon"):
        rpc.wait_all([slow, rpc.rpc_async("worker1", workers.fail, args=("soon",))])
    assert not slow.done()
    slow.wait()


def test_a_future_waits_with_a_limit(others):
    future = rpc.rpc_async("worker1", workers.sleep, args=(1,))
    with pytest.raises(nbdist.RpcTimeout):
        future.wait(0.05)
    assert future.wait() == 1


def test_async_execution(others):
    assert rpc.rpc_sync("worker1", workers.Counter.static_async, args=("worker2", 1, 2)) == 3
    assert rpc.rpc_sync("worker1", workers.Counter.class_async, args=("worker2", 1, 2)) == 3
    assert rpc.rpc_async("worker1", workers.Counter.static_async, args=("worker2", 1, 2)).wait() == 3
    assert rpc.remote("worker1", workers.Counter.static_async, args=("worker2", 1, 2)).to_here() == 3
    rref = rpc.remote("worker1", workers.Counter)
    assert rref.rpc_sync().add_later("worker2", 5) == 5
    assert rref.rpc_async().add_later("worker2", 5).wait() == 10
    with pytest.raises(nbdist.UsageError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("worker1", workers.async_not_a_future)


def test_all_who_have_one_future_are_told_where_its_error_arose(others):
    batch = rpc.remote("worker1", workers.Batch, args=(3,))
    asked = [batch.rpc_async().ask() for _ in range(3)]
    for each in asked:
        with pytest.raises(ZeroDivisionError, match="in the batch") as error:
            each.wait()
        assert "where_it_goes_wrong" in str(error.value) + "".join(getattr(error.value, "__notes__", ()))


def test_async_execution_holds_no_thread(others):
    """More unfinished asynchronous calls than threads, and the worker still answers."""
    futures = [rpc.rpc_async("worker1", workers.Counter.static_async, args=("worker2", i, 1)) for i in range(200)]
    assert rpc.rpc_sync("worker1", workers.name) == "worker1"
    assert rpc.wait_all(futures) == [i + 1 for i in range(200)]


def test_a_function_runs_once(others):
    for i in range(200):
        assert rpc.rpc_sync("worker2", workers.count, args=("once",)) == i + 1


def test_functions_by_value(others):
    factor = 3
    assert rpc.rpc_sync("worker1", lambda x: x * factor, args=(4,)) == 12

    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

        def double(self) -> int:
            return 2 * self.n

    assert rpc.rpc_sync("worker1", lambda: Local(4)).double() == 8
    assert rpc.rpc_sync("worker1", Local(5).double) == 10
    rref = rpc.remote("worker1", Local, args=(6,))
    assert rref.rpc_sync().double() == 12
    assert rpc.rpc_sync("worker2", lambda: rref.rpc_sync().double()) == 12


def test_timeouts_say_what_and_where(others):
    with pytest.raises(nbdist.RpcTimeout) as caught:
        rpc.rpc_sync("worker1", workers.sleep, args=(4,), timeout=3)
    message = str(caught.value)
    assert "RPC ran for more than 3 s" in message
    assert "sleep on worker1" in message
    assert "it was running sleep for worker0" in message
    assert isinstance(caught.value, TimeoutError)
    future = rpc.rpc_async("worker1", workers.sleep, args=(1,), timeout=0.2)
    with pytest.raises(nbdist.RpcTimeout):
        future.wait()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: rpc.rpc_sync("nobody", workers.name), nbdist.UnknownWorker, "nobody.*worker0, worker1"),
        (lambda: rpc.rpc_sync(99, workers.name), nbdist.UnknownWorker, "99"),
        (lambda: rpc.rpc_sync(1.5, workers.name), nbdist.UsageError, "named by"),
        (lambda: rpc.rpc_sync("worker1", 3), TypeError, "callable"),
        (lambda: rpc.rpc_sync("worker1", workers.name, args=3), TypeError, "tuple"),
        (
            lambda: rpc.rpc_sync("worker1", workers.identity, args=(workers.Unpicklable(),)),
            nbdist.EncodeError,
            "I stay",
        ),
        (lambda: rpc.rpc_sync("worker1", workers.unpicklable), nbdist.EncodeError, "I stay here"),
        (lambda: rpc.rpc_sync("worker1", workers.explosive), nbdist.DecodeError, "no room"),
        (lambda: rpc.rpc_sync("worker1", workers.identity, args=(workers.Explosive(),)), nbdist.DecodeError, "no room"),
        (
            lambda: rpc.rpc_sync("worker1", workers.identity, args=(torch.futures.Future(),)),
            RuntimeError,
            "Can not pickle",
        ),
        (lambda: rpc.init_rpc("again", rank=0, world_size=1), nbdist.UsageError, "already initialized"),
    ],
)
def test_misuse_is_named_and_survived(others, call, error, match):
    with pytest.raises(error, match=match):
        call()
    assert rpc.rpc_sync("worker1", workers.identity, args=(1,)) == 1


def test_errors_arrive_as_themselves(others):
    with pytest.raises(ValueError, match="first\nsecond") as caught:
        rpc.rpc_sync("worker1", workers.fail, args=("first\nsecond",))
    (note,) = caught.value.__notes__
    assert "raised on worker1, in fail" in note
    assert "workers.py" in note
    assert "nbdist/rpc" not in note  # the user's frames only
    with pytest.raises(workers.Odd) as odd:
        rpc.rpc_sync("worker1", workers.fail_oddly)
    assert (odd.value.code, odd.value.detail) == (7, "seven")
    with pytest.raises(nbdist.RemoteError, match="SystemExit: 3"):
        rpc.rpc_sync("worker1", workers.exit_process)
    # Over two hops, both workers are named.
    with pytest.raises(ValueError, match="deep") as deep:
        rpc.rpc_sync("worker1", workers.call_there, args=("worker2", workers.fail, "deep"))
    text = "\n".join(deep.value.__notes__)
    assert "worker2" in text
    assert "worker1" in text


@pytest.mark.parametrize(("cls", "arrives"), [(workers.Untold, workers.Untold), (workers.Uncopied, nbdist.RemoteError)])
def test_an_error_whose_class_raises_whatever_is_asked_of_it_is_an_answer(others, cls, arrives):
    with pytest.raises(arrives):
        rpc.rpc_sync("worker1", workers.raise_one, args=(cls,), timeout=5)
    with pytest.raises(arrives):
        rpc.rpc_async("worker1", workers.raise_one, args=(cls,), timeout=5).wait()
    rref = rpc.remote("worker1", workers.raise_one, args=(cls,), timeout=5)
    with pytest.raises(arrives):
        rref.to_here(timeout=5)
    assert rref.state.error == "(its __str__ raised SystemExit)"


def test_an_error_whose_class_exists_on_one_side_only(others):
    def fail_locally() -> None:
        import types

        module = types.ModuleType("only_here")
        exec("class Mine(Exception): pass", module.__dict__)
        import sys

        sys.modules["only_here"] = module
        module.Mine.__module__ = "only_here"
        raise module.Mine("text survives")

    with pytest.raises(nbdist.RemoteError, match=r"only_here\.Mine: text survives"):
        rpc.rpc_sync("worker1", fail_locally)


def test_callbacks_and_finalisers_that_fail_kill_no_thread(others):
    future = rpc.rpc_async("worker1", workers.identity, args=(1,))
    future.add_done_callback(lambda _: 1 / 0)
    failed = future.then(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    rref = rpc.remote("worker1", workers.FailsToDie)
    assert "FailsToDie" in rpc.rpc_sync("worker1", workers.describe, args=(rref,))
    del rref
    assert rpc.rpc_sync("worker1", workers.identity, args=(5,)) == 5


MAIN = """
import torch
from nbdist import rpc

class Thing:
    def __init__(self, value):
        self.value = value

def double(tensor, thing):
    return tensor * 2, type(thing).__name__, thing
"""


def test_definitions_of_main_go_by_value_where_the_other_lacks_them(others, monkeypatch):
    """This process's __main__ has a function and a class that the workers' have not."""
    main = types.ModuleType("__main__")
    exec(MAIN, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    tensor = torch.ones(3)
    future = rpc.rpc_async("worker1", main.double, args=(tensor, main.Thing(4)))
    tensor.fill_(100)  # what is sent is the value at the call, also when it has to be sent twice
    result, name, thing = future.wait()
    assert result.tolist() == [2, 2, 2]
    assert name == "Thing"
    assert type(thing) is main.Thing  # back home it is our own class again
    assert thing.value == 4
    # The latest definition wins.
    exec("def double(tensor, thing):\n    return tensor * 3, thing.value, thing", main.__dict__)
    assert rpc.rpc_sync("worker1", main.double, args=(torch.ones(1), main.Thing(5)))[:2] == (torch.tensor([3.0]), 5)
    # A reference travels, and ends, with a call that is sent twice.
    exec("def fetch(rref):\n    return rref.to_here()", main.__dict__)
    rref = rpc.remote("worker2", workers.identity, args=(6,))
    assert rpc.rpc_sync("worker1", main.fetch, args=(rref,)) == 6
    made = rpc.remote("worker1", main.Thing, args=(7,))
    assert made.to_here().value == 7
    del rref, made
    # An earlier test waited for futures that failed, and had a reference: the error of such a future holds the frame
    # that waited, which holds the future and the reference. Only this process's collector ends such a circle.
    gc.collect()
    wait_until(lambda: rpc.rpc_sync("worker2", workers.statistics)["forks_of_owned"] == 0)
    wait_until(lambda: rpc.rpc_sync("worker1", workers.statistics)["owned_values"] == 0)


def test_what_went_along_inside_of_another_definition_is_not_taken_for_known(others, monkeypatch):
    main = types.ModuleType("__main__")
    exec("def inner(x):\n    return x + 1\n\ndef outer(x):\n    return inner(x)", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    for _ in range(2):  # the second time it is known that the other lacks it, and it goes by value at once
        assert rpc.rpc_async("worker1", main.outer, args=(1,)).wait() == 2
    assert rpc.rpc_async("worker1", main.inner, args=(1,)).wait() == 2
    assert rpc.rpc_sync("worker1", main.inner, args=(2,)) == 3


def test_global_names_are_looked_up_where_the_function_runs(others):
    rpc.rpc_sync("worker1", lambda: setattr(__import__("__main__"), "only_there", 41))
    assert rpc.rpc_sync("worker1", lambda: only_there + 1) == 42  # noqa: F821
