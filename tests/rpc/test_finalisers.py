"""A finaliser or a signal's handler makes a call, wherever Python runs it: while its thread sends, reads, decides."""

from __future__ import annotations

import gc
import random
import signal
import socket
import threading

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist import finalisers, rpc
from nbdist.autograd.passes import contexts
from nbdist.channel.shared_memory.blocks import Blocks
from nbdist.channel.shared_memory.leases import Leases
from nbdist.errors import UsageError
from nbdist.rpc.core.forks import Forks
from nbdist.rpc.here import here
from nbdist.testing import World
from nbdist.wire.peer import Peer

ARENA = rpc.RpcBackendOptions(arena_threshold=1)

WAYS = {
    "rpc_async": lambda rref: rpc.rpc_async("worker1", workers.count, args=("finaliser",)),
    "rpc_sync": lambda rref: rpc.rpc_sync("worker1", workers.count, args=("finaliser",)),
    "remote": lambda rref: rpc.remote("worker1", workers.count, args=("finaliser",)),
    "method": lambda rref: rref.rpc_async().add(1),
    "to_here": lambda rref: rpc.remote("worker1", workers.Counter).to_here(),
    "wait": lambda rref: rpc.rpc_async("worker1", workers.count, args=("finaliser",)).wait(),
}

PLACES = [
    (Peer, "send"),
    (Peer, "receive"),
    (Blocks, "take"),
    (socket.socket, "send"),
    (Leases, "take_ended"),
    (Forks, "set_state"),
]


class Finaliser:
    """Calls from its ``__del__``, once the collector comes by: it is in a circle."""

    made = 0
    outcomes: list[object] = []  # noqa: RUF012
    errors: list[BaseException] = []  # noqa: RUF012

    def __init__(self, agent, call):
        self.me, self.agent, self.call = self, agent, call

    def __del__(self):
        with (here.agent or self.agent).activate():  # it may run in a thread of either agent
            try:
                Finaliser.outcomes.append(self.call())
            except BaseException as error:
                Finaliser.errors.append(error.with_traceback(None))
            Finaliser.made += 1

    @classmethod
    def forget(cls):
        cls.made = 0
        cls.outcomes, cls.errors = [], []


@pytest.fixture(autouse=True)
def nothing_left():
    workers.counted.pop("finaliser", None)
    Finaliser.forget()
    yield
    gc.collect()
    Finaliser.forget()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("cls", "name"), PLACES, ids=lambda x: getattr(x, "__name__", x))
def test_a_finaliser_may_call_wherever_python_runs_it(monkeypatch, cls, name, way):
    """It waits for nothing there, and what it calls is called all the same."""
    x = torch.ones(100)
    original, once = getattr(cls, name), threading.Lock()
    with World(2, channel="local", options=ARENA) as world, world[0].activate():
        counter = rpc.remote("worker1", workers.Counter)
        counter.to_here()

        def collects(*args):
            if once.acquire(blocking=False):
                Finaliser(world[0], lambda: WAYS[way](counter))
                gc.collect()
            return original(*args)

        monkeypatch.setattr(cls, name, collects)

        def comes_by():
            assert rpc.rpc_sync("worker1", workers.identity, args=(x,), timeout=20).eq(1).all()
            assert rpc.remote("worker1", workers.identity, args=(1,)).to_here(20) == 1
            return Finaliser.made

        wait_until(comes_by, equals=1)
        waits = way in ("rpc_sync", "to_here", "wait")
        if way == "method":
            wait_until(lambda: counter.to_here().value, equals=1)
        elif way != "to_here":
            wait_until(lambda: len(workers.counted.get("finaliser", ())), equals=1)
        assert [str(error) for error in Finaliser.errors if "finaliser" not in str(error)] == []
        assert all(isinstance(error, UsageError) for error in Finaliser.errors)
        assert len(Finaliser.errors) + len(Finaliser.outcomes) == 1
        assert waits or not Finaliser.errors
        Finaliser.forget()


@pytest.mark.parametrize("channel", ["inprocess", "local", "zeromq"])
@pytest.mark.parametrize("way", ["rpc_async", "rpc_sync"])
def test_finalisers_may_call_at_any_moment(channel, way):
    """Collections come at random moments, in whichever thread: each call is made once, and nobody hangs."""
    dice = random.Random(7)
    before = gc.get_threshold()
    with World(2, channel=channel, options=ARENA) as world, world[0].activate():
        try:
            for _ in range(300):
                gc.set_threshold(dice.randint(1, 90), 5, 5)
                Finaliser(world[0], lambda: WAYS[way](None))
                assert rpc.rpc_sync("worker1", workers.identity, args=(torch.ones(50),), timeout=20).eq(1).all()
                assert rpc.remote("worker1", workers.identity, args=(1,)).to_here(20) == 1
        finally:
            gc.set_threshold(*before)
        gc.collect()
        wait_until(lambda: Finaliser.made, equals=300)
        wait_until(lambda: len(workers.counted["finaliser"]), equals=300)
        assert all(isinstance(error, UsageError) for error in Finaliser.errors)
        assert way == "rpc_sync" or not Finaliser.errors
        assert len(Finaliser.outcomes) + len(Finaliser.errors) == 300
        Finaliser.forget()


@pytest.fixture
def alarm():
    """Set the handler of SIGALRM, for the time of a test."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("channel", ["inprocess", "local", "zeromq"])
def test_a_signals_handler_may_wait_for_a_call_while_its_thread_waits(channel, alarm):
    came = []
    with World(2, channel=channel) as world, world[0].activate():
        for _ in range(20):
            rpc.rpc_sync("worker1", workers.identity, args=(1,))
        alarm(lambda *_: came.append(rpc.rpc_sync("worker1", workers.identity, args=(7,), timeout=20)))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        rpc.rpc_sync("worker1", workers.sleep, args=(0.8,))
        assert came == [7]


@pytest.mark.parametrize("channel", ["inprocess", "local", "zeromq"])
def test_a_signals_handler_may_call_at_any_moment(channel, alarm):
    Finaliser.forget()

    def call(*_):
        try:
            Finaliser.outcomes.append(rpc.rpc_sync("worker1", workers.count, args=("finaliser",), timeout=20))
        except UsageError as error:
            Finaliser.errors.append(error)

    with World(2, channel=channel) as world, world[0].activate():
        alarm(call)
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        while len(Finaliser.outcomes) + len(Finaliser.errors) < 200:
            assert rpc.rpc_sync("worker1", workers.identity, args=(1,), timeout=20) == 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        made = len(Finaliser.outcomes) + len(Finaliser.errors)
        wait_until(lambda: len(workers.counted["finaliser"]), equals=made)


def test_a_lock_may_be_guarded_while_a_thread_asks_if_it_may_wait():
    locks = []

    class Guarding:
        def _is_owned(self):
            locks.append(threading.RLock())
            finalisers.guard(locks[-1])  # as another thread could, in the middle of the look at all locks
            return False

    asked = [Guarding() for _ in range(10)]
    for each in asked:
        finalisers.guard(each)
    assert finalisers.may_wait()
    with locks[0]:
        assert not finalisers.may_wait()
    assert finalisers.may_wait()


def test_a_finaliser_may_open_a_context_while_one_is_made(monkeypatch):
    """Python may collect garbage, and run the finaliser, while the thread makes a context under the lock."""
    with World(2) as world, world[0].activate():
        made, opened, done = contexts.Context, [], []

        def make(*arguments, **options):
            if not opened:
                opened.append(True)
                with dist_autograd.context():
                    done.append("in the finaliser")
            return made(*arguments, **options)

        def open_context():
            with world[0].activate(), dist_autograd.context():
                done.append("after it")

        monkeypatch.setattr(contexts, "Context", make)

        thread = threading.Thread(target=open_context, daemon=True)
        thread.start()
        thread.join(20)
        assert done == ["in the finaliser", "after it"]
