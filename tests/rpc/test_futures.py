"""Futures: ours, and torch's for whoever asks."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
from helpers.processes import workers
from helpers.threads import in_thread

from nbdist import RpcTimeout, rpc
from nbdist.rpc import wait_all
from nbdist.rpc.futures import Future
from nbdist.rpc.waits import blocking_wait, set_blocking_hook
from nbdist.testing import World

SOON = 20.0


def done(value=None):
    future = Future()
    future.set_result(value)
    return future


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


# --- settling and looking -------------------------------------------------------------------------


def test_a_value_comes_out_as_it_went_in():
    value = object()
    future = Future()
    assert not future.done()
    with pytest.raises(RuntimeError, match="not done"):
        future.value()
    with pytest.raises(RuntimeError, match="not done"):
        future.exception()
    future.set_result(value)
    assert future.done()
    assert future.wait() is future.value() is value
    assert future.exception() is None


def test_an_error_comes_out_as_it_went_in():
    error = KeyError("x")
    future = failed(error)
    for ask in (future.wait, future.value):
        with pytest.raises(KeyError) as info:
            ask()
        assert info.value is error
    assert future.exception() is error


def test_an_error_without_a_text_ends_a_wait():
    future = Future()
    future.set_exception(workers.Untold())
    with pytest.raises(workers.Untold):
        future.wait(timeout=5)


def test_what_is_set_stays_set():
    for future in (done(1), failed(ValueError())):
        for again in (lambda f: f.set_result(2), lambda f: f.set_exception(KeyError())):
            with pytest.raises(RuntimeError, match="once"):
                again(future)
        assert not future.try_settle(3, None)
    assert done(1).value() == 1


def test_only_an_exception_is_one():
    with pytest.raises(TypeError):
        Future().set_exception("text")


def test_of_many_who_settle_one_wins():
    future, start = Future(), threading.Barrier(8)

    def settle(number):
        start.wait(SOON)
        return future.try_settle(number, None)

    won = [in_thread(lambda number=number: settle(number)) for number in range(8)]
    assert sum(outcome.result(SOON) for outcome in won) == 1


# --- waiting --------------------------------------------------------------------------------------


def test_a_wait_ends_when_its_time_is_up():
    future = Future()
    with pytest.raises(RpcTimeout, match=r"0\.01 s"):
        future.wait(0.01)
    with pytest.raises(TimeoutError):
        future.wait(0)
    future.set_result(1)
    assert future.wait(0) == 1


def test_all_who_wait_are_woken():
    future = Future()
    waiting = [in_thread(lambda: future.wait(SOON)) for _ in range(16)]
    future.set_result("x")
    assert [outcome.result(SOON) for outcome in waiting] == ["x"] * 16


def test_who_is_being_woken_hides_the_outcome_from_nobody(monkeypatch):
    """A waiter takes the latch for a moment; the future is done all the same."""
    woken, go = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, latch):
            self.latch = latch

        def acquire(self, timeout=-1):
            got = self.latch.acquire(timeout=timeout)
            if threading.current_thread() is not threading.main_thread():
                woken.set()
                go.wait(SOON)
            return got

        def __enter__(self):
            self.latch.acquire()

        def __exit__(self, *error):
            self.latch.release()

        def __getattr__(self, name):
            return getattr(self.latch, name)

    with monkeypatch.context() as patch:
        make_lock = threading.Lock
        patch.setattr(threading, "Lock", lambda: Slow(make_lock()))
        future = Future()
    waiter = in_thread(lambda: future.wait(SOON))
    future.set_result(1)
    called = []
    if woken.wait(0.5):  # else it came after the result and had not to wait
        assert future.done()
        assert future.value() == 1
        assert future.wait(0) == 1
        future.add_done_callback(called.append)
        assert called == [future]
    go.set()
    assert waiter.result(SOON) == 1


def test_a_wait_tells_the_hook_of_its_thread_and_only_if_it_blocks():
    entered = []

    class Hook:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *_):
            entered.append("out")

    set_blocking_hook(Hook)
    try:
        done(1).wait()
        assert entered == []
        with pytest.raises(RpcTimeout):
            Future().wait(0.001)
        assert entered == ["in", "out"]
        in_thread(lambda: blocking_wait().__enter__()).result(SOON)
        assert entered == ["in", "out"]
    finally:
        set_blocking_hook(None)


# --- callbacks and chains -------------------------------------------------------------------------


def test_callbacks_are_called_once_with_the_future_in_order():
    future, called = Future(), []
    future.add_done_callback(lambda f: called.append(("first", f)))
    future.add_done_callback(lambda f: called.append(("second", f)))
    assert not called
    future.set_result(1)
    future.add_done_callback(lambda f: called.append(("late", f)))
    assert called == [("first", future), ("second", future), ("late", future)]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callback_that_fails_disturbs_nobody(error, caplog):
    future, called = Future(), []

    def fail(_):
        raise error("on purpose")

    future.add_done_callback(fail)
    future.add_done_callback(called.append)
    future.set_result(1)
    future.add_done_callback(fail)
    assert called == [future]
    assert future.wait() == 1
    assert caplog.text.count("a callback of a future failed") == 2


def test_callbacks_may_be_added_while_the_future_is_settled():
    for _ in range(200):
        future, called, start = Future(), [], threading.Barrier(3)

        def add(future=future, called=called, start=start):
            start.wait(SOON)
            for _ in range(20):
                future.add_done_callback(called.append)

        def settle(future=future, start=start):
            start.wait(SOON)
            future.set_result(1)

        adding, settling = in_thread(add), in_thread(settle)
        start.wait(SOON)
        future.wait(SOON)
        adding.result(SOON)
        settling.result(SOON)
        assert len(called) == 20


def test_then_keeps_the_class():
    future = Future()
    child = future.then(lambda f: f.value() + 1).then(lambda f: f.value() * 2)
    assert type(child) is Future
    assert not child.done()
    future.set_result(1)
    assert child.wait() == 4


def test_an_error_goes_down_the_chain_until_it_is_caught():
    def catch(future):
        assert isinstance(future.exception(), KeyError)
        return "caught"

    passed_on = failed(KeyError("x")).then(lambda f: f.value())
    assert isinstance(passed_on.exception(), KeyError)
    assert passed_on.then(catch).wait() == "caught"


def test_an_error_in_then_is_the_childs():
    parent = done(1)
    with pytest.raises(ZeroDivisionError):
        parent.then(lambda f: 1 // 0).wait()
    assert parent.wait() == 1


# --- awaiting -------------------------------------------------------------------------------------


def test_a_future_can_be_awaited_wherever_it_is_set():
    async def main():
        early, late, wrong = done(1), Future(), Future()
        threading.Timer(0.01, late.set_result, (2,)).start()
        threading.Timer(0.01, wrong.set_exception, (KeyError("x"),)).start()
        assert await early == 1
        assert await late == 2
        with pytest.raises(KeyError):
            await wrong
        return await asyncio.gather(*(asyncio.ensure_future(wait(f)) for f in (early, late)))

    async def wait(future):
        return await future

    assert asyncio.run(main()) == [1, 2]


def test_a_cancelled_await_leaves_nothing_behind(caplog):
    future, loops = Future(), []

    async def wait():
        return await future

    async def main():
        loops.append(weakref.ref(asyncio.get_running_loop()))
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(), 0.01)

    asyncio.run(main())
    gc.collect()
    assert loops[0]() is None
    future.set_result(1)
    assert caplog.text == ""


def test_an_await_can_be_cancelled():
    async def main():
        future = Future()

        async def wait():
            await future

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        future.set_result(1)  # too late, and harmless
        await asyncio.sleep(0)

    asyncio.run(main())


# --- several --------------------------------------------------------------------------------------


def test_wait_all_gives_the_values_in_order():
    futures = [Future() for _ in range(5)]
    outcome = in_thread(lambda: wait_all(futures))
    for number in (3, 1, 4, 0, 2):
        futures[number].set_result(number)
    assert outcome.result(SOON) == [0, 1, 2, 3, 4]
    assert wait_all([]) == []
    one = done(7)
    assert wait_all([one, one]) == [7, 7]


def test_wait_all_raises_the_first_error_without_waiting_for_the_rest():
    never, wrong = Future(), Future()
    outcome = in_thread(lambda: wait_all([never, wrong]))
    wrong.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        outcome.result(SOON)


def test_wait_all_ends_when_its_time_is_up():
    with pytest.raises(RpcTimeout, match="2 of 3 futures"):
        wait_all([Future(), done(1), Future()], timeout=0.01)


def test_wait_all_takes_torchs_own_futures_too():
    theirs = torch.futures.Future()
    outcome = in_thread(lambda: wait_all([done(1), theirs]))
    theirs.set_result(2)
    assert outcome.result(SOON) == [1, 2]
    wrong = torch.futures.Future()
    wrong.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        wait_all([wrong, Future()])


# --- torch ----------------------------------------------------------------------------------------


def test_torch_takes_ours_for_its_own():
    ours, theirs = Future(), torch.futures.Future()
    assert isinstance(ours, torch.futures.Future)
    outcome = in_thread(lambda: torch.futures.wait_all([ours, theirs]))
    collected = torch.futures.collect_all([ours, theirs])
    ours.set_result(torch.ones(2))
    theirs.set_result(2)
    assert outcome.result(SOON)[1] == 2
    assert [future.wait() is not None for future in collected.wait()] == [True, True]


def test_torch_hears_of_our_errors():
    wrong = Future()
    collected = torch.futures.collect_all([wrong, done(1)])
    outcome = in_thread(lambda: torch.futures.wait_all([wrong, done(1)]))
    wrong.set_exception(KeyError("ours"))
    with pytest.raises(KeyError, match="ours"):
        outcome.result(SOON)
    with pytest.raises(KeyError, match="ours"):
        collected.wait()[0].wait()


def test_torch_s_chains_end_in_our_values():
    ours = Future()
    theirs = torch.futures.Future()
    theirs.add_done_callback(lambda f: ours.set_result(f.value()))
    theirs.set_result(5)
    assert ours.wait(SOON) == 5


@pytest.mark.parametrize("settle", [lambda f: f.set_result(1), lambda f: f.set_exception(KeyError("x"))])
def test_a_settled_future_is_freed(settle):
    future = Future()
    future.then(lambda f: None)
    settle(future)
    with contextlib.suppress(KeyError):
        future.wait()
    gone = weakref.ref(future)
    del future
    gc.collect()
    assert gone() is None


def test_what_torch_calls_back_may_make_calls_itself():
    """`collect_all` hangs itself on torch's side of a future, where ours cannot see it."""
    for channel in ("inprocess", "local"):
        with World(2, channel=channel) as world, world[0].activate():
            made = threading.Event()

            def call(_, world=world, made=made):
                with world[0].activate():
                    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
                made.set()

            futures = [rpc.rpc_async("worker1", time.sleep, args=(0.1,)) for _ in range(2)]
            torch.futures.collect_all(futures).then(call)
            assert made.wait(20)
