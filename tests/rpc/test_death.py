"""Workers that die, hang, leave and come back; the waits of those who stay (G3, G5)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.processes import workers
from helpers.processes.listening import free_port
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.channel.locked_directory import sweep
from nbdist.channel.secret import runtime_directory
from nbdist.rpc.api import current_agent
from nbdist.rpc.references.reference_table import References
from nbdist.testing import World


def run_directories() -> set[str]:
    return {path.name for path in runtime_directory().glob("agent-*")}


def test_sigkill_among_a_thousand_calls():
    before = run_directories()
    with workers.world(3, graceful=False) as others:
        rref = rpc.remote("worker1", workers.Counter)
        rref.to_here()
        mine = rpc.RRef("mine")
        rpc.rpc_sync("worker1", workers.keep, args=(mine,))
        wait_until(lambda: current_agent().statistics()["forks_of_owned"] == 1)
        slow = [rpc.rpc_async("worker1", workers.sleep, args=(30,)) for _ in range(8)]
        calls = slow + [rpc.rpc_async("worker1", workers.identity, args=(i,), timeout=0) for i in range(992)]
        failed: list[float] = []
        slow[0].add_done_callback(lambda _: failed.append(time.monotonic()))
        killed = others.kill("worker1")
        outcomes = []
        for call in calls:
            try:
                outcomes.append(call.wait(20))
            except nbdist.WorkerLost as error:
                outcomes.append(error)
        lost = [outcome for outcome in outcomes if isinstance(outcome, nbdist.WorkerLost)]
        assert len(lost) >= 8
        assert "worker1 died" in str(outcomes[0])
        assert "sleep" in str(outcomes[0])
        print(f"noticed {(failed[0] - killed) * 1e3:.1f} ms after the kill")
        # The rest works, and says what it knows.
        assert rpc.rpc_sync("worker2", workers.name) == "worker2"
        with pytest.raises(nbdist.WorkerLost, match="worker1 died"):
            rpc.rpc_sync("worker1", workers.name)
        with pytest.raises(nbdist.WorkerLost, match="worker1"):
            rref.to_here()
        with pytest.raises(nbdist.WorkerLost, match="worker1"):
            rref.rpc_sync().add(1)
        assert "dead" in repr(rref)
        # What it held is dropped.
        wait_until(lambda: current_agent().statistics()["forks_of_owned"] == 0)
        # Its directory is removed by who saw it die; ours are still there.
        pid = others.processes["worker1"].pid
        wait_until(lambda: not any(name.startswith(f"agent-{pid}-") for name in run_directories()))
    sweep()  # worker2 was killed as well, with nobody left to see it: whoever starts next does this
    assert run_directories() <= before


def test_a_third_that_waits_for_the_dead():
    """worker2 waits for worker1 on our behalf; worker1's death ends that wait as well."""
    with workers.world(3, graceful=False) as others:
        through = rpc.rpc_async("worker2", workers.call_there, args=("worker1", workers.sleep, 60))
        rref = rpc.remote("worker1", workers.sleep, args=(60,))
        passed = rpc.rpc_async("worker2", workers.fetch, args=(rref,))
        wait_until(lambda: rpc.rpc_sync("worker1", workers.statistics)["running_calls"] >= 4)
        others.kill("worker1")
        for future in (through, passed):
            with pytest.raises(nbdist.NbdistError, match="worker1"):
                future.wait(20)


def test_calls_of_the_dead_do_not_wait_on_for_a_value():
    with workers.world(3, graceful=False) as others:
        rref = rpc.remote("worker1", workers.sleep, args=(60,))
        asked = [rpc.rpc_async("worker2", function, args=(rref,)) for function in (workers.fetch, workers.call_method)]

        def running():
            return rpc.rpc_sync("worker1", workers.statistics)["running_calls"]

        wait_until(running, equals=4)  # what makes the value, the two that wait for it, and this one
        others.kill("worker2")
        wait_until(running, equals=2)
        for future in asked:
            with pytest.raises(nbdist.WorkerLost):
                future.wait(20)


@pytest.mark.parametrize("event", ["expect", "on_fork_request"])
def test_a_member_lost_while_its_message_is_handled_holds_nothing_after(event, monkeypatch):
    original, handled = getattr(References, event), threading.Event()

    def meanwhile(references, *arguments):
        if references is not owner.references:
            return original(references, *arguments)
        lost = threading.Thread(target=owner.lose, args=(holder.me.incarnation, "died"))
        lost.start()
        lost.join(0.3)  # where a loss does not wait for the message, it is over now
        try:
            return original(references, *arguments)
        finally:
            handled.set()

    monkeypatch.setattr(References, event, meanwhile)  # before the world is made, whose agents list their handlers
    with World(3) as world:
        lender, owner, holder = world
        if event == "expect":
            with holder.activate():
                held = rpc.remote("worker1", workers.identity, args=(1,))
        else:
            with lender.activate():
                lent = rpc.remote("worker1", workers.identity, args=(1,))
                lent.to_here()
                held = rpc.rpc_async("worker2", workers.keep, args=(lent,))
        assert handled.wait(20)
        wait_until(lambda: owner.links.connected(holder.me.incarnation) is None)
        wait_until(lambda: all(holder.me.incarnation not in holders for *_, holders in owner.references.owned()))
        del held


def test_a_stopped_local_process_is_not_lost():
    with workers.world(2) as others:
        process = others.processes["worker1"]
        workers.stop(process.pid)
        try:
            future = rpc.rpc_async("worker1", workers.name, timeout=30)
            with pytest.raises(nbdist.RpcTimeout):
                future.wait(1.5)
            with pytest.raises(nbdist.RpcTimeout, match="has not acknowledged"):
                rpc.rpc_sync("worker1", workers.name, timeout=0.3)
        finally:
            process.send_signal(signal.SIGCONT)
        assert future.wait() == "worker1"


def test_leaving_without_the_others():
    code = "import time; workers.released.wait(60)"
    with workers.world(2, graceful=False, then=f"{code}\nrpc.shutdown(graceful=False)\nraise SystemExit") as others:
        held = rpc.rpc_async("worker1", workers.sleep, args=(60,))
        with contextlib.suppress(nbdist.WorkerLost):  # it may leave before it answers
            rpc.rpc_sync("worker1", workers.release)
        with pytest.raises(nbdist.WorkerLost, match="worker1 has shut down"):
            held.wait(20)
        with pytest.raises(nbdist.WorkerLost, match="worker1 has shut down"):
            rpc.rpc_sync("worker1", workers.name)
        others.end()


def test_exit_without_shutdown_is_told():
    with workers.world(2, graceful=False, then="workers.released.wait(60); raise SystemExit(0)"):
        said: list[str] = []
        rpc.rpc_async("worker1", workers.release)

        def gone() -> bool:
            try:
                rpc.rpc_sync("worker1", workers.name, timeout=5)
            except nbdist.WorkerLost as error:
                said.append(str(error))
            return bool(said)

        wait_until(gone)
        assert "exited without shutdown" in said[0] or "died" in said[0]


def test_shutdown_with_a_limit_names_who_is_missing():
    with workers.world(3, graceful=False, then="workers.released.wait(60)"):
        rpc.rpc_sync("worker1", workers.release)
        with pytest.raises(nbdist.RendezvousError, match="worker2 to call shutdown"):
            rpc.shutdown(timeout=5.0)
        assert not workers.is_running()


def test_shutdown_with_a_limit_names_who_still_runs_a_call():
    with workers.world(3, graceful=False, then="workers.released.wait(60)\nrpc.shutdown(timeout=20)"):
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, workers.release)
        rpc.rpc_async("worker2", workers.sleep, args=(4,))
        with pytest.raises(nbdist.RendezvousError, match="for worker0, worker2 to end the calls that run"):
            rpc.shutdown(timeout=2.0)


def test_shutdown_with_a_limit_names_who_does_not_answer():
    with workers.world(3, graceful=False, then="workers.released.wait(60)\nrpc.shutdown(timeout=20)") as others:
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, workers.release)
        process = others.processes["worker2"]
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(nbdist.RendezvousError, match="shutdown: still waiting for worker2 to answer"):
                rpc.shutdown(timeout=4.0)
        finally:
            process.send_signal(signal.SIGCONT)


def test_shutdown_names_the_first_member_where_that_is_missing(tmp_path):
    said = tmp_path / "said"
    code = (
        "try: rpc.shutdown(timeout=1.0)\n"
        f"except Exception as error: open({str(said)!r}, 'w').write(f'{{type(error).__name__}}: {{error}}')\n"
        "raise SystemExit(0)"
    )
    with workers.world(2, graceful=False, then=code):
        wait_until(lambda: said.exists() and said.read_text())
    assert said.read_text().startswith("RendezvousError: shutdown: still waiting for worker0 to call shutdown. ")


def test_shutdown_without_one_that_dies_meanwhile():
    with workers.world(3, graceful=False, then="workers.released.wait(60)") as others:
        rpc.rpc_sync("worker1", workers.release)
        killer = threading.Timer(0.5, lambda: others.kill("worker2"))
        killer.start()
        with pytest.raises(nbdist.WorkerLost, match="worker2"):
            rpc.shutdown()
        killer.join()
        others.output("worker1", 20)


def test_init_that_fails_leaves_nothing_behind():
    before = run_directories()
    threads = threading.active_count()
    store = tempfile.mktemp(prefix="nbdist-test-")
    options = rpc.RpcBackendOptions(init_method=f"file://{store}", rpc_timeout=0.5)
    with pytest.raises(nbdist.RendezvousError, match="no sign of rank 1"):
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    assert run_directories() <= before
    wait_until(lambda: threading.active_count() <= threads)
    other = workers.Workers()
    try:
        other.start("worker1", workers.member("worker1", 1, 2, store))
        options = rpc.RpcBackendOptions(init_method=f"file://{store}")
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2
        rpc.shutdown()
        other.output("worker1")
    finally:
        other.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)


def test_a_tcp_store_can_be_tried_again_at_once():
    method = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2):
        with pytest.raises(nbdist.RendezvousError):
            rpc.init_rpc(
                "worker0",
                rank=0,
                world_size=2,
                rpc_backend_options=rpc.RpcBackendOptions(init_method=method, rpc_timeout=0.3),
            )
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=method))
    assert rpc.rpc_sync("worker0", workers.name) == "worker0"
    rpc.shutdown()


def test_a_name_can_be_taken_again_in_a_dynamic_world():
    store = tempfile.mktemp(prefix="nbdist-test-")
    others = workers.Workers()
    options = rpc.RpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc("worker0", rank=0, rpc_backend_options=options)
    try:
        code = workers.member("late", 1, None, store, then="workers.released.wait(60)")
        others.start("late", code)
        wait_until(lambda: len(current_agent().membership.members()) == 2)
        rref = rpc.remote("late", workers.Counter, args=(1,))
        assert rref.rpc_sync().add(1) == 2
        others.kill("late")
        wait_until(lambda: len(current_agent().membership.members()) == 1)
        others.start("late", code)
        wait_until(lambda: len(current_agent().membership.members()) == 2)
        assert rpc.rpc_sync("late", workers.count, args=("fresh",)) == 1
        with pytest.raises(nbdist.WorkerLost, match="late"):
            rref.to_here()
        # A third one joins, and takes part in everything.
        others.start("third", workers.member("third", 2, None, store, then="workers.released.wait(60)"))
        wait_until(lambda: len(current_agent().membership.members()) == 3)
        wait_until(lambda: rpc.rpc_sync("late", workers.statistics)["members"] == 3)  # it says hello in turn
        assert rpc.rpc_sync("late", workers.call_there, args=("third", workers.name)) == "third"
        again = rpc.remote("third", torch.ones, args=(2,))
        assert rpc.rpc_sync("late", workers.fetch, args=(again,)).tolist() == [1, 1]
        for name in ("late", "third"):
            rpc.rpc_sync(name, workers.release)
            assert others.output(name)[1] == ""
        wait_until(lambda: len(current_agent().membership.members()) == 1)
    finally:
        rpc.shutdown()
        others.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "wait",
    [
        "rpc.rpc_sync('me', time.sleep, args=(30,))",
        pytest.param("torch.futures.wait_all([f])", marks=pytest.mark.soak),
        "torch.futures.wait_all([f, t])",
        pytest.param("torch.futures.collect_all([f, t]).wait()", marks=pytest.mark.soak),
        "t.wait()",
        pytest.param("torch.futures.wait_all([t])", marks=pytest.mark.soak),
        "f.wait()",
        pytest.param("rpc.wait_all([f])", marks=pytest.mark.soak),
        "r.to_here()",
    ],
)
def test_ctrl_c_ends_every_wait(wait):
    code = f"""
import os, signal, tempfile, threading, time, torch
from nbdist import rpc
options = rpc.RpcBackendOptions(init_method="file://" + tempfile.mktemp())
rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
f = rpc.rpc_async("me", time.sleep, args=(30,))
r = rpc.remote("me", time.sleep, args=(30,))
t = torch.futures.Future()
f.add_done_callback(lambda _: t.set_result(1))
def interrupt():
    global sent
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.5, interrupt).start()
try:
    {wait}
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - sent, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.stdout.startswith("interrupted"), done.stderr
    print(done.stdout)


def test_leaving_a_dynamic_world_does_not_wait_for_one_that_hangs(tmp_path):
    store = str(tmp_path / "store")
    others = workers.Workers()
    rpc.init_rpc("worker0", rank=0, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}"))
    try:
        others.start("late", workers.member("late", 1, None, store, then="workers.released.wait(60)"))
        wait_until(lambda: len(current_agent().membership.members()) == 2)
        rref = rpc.remote("late", workers.Counter)
        assert rref.rpc_sync().add(1) == 1
        workers.stop(others.processes["late"].pid)
        ended = threading.Event()

        def leave() -> None:
            rpc.shutdown()
            ended.set()

        threading.Thread(target=leave, daemon=True).start()
        assert ended.wait(20)  # the deletion of `rref` will never be acknowledged
    finally:
        others.end()
