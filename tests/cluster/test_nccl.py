"""Interrupts and deaths end collectives of NCCL; a stand-in takes the place of NCCL and its GPU.

``tests/gpu/test_nccl.py`` does the same with the real NCCL.
"""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.waiting import LIMIT, MARK, wait_for_error, wait_for_marks, wait_until

import nbdist
from nbdist.cluster.worker import collective_errors, collectives, gloo, nccl
from nbdist.errors import RendezvousError

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "nccl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nccl")


@pytest.fixture(scope="module")
def shared(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_STAND_IN", str(folder))
        patch.syspath_prepend(str(STAND_IN))
        with nbdist.Cluster(3, preload="nccl_stand_in") as cluster:
            yield cluster


@pytest.fixture
def cluster(shared, folder):
    """Three idle workers in a process group that works, whatever the test before did."""
    if any(worker.lost for worker in shared.workers):
        shared.restart()
    shared.execute(f"import time; from nccl_stand_in import gpu; folder = {str(folder)!r}")
    shared.execute("t = torch.ones(1); dist.all_reduce(t); gpu.item(); assert t.item() == 3", timeout=LIMIT)
    yield shared
    for file in folder.iterdir():
        file.unlink()


STANDS = MARK + "dist.all_reduce(torch.ones(1))\ngpu.item()\nafterwards = True"


@pytest.mark.parametrize("abort", ["returns at once", "late"])
def test_an_interrupt_ends_a_wait_for_the_gpu_and_the_group_forms_anew(cluster, folder, abort):
    (folder / abort).touch()
    cell = cluster.execute(STANDS, 0, block=False)
    wait_for_marks(folder, 0)
    cluster.interrupt("worker0")
    error = wait_for_error(cell)
    assert type(error).__name__ == "KeyboardInterrupt", error
    assert "worker0: its process group was aborted, and forms anew once all workers are idle" in error.traceback
    assert cluster.evaluate("'afterwards' in globals()", 0) is False
    cluster.execute("t = torch.ones(1); dist.all_reduce(t); gpu.item(); assert t.item() == 3", timeout=LIMIT)


def test_a_cell_that_goes_on_after_the_interrupt_ends_well_once_the_abort_is_done(cluster, folder):
    (folder / "late").touch()
    wait = "try:\n    gpu.item()\nexcept KeyboardInterrupt:\n    print('it goes on')"
    cell = cluster.execute(f"{MARK}dist.all_reduce(torch.ones(1))\n{wait}", 0, block=False)
    wait_for_marks(folder, 0)
    cluster.interrupt("worker0")
    assert wait_for_error(cell) is None
    cluster.execute("t = torch.ones(1); dist.all_reduce(t); gpu.item(); assert t.item() == 3", timeout=LIMIT)


def test_a_second_interrupt_during_the_abort_changes_nothing(cluster, folder):
    (folder / "late").touch()
    cell = cluster.execute(STANDS, 0, block=False)
    wait_for_marks(folder, 0)
    cluster.interrupt("worker0")
    time.sleep(1)  # the abort takes 4 s; the second request to break off finds nothing more to do
    cluster.interrupt("worker0")
    error = wait_for_error(cell)
    time.sleep(1)  # the second answer may come after the cell's end
    assert "worker0: its process group was aborted, and forms anew once all workers are idle" in error.traceback
    cluster.execute("t = torch.ones(1); dist.all_reduce(t); gpu.item(); assert t.item() == 3", timeout=LIMIT)


def test_an_interrupt_ends_a_call_that_waits_for_the_gpu(cluster, folder):
    cluster.execute(f"def stand():\n    {MARK.strip()}\n    dist.all_reduce(torch.ones(1))\n    gpu.item()")
    cell = cluster.execute("rpc.rpc_sync('worker1', stand)", 0, block=False, quiet=True)
    wait_for_marks(folder, 1)
    cluster.interrupt("worker0")
    assert type(wait_for_error(cell)).__name__ == "KeyboardInterrupt"


def test_a_death_ends_waits_for_the_gpu_with_worker_lost(cluster, folder):
    cell = cluster.execute(STANDS, [0, 1], block=False)
    wait_for_marks(folder, 0, 1)
    os.kill(cluster.find("worker2").pid, signal.SIGKILL)
    error = wait_for_error(cell)
    for each in error.errors:
        assert each.name == "WorkerLost", each
        assert "worker2" in str(each)
        assert "forms the process group anew once all workers are idle" in str(each)
    assert cluster.evaluate("'afterwards' in globals()", [0, 1]) == [False, False]


def test_a_death_does_not_disturb_those_that_do_not_wait_for_the_gpu(cluster, folder):
    code = {
        0: "time.sleep(3); ended = 'slept'",
        1: "x = 0\nend = time.monotonic() + 3\nwhile time.monotonic() < end: x += 1\nended = 'computed'",
    }
    cells = [
        cluster.execute(f"dist.all_reduce(torch.ones(1), async_op=True)\n{MARK}{code[rank]}", rank, block=False)
        for rank in code
    ]
    wait_for_marks(folder, 0, 1)
    os.kill(cluster.find("worker2").pid, signal.SIGKILL)
    assert [wait_for_error(cell) for cell in cells] == [None, None]
    assert cluster.evaluate("ended", [0, 1]) == ["slept", "computed"]
    with pytest.raises(nbdist.WorkerLost, match="worker2"):
        cluster.execute("dist.all_reduce(torch.ones(1))", 0)


def test_a_death_ends_a_call_that_waits_for_the_gpu(cluster, folder):
    cluster.execute(f"def stand():\n    {MARK.strip()}\n    dist.all_reduce(torch.ones(1))\n    gpu.item()")
    cell = cluster.execute("rpc.rpc_sync('worker1', stand)", 0, block=False)
    wait_for_marks(folder, 1)
    os.kill(cluster.find("worker2").pid, signal.SIGKILL)
    error = wait_for_error(cell)
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker2" in str(error)


def test_inside_of_a_users_try_the_error_is_a_runtime_error(cluster, folder):
    code = "try:\n    gpu.item()\nexcept RuntimeError as error:\n    caught = str(error)"
    cell = cluster.execute(f"{MARK}dist.all_reduce(torch.ones(1))\n{code}", 0, block=False)
    wait_for_marks(folder, 0)
    os.kill(cluster.find("worker2").pid, signal.SIGKILL)
    assert wait_for_error(cell) is None
    assert "a collective of NCCL was aborted" in cluster.evaluate("caught", 0)


def test_an_abort_that_does_not_return_restarts_the_worker(cluster, folder):
    (folder / "never").touch()
    before = cluster.find("worker0").pid
    cell = cluster.execute(STANDS, 0, block=False)
    wait_for_marks(folder, 0)
    cluster.interrupt("worker0")
    error = wait_for_error(cell)
    assert isinstance(error, nbdist.WorkerLost), error
    assert str(error).startswith(
        "worker0 was restarted, because an abort of NCCL's collectives did not return within 5 s\nrun the cell again"
    )
    (folder / "never").unlink()
    wait_until(lambda: cluster.find("worker0").state, equals="idle")
    assert cluster.find("worker0").pid != before
    cluster.rebuild_process_group()


def test_an_abort_after_a_death_that_does_not_return_restarts_the_worker(cluster, folder):
    (folder / "never").touch()
    cell = cluster.execute(STANDS, 0, block=False)
    wait_for_marks(folder, 0)
    os.kill(cluster.find("worker2").pid, signal.SIGKILL)
    error = wait_for_error(cell)
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker0 was restarted, because an abort of NCCL's collectives did not return within 5 s" in str(error)
    (folder / "never").unlink()


def test_a_communicator_that_is_not_made_after_a_death_restarts_the_worker(cluster, folder):
    (folder / "making").touch()
    cell = cluster.execute(f"{MARK}dist.all_reduce(torch.ones(1))", 0, block=False)
    wait_for_marks(folder, 0)
    os.kill(cluster.find("worker2").pid, signal.SIGKILL)
    error = wait_for_error(cell, 2 * LIMIT)
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker0 was restarted, because a collective of NCCL did not end, although a member had died" in str(error)
    (folder / "making").unlink()


def test_a_group_whose_abort_does_not_return_is_not_formed_anew(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(nccl, "abortable", lambda group: [group])
        monkeypatch.setattr(nccl, "abort", lambda backends: False)
        with pytest.raises(RendezvousError, match="did not return within 5 s: the notebook restarts this worker, and"):
            collectives.Collectives().initialise(SimpleNamespace(secret=None), 2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


# -- the parts ----------------------------------------------------------------------------------------------------


def test_the_watchdog_never_ends_a_worker_unless_the_user_says_so(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TORCH_NCCL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ | {"TORCH_NCCL_ENABLE_MONITORING": "1"})
    nccl.set_environment()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


HAS_NCCL2 = hasattr(dist, "ProcessGroupNCCL2")


@pytest.mark.parametrize(
    ("backend", "device", "value", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:2", "1", "cuda:2"),
        ("nccl", "cuda:0", "1", "cuda:0"),
        ("cpu:gloo,cuda:nccl2", "cuda:1", "0", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cuda:2", "0", None),
        ("gloo", "cuda:2", "1", None),
        ("cpu:gloo,cuda:nccl", "cpu", "1", None),
    ],
)
def test_the_newer_nccl_is_told_its_gpu(backend, device, value, expected, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", value)
    found = nccl.gpu_to_bind(backend, device)
    assert found == (torch.device(expected) if expected and HAS_NCCL2 else None)


@pytest.mark.skipif(not HAS_NCCL2, reason="this torch has one NCCL")
@pytest.mark.parametrize(
    ("asked", "maker"), [(None, "_create_nccl_process_group"), ("1", "_create_nccl2_process_group")]
)
def test_nccl_means_the_older_one_on_workers_unless_the_user_says_so(asked, maker, monkeypatch):
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", asked)
    # The zygote was started with another environment, hence a plain process.
    code = (
        "from nbdist.cluster.worker import nccl; nccl.set_environment(); import torch.distributed as dist;"
        "backend = dist.Backend; getattr(backend, '_ensure_backend_registered', str)('nccl');"
        "print(backend._plugins['NCCL'].creator_fn.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == maker, done.stderr


def test_a_thread_that_runs_in_c_waits_and_one_that_runs_python_or_sleeps_does_not():
    end = threading.Event()

    def compute():
        while not end.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)

    def loop():
        while not end.is_set():
            pass

    def sleep():
        while not end.is_set():
            time.sleep(1)

    threads = [threading.Thread(target=each) for each in (compute, loop, sleep, end.wait)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    try:
        idents = [thread.ident for thread in threads]
        found = nccl.waits(idents)
        assert list(found) == idents[:1]
        assert not nccl.is_stuck(found), "it is in no collective"
        assert not nccl.waits(idents, collectives_only=True)
    finally:
        end.set()
        for thread in threads:
            thread.join()


class Shell:
    """A shell that keeps what it shows."""

    async def run_code(self, code, result):
        try:
            exec(code)
        except Exception as error:
            result.error_in_exec = error
            self.showtraceback(running_compiled_code=True)
        return True

    def showtraceback(self, exc_tuple=None, running_compiled_code=False):
        self.shown = exc_tuple or sys.exc_info()


def test_an_interrupt_in_the_store_is_an_interrupt():
    shell, result = Shell(), SimpleNamespace(error_in_exec=None)
    collective_errors.install(shell, collectives.Collectives())
    text = "[1] is setting up NCCL communicator ... got error: KeyboardInterrupt: <EMPTY MESSAGE>"
    asyncio.run(shell.run_code(f"raise RuntimeError({text!r})", result))
    assert shell.shown[0] is KeyboardInterrupt
    assert type(result.error_in_exec) is KeyboardInterrupt
    asyncio.run(shell.run_code("raise RuntimeError('of the user')", result))
    assert shell.shown[0] is RuntimeError
    assert type(result.error_in_exec) is RuntimeError


class Backend:
    """A backend that notes its abort, which returns when ``may_return`` is set."""

    def __init__(self, may_return):
        self.may_return, self.aborted = may_return, False

    def abort(self):
        self.aborted = True
        self.may_return.wait()


def test_backends_are_aborted_at_the_same_time(monkeypatch, capfd):
    free, stuck = threading.Event(), threading.Event()
    free.set()
    backends = [Backend(stuck), Backend(free)]
    monkeypatch.setattr(nccl, "_ABORTS_WITHIN", 0.2)
    try:
        assert not nccl.abort(backends)
        assert [backend.aborted for backend in backends] == [True, True]
    finally:
        stuck.set()
    assert nccl.abort(backends)
    assert nccl.abort([])
    assert nccl.abort([object()]), "an error counts as done"


def test_of_a_mixed_group_only_nccls_backend_is_aborted():
    gloo = dist.ProcessGroupGloo
    made = gloo.__new__(gloo)

    class Group:
        def __init__(self):
            self._device_types = (torch.device("cpu"), torch.device("cuda"))
            self.backends = {"cpu": made, "cuda": Backend(None)}

        def _get_backend(self, device):
            return self.backends[device.type]

    group = Group()
    assert nccl.abortable(group) == [group.backends["cuda"]]
    group.backends["cuda"] = SimpleNamespace(wrapped_pg=(wrapped := Backend(None)))
    assert nccl.abortable(group) == [wrapped]
    group.backends["cuda"] = made  # one backend for both
    assert nccl.abortable(group) == []


@pytest.mark.parametrize("keeps_gil", [True, False])
def test_a_thread_that_waits_for_the_gil_does_not_seem_to_run(keeps_gil):
    """One that computes in C, without the GIL, does: so does one that waits for a GPU."""
    over = threading.Event()

    def work():
        while not over.is_set():
            if not keeps_gil:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.05)  # into the work
        looks = [gloo.system_call(thread.native_id)[0] for _ in range(50)]
    finally:
        over.set()
        thread.join()
    assert (looks.count("running") > 25) != keeps_gil
