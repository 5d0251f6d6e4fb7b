"""The thread that waits for an answer reads it: when it does, when others do, and what Ctrl-C may not break."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist import rpc, trace
from nbdist.channel import gate, local, machine
from nbdist.errors import EncodeError, RpcTimeout, WorkerLost
from nbdist.rpc.calls.waiting_reader import WaitingReader
from nbdist.rpc.latch import Latch
from nbdist.testing import World
from nbdist.wire import quick
from nbdist.wire.messages import Cast, Payload


@pytest.fixture
def pair():
    with World(2, channel="local") as world, world[0].activate():
        yield world


@pytest.fixture
def readers():
    """The threads in which calls ended."""
    threads = []
    end = trace.subscribe(lambda event, fields: event == "call.ended" and threads.append(threading.get_ident()))
    yield threads
    end()


def test_who_waits_reads_the_answer(pair, readers):
    for value in range(20):
        assert rpc.rpc_sync("worker1", workers.identity, args=(value,)) == value
        rref = rpc.remote("worker1", workers.identity, args=(torch.ones(2) * value,))
        assert rref.to_here().eq(value).all()
        assert rref.rpc_sync().sum() == 2 * value

    def has_read():
        rpc.rpc_sync("worker1", workers.identity, args=(0,))
        return threading.get_ident() in readers

    # How often it comes to that depends on what else the machine does; without guests it never would.
    wait_until(has_read)


@pytest.mark.parametrize("channel", ["inprocess", "zeromq"])
def test_where_one_thread_reads_there_are_no_guests(channel, readers):
    with World(2, channel=channel) as world, world[0].activate():
        assert rpc.rpc_sync("worker1", workers.identity, args=(1,)) == 1
        assert threading.get_ident() not in readers


def test_what_somebody_else_settles_ends_the_wait(pair):
    guest = pair[0].read_as_guest
    for _ in range(3):
        guest.__self__.skips = 0
        outcome = Latch()
        threading.Timer(0.05, outcome.try_settle, (7, None)).start()
        start = time.monotonic()
        assert outcome.wait(guest) == 7
        assert time.monotonic() - start < 5
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2  # nobody is called any more
    assert rpc.rpc_sync("worker1", workers.identity, args=(1,)) == 1


def test_what_is_settled_before_or_by_a_call_that_comes_too_late(pair):
    guest = pair[0].read_as_guest
    outcome, seen = Latch(), []
    threading.Timer(0.05, lambda: (seen.append(outcome.on_settle), outcome.try_settle(1, None))).start()
    assert outcome.wait(guest) == 1
    skips = guest.__self__.skips
    seen[0]()  # by who saw the guest before it left
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2
    assert guest.__self__.skips == skips
    outcome = Latch()
    outcome.try_settle(1, None)
    assert outcome.wait(guest) == 1


def test_what_is_asked_of_a_worker_whose_main_thread_reads_runs_elsewhere(pair, readers):
    assert rpc.rpc_sync("worker1", workers.call_there, args=("worker0", threading.get_ident)) != threading.get_ident()
    assert rpc.rpc_sync("worker1", workers.recurse, args=(["worker0", "worker1"], 20)) == 20


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), torch.overrides.BaseTorchFunctionMode],
    ids=["no_grad", "inference_mode", "device", "function mode"],
)
def test_the_modes_of_who_waits_are_nobody_elses(pair, mode, readers):
    """What is read is read as always: the others' tensors and histories do not depend on this thread."""
    t = torch.ones(2)
    with mode():
        for _ in range(10):
            found = rpc.rpc_sync("worker1", workers.identity, args=(t,))
            assert found.device.type == "cpu"
            assert not found.is_inference()
    assert threading.get_ident() not in readers
    assert rpc.rpc_sync("worker1", workers.call_there, args=("worker0", torch.is_grad_enabled))


def test_what_is_left_when_the_guest_goes_is_read_by_others(pair, monkeypatch):
    guest, channel, woken = pair[0].read_as_guest, pair[0].channel, []
    wake = channel.wake
    monkeypatch.setattr(channel, "has_more", lambda: True)
    monkeypatch.setattr(channel, "wake", lambda: (woken.append(threading.get_ident()), wake()))
    outcome = Latch()
    outcome.try_settle(1, None)
    guest(outcome)
    assert threading.get_ident() in woken


def test_a_fault_of_ours_while_reading_is_not_the_callers(pair, caplog):
    def fault(*_):
        raise KeyError("a bug")

    pair[0].handle_cast("fault", fault)
    for _ in range(5):
        pair[0].read_as_guest.__self__.skips = 0
        cast = Cast("fault", b"", Payload())
        threading.Timer(0.05, pair[1].post, (pair[0].me.incarnation, cast)).start()
        assert rpc.rpc_sync("worker1", workers.sleep, args=(0.15,)) == 0.15
    assert "reading failed" in caplog.text


def test_many_threads_wait_and_one_of_them_is_the_guest(pair):
    wrong = []

    def work(start):
        with pair[0].activate():
            for value in range(start, start + 200):
                if rpc.rpc_sync("worker1", workers.identity, args=(value,)) != value:
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert pair[0].statistics()["pending_calls"] == 0


def test_a_call_that_is_never_answered_ends_in_time(pair):
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", workers.sleep, args=(2,), timeout=0.3)
    pair.kill(1)
    with pytest.raises(WorkerLost):
        rpc.rpc_sync("worker1", workers.identity, args=(1,))


def test_the_end_of_the_agent_ends_the_wait(pair):
    threading.Timer(0.2, pair[0].close, ("has shut down",)).start()
    with pytest.raises(WorkerLost, match="shut down"):
        rpc.rpc_sync("worker1", workers.sleep, args=(2,))


INTERRUPTED = """
import os, random, signal, sys, threading, time
from helpers.processes import workers
from helpers.waiting import wait_until
from nbdist import rpc
from nbdist.testing import World

with World(2, channel="local") as world, world[0].activate():
    calls = interrupts = 0
    which = getattr(signal, sys.argv[3])
    over = threading.Event()

    def interrupt():
        chance = random.Random(int(sys.argv[1]))
        while not over.wait(chance.random() * 0.004):
            os.kill(os.getpid(), which)

    # The handler is kept out of the test's own code: it only raises in a call.
    inside = False

    def handler(number, frame):
        if inside:
            raise KeyboardInterrupt

    signal.signal(which, handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        try:
            inside = True
            value = rpc.rpc_sync("worker1", workers.identity, args=(calls,))
            inside = False
            assert value == calls
            calls += 1
        except KeyboardInterrupt:
            inside = False
            interrupts += 1
    over.set()
    thread.join()
    assert signal.getsignal(which) is handler
    for value in range(200):
        assert rpc.rpc_sync("worker1", workers.identity, args=(value,), timeout=10) == value
    wait_until(lambda: not world[0].statistics()["pending_calls"])
    wait_until(lambda: not world[0].statistics()["unacknowledged"])
    print(calls, interrupts, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("seed", "which"), [(1, "SIGINT"), pytest.param(2, "SIGINT", marks=pytest.mark.soak), (3, "SIGALRM")]
)
def test_signals_at_any_time_lose_no_message(seed, which):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(seed), "3", which],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    calls, interrupts = map(int, done.stdout.split())
    assert calls > 50
    assert interrupts > 50


def test_ctrl_c_ends_the_wait_at_once(pair):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("worker1", workers.sleep, args=(5,))
    assert time.monotonic() - start < 4.5
    assert rpc.rpc_sync("worker1", workers.identity, args=(1,)) == 1


FORKED = """
import os, signal, sys, threading, time
from helpers.processes import workers
from nbdist import rpc
from nbdist.testing import World

with World(2, channel="local") as world, world[0].activate():
    guest = world[0].read_as_guest.__self__

    def fork():
        while not guest._thread:
            time.sleep(0.001)
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                os._exit(42)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

    forking = threading.Thread(target=fork)
    forking.start()
    rpc.rpc_sync("worker1", workers.sleep, args=(1.0,))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rpc.rpc_sync("worker1", workers.sleep, args=(0.1,))
    forking.join()
os._exit(0)
"""


def test_ctrl_c_in_a_child_that_another_thread_forks():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "42\n", done.stderr


def test_who_calls_a_guest_that_is_leaving_calls_nobody(pair, monkeypatch):
    """The settler has seen the guest, which leaves before it is called: nobody must be called for good."""
    guest, channel, outcome = pair[0].read_as_guest.__self__, pair[0].channel, Latch()
    real, leave = threading.get_ident, threading.Event()
    settler = threading.Thread(target=lambda: outcome.try_settle(1, None))

    def get_ident():
        if real() == settler.ident and not leave.is_set():
            leave.set()
            channel.wake()  # the guest finds that it is settled, and wants to leave
            time.sleep(0.1)
        return real()

    calls = []
    for name in ("call", "called"):
        real_one = getattr(channel, name)
        monkeypatch.setattr(channel, name, lambda name=name, real_one=real_one: (calls.append(name), real_one()))
    monkeypatch.setattr("nbdist.rpc.calls.waiting_reader.threading.get_ident", get_ident)
    threading.Timer(0.1, settler.start).start()
    assert outcome.wait(guest.read) == 1
    settler.join()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2
    assert calls[-1:] != ["call"], "the next guest would be called in vain"


# --- the gate, which keeps what comes from waking others --------------------------------------------


OWNERS = []


def note_owner():
    OWNERS.append(WORLD[0][0].channel.gate.owner)


WORLD = []


class Steady:
    """What stands in for `Spinning`: each wait begins with a look, or none does."""

    def __init__(self, is_worth_while):
        self.is_worth_while = is_worth_while

    def waited(self, seconds, looked=0.0):
        pass


@pytest.fixture
def brisk(monkeypatch):
    """A world in which guests look without sleeping, and threads of the pool, which would shut the gate too, never."""
    monkeypatch.setattr(machine, "cores", lambda: 2)  # on a single core nobody looks
    of_readers_and_of_guests = itertools.cycle([Steady(False), Steady(True)])
    monkeypatch.setattr(local, "Spinning", lambda: next(of_readers_and_of_guests))
    with World(2, channel="local") as world, world[0].activate():
        WORLD[:] = [world]
        OWNERS.clear()
        for _ in range(20):
            rpc.rpc_sync("worker1", workers.identity, args=(1,))
        wait_until(lambda: world[0].channel.gate.owner == 0)
        yield world
        wait_until(lambda: world[0].channel.gate.owner == 0)
        WORLD.clear()


@pytest.mark.skipif(not quick.USUAL_IS_ON, reason="NBDIST_USUAL=0: a guest leaves each answer to the pool, and rests")
def test_the_gate_is_shut_while_the_caller_looks_and_open_afterwards(brisk, monkeypatch):
    monkeypatch.setattr(local, "POLL_SECONDS", 10.0)  # it looks until the answer is there, however long that takes
    rpc.rpc_sync("worker1", note_owner)
    assert brisk[0].channel.gate.owner == 0
    assert OWNERS.pop() == threading.get_ident()


def is_opened():
    """Return whether worker0's gate is opened, by its owner alone, while this call runs."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: WORLD[0][0].channel.gate.owner == 0, within=5)
        return True
    return False


@pytest.mark.parametrize("kind", ["rests", "in a mode"])
def test_a_caller_that_does_not_read_leaves_the_gate_open(brisk, monkeypatch, kind):
    monkeypatch.setattr(local, "POLL_SECONDS", 1000.0)
    monkeypatch.setattr(gate, "OPEN_AFTER", 1000.0)
    guest = brisk[0].read_as_guest.__self__
    if kind == "rests":
        guest.skips = 1
    with torch.inference_mode(kind == "in a mode"):
        assert rpc.rpc_sync("worker1", is_opened, timeout=20)


def test_a_caller_beside_the_guest_leaves_the_gate_open():
    """While another thread is the guest, as a fake channel has it: a real guest would shut the gate itself."""
    is_guest, answer, opened = threading.Event(), threading.Event(), []
    channel = SimpleNamespace(
        expect_no_more=lambda: opened.append(threading.get_ident()), has_more=lambda: False, call=answer.set
    )
    channel.called = answer.clear
    reader = WaitingReader(
        channel, SimpleNamespace(closed=False), lambda _: is_guest.set() or (answer.wait(20) and None), print
    )
    outcome = Latch()
    guest = threading.Thread(target=outcome.wait, args=(reader.read,))
    guest.start()
    assert is_guest.wait(20)
    reader.read(Latch())
    assert opened == [threading.get_ident()]
    outcome.try_settle(1, None)
    guest.join(20)
    assert opened == [threading.get_ident(), guest.ident]


def test_a_caller_whose_answer_takes_long_sleeps_with_the_gate_open(brisk, monkeypatch):
    monkeypatch.setattr(gate, "OPEN_AFTER", 1000.0)
    assert rpc.rpc_sync("worker1", is_opened, timeout=20)


def test_a_call_that_is_not_sent_leaves_the_gate_open(brisk):
    class Unsendable:
        def __reduce__(self):
            raise ValueError("not this one")

    with pytest.raises(EncodeError, match="not this one"):
        rpc.rpc_sync("worker1", workers.identity, args=(Unsendable(),))
    assert brisk[0].channel.gate.owner == 0
    brisk[1].close("is gone")
    with pytest.raises(WorkerLost):
        rpc.rpc_sync("worker1", workers.identity, args=(1,))
    assert brisk[0].channel.gate.owner == 0


def test_a_gate_left_shut_does_not_keep_messages_for_long(brisk):
    """As after a Ctrl-C between the send and the wait."""
    shut = threading.Thread(target=brisk[0].channel.gate.shut)
    shut.start()
    shut.join()
    with brisk[1].activate():
        assert rpc.rpc_sync("worker0", workers.identity, args=(1,), timeout=20) == 1
