"""The messages of errors of a cluster that no other test provokes, without a cluster where that is possible."""

from __future__ import annotations

import hmac
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch.distributed as dist

from nbdist import rpc
from nbdist.cluster import cell_values
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.executor import WorkerExecutor
from nbdist.cluster.jupyter import jupyter_wire
from nbdist.cluster.jupyter.kernel_connection import KernelConnection
from nbdist.cluster.kernels.workers import Worker, require_alive
from nbdist.cluster.launching import launcher_of
from nbdist.cluster.processes import run_directory
from nbdist.cluster.processes.group_store import Folders, FolderStore
from nbdist.cluster.processes.worker_processes import Processes
from nbdist.cluster.spec import Spec
from nbdist.cluster.worker import collectives, kernel, nccl, non_members
from nbdist.errors import EncodeError, GroupError, ProtocolError, RendezvousError, UnknownWorker, UsageError, WorkerLost
from nbdist.testing import World

KEY = b"key"


def cluster(**now):
    """A cluster of two workers that has not been started."""
    found = Cluster(2)
    for name, value in now.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda: cluster().find("worker9"), UnknownWorker, r"this cluster has no worker 'worker9'; its workers are "),
        (lambda: cluster(_pid=1).start(), UsageError, r"this cluster belongs to the process that this one was forked"),
        (
            lambda: cluster(_state="starting").start(),
            UsageError,
            r"another thread is starting this cluster; wait until",
        ),
        (lambda: cluster(_state="ended").start(), UsageError, r"this cluster has been shut down; make another"),
        (
            lambda: cluster().references(SimpleNamespace(kept=None)),
            UsageError,
            r"the workers have no value of this cell: it was executed without keep=True",
        ),
        (lambda: cluster().push({"a b": 1}), UsageError, r"'a b' is not a variable's name, so it cannot be pushed"),
        (
            lambda: cluster().pull("a + b"),
            UsageError,
            r"'a \+ b' is not a variable's name; `%remote TARGET expression`",
        ),
        (
            lambda: launcher_of(Spec(2, launcher="slurm")),
            UsageError,
            r"there is no launcher 'slurm'; the installed ones are ",
        ),
        (kernel.setup, UsageError, r"this process is not a worker of a cluster: call this on a worker"),
        (
            lambda: WorkerExecutor.submit(SimpleNamespace(_is_shut_down=True), max),
            UsageError,
            r"this executor has been shut down; cluster.executor\(\) makes another",
        ),
    ],
)
def test_what_is_refused(use, error, text):
    with pytest.raises(error, match=text):
        use()


def test_no_cluster_starts_beside_rpc(tmp_path):
    rpc.init_rpc(
        "alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/a")
    )
    try:
        with pytest.raises(UsageError, match=r"RPC runs in this process already; call rpc.shutdown\(\) before"):
            Cluster(1).start()
    finally:
        rpc.shutdown()


def signed(*parts):
    """The frames of a message with these four parts."""
    packed = [msgspec.json.encode(part) for part in parts]
    signature = hmac.new(KEY, b"".join(packed), "sha256").hexdigest().encode()
    return [b"<IDS|MSG>", signature, *packed]


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"no delimiter"], r"a kernel sent something that is no Jupyter message: "),
        ([b"<IDS|MSG>", b"wrong", b"{}", b"{}", b"{}", b"{}"], r"a kernel's message has a wrong signature"),
        (signed({}, {}, {}, [1]), r"its header, parent, metadata and content must be objects"),
        (signed({"msg_id": 3}, {}, {}, {}), r"its id is 3, its type None, its parent's id ''; all must be texts"),
    ],
)
def test_what_is_no_message_of_a_kernel(frames, text):
    with pytest.raises(ProtocolError, match=text):
        jupyter_wire.decode(KEY, frames)


def test_a_kernel_that_has_not_started():
    starting = SimpleNamespace(_closed=None, _session="s", _key=KEY, _sockets={})
    with pytest.raises(WorkerLost, match=r"the kernel of the worker has not started yet: try again"):
        KernelConnection.send(starting, "kernel_info_request", {})


def test_a_runtime_directory_that_is_too_long_for_a_cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(run_directory, "runtime_directory", lambda: tmp_path / ("deep/" * 16))
    with pytest.raises(UsageError, match=r"is too long for sockets in it; set NBDIST_RUNTIME_DIR to a shorter one"):
        run_directory.make_folder()


@pytest.mark.parametrize(
    ("now", "error", "text"),
    [
        ({"_closing": True}, WorkerLost, r"worker1 cannot start: the process that starts workers has ended"),
        ({"_closing": False}, UsageError, r"a worker called 'worker1' runs already"),
    ],
)
def test_a_worker_that_cannot_start(now, error, text):
    processes = SimpleNamespace(_lock=threading.Lock(), _living={"worker1": 1}, _starting={}, log=Path, **now)
    with pytest.raises(error, match=text):
        Processes.start(processes, "worker1", "module:function")


def test_a_worker_that_is_lost():
    lost = Worker("worker1", 1, 1, "cpu", None)
    lost.lose("was killed by SIGKILL")
    with pytest.raises(WorkerLost) as raised:
        require_alive([lost])
    assert str(raised.value) == "worker1 was killed by SIGKILL\n`%dist_restart worker1` starts it again"


def test_a_store_of_an_earlier_group(tmp_path):
    class Late(FolderStore):
        ended = ""  # the folder goes right after this look

    with pytest.raises(RendezvousError, match=r"the store of this process group has been removed"):
        Late(tmp_path / "gone").set("a", "b")


def test_a_variable_that_cannot_be_pushed(monkeypatch):
    def refuse(*_, **__):
        raise EncodeError("no") from TypeError("cannot pickle '_thread.lock' object")

    monkeypatch.setattr(cell_values, "ask_each", refuse)
    values = cell_values.CellValues(Mock(select=lambda _: []), Mock(), Mock())
    with pytest.raises(EncodeError, match=r"`x\['a'\]` is a lock, which cannot be sent: cannot pickle '_thread.lock'"):
        values.push({"x": {"a": threading.Lock()}})


def test_collectives_of_a_group_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr(collectives, "_DEATH_KNOWN_WITHIN", 0)
    monkeypatch.setattr(nccl, "follow", lambda: None)  # it would leave a signal handler behind
    told = SimpleNamespace(
        name="worker0",
        driver="notebook",
        backend="gloo",
        secret=None,
        folder=tmp_path,
        rank=0,
        world_size=1,
        device="cpu",
    )
    monkeypatch.setattr(non_members, "follow", lambda worker: None)  # it would change torch
    groups = collectives.Collectives()

    def explain():
        with pytest.raises(ValueError, match="has not been initialized") as raised:
            dist.barrier()
        return str(groups.translate(raised.value))

    with World(1) as world:
        groups.follow(world[0], told)
        assert "this worker has no process group: it is formed anew once all workers are idle" in explain()
        Folders(tmp_path).make(1)
        groups.initialise(told, 1)
        collectives.destroy()
        assert "destroy_process_group has ended this worker's process group" in explain()
        for text, why in (
            ("group 1 is not initialized in the world group map", "is from before the last %dist_restart"),
            ("[/gloo/transport/tcp/pair.cc] Connection closed by peer", "an interrupt has broken this process group"),
        ):
            found = groups.translate(RuntimeError(text))
            assert isinstance(found, GroupError)
            assert why in str(found)
