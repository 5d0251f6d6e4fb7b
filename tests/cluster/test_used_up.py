"""A full disk, a full table of open files, and runtime directories that will not do: words, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.errors import ResourceError, SecurityError, UsageError

WAYS = ["cluster", "world"]


def start(way, meeting):
    """Start a cluster or an RPC world, which must fail or end again."""
    if way == "cluster":
        with nbdist.Cluster(1, backend="none", timeout=60) as cluster:
            assert cluster.evaluate("1 + 1", 0) == 2
    else:
        options = rpc.RpcBackendOptions(init_method=f"file://{meeting}")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        rpc.shutdown()


def nothing_is_left(runtime):
    assert not rpc.api.is_initialized()
    assert nbdist.Cluster.current is None
    wait_until(lambda: {path.name for path in Path(runtime).iterdir()} - {"secret", "filler"}, equals=set())
    wait_until(psutil.Process().children, equals=[])


# --- runtime directories --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("relative", "must be an absolute path, not 'relative'"),
        ("{tmp}/file", "{tmp}/file is not a directory of this user"),
        ("{tmp}/file/below", "{tmp}/file/below cannot be made: Not a directory"),
        ("{tmp}/dangling", "{tmp}/dangling is not a directory of this user"),
        ("/proc/nbdist", "/proc/nbdist cannot be made: No such file"),
        ("{tmp}/" + "long" * 25, "is too long"),
    ],
)
def test_a_runtime_directory_that_cannot_be_is_named(way, named, told, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("/nonexistent/nbdist")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", named.format(tmp=tmp_path))
    with pytest.raises((UsageError, SecurityError)) as caught:
        start(way, tmp_path / "meeting")
    assert told.format(tmp=tmp_path) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert nbdist.Cluster.current is None


@pytest.mark.parametrize("value", [0, -1, 10**30, 1.5, "1 GB", None, float("nan")])
def test_a_max_message_that_is_none_is_refused(value):
    with pytest.raises(UsageError, match="max_message must be 65536 to 9223372036854775807 bytes"):
        rpc.RpcBackendOptions(max_message=value)


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A disk of 256 KiB for the runtime directory. Yields what fills it but for some bytes."""
    disk = Path(tempfile.mkdtemp(prefix="nbdist-", dir="/tmp"))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True).returncode:
        disk.rmdir()
        pytest.skip("only root can mount a small disk")
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", str(disk))
    filler = disk / "filler"

    def fill(leave=0):
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - leave)

    fill.disk, fill.filler = disk, filler
    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
        disk.rmdir()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leave", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 8))])
def test_a_full_disk_at_the_start_is_named(small, way, leave, tmp_path):
    small(leave * 4096)
    enough = contextlib.nullcontext() if leave else pytest.raises(ResourceError, match=r"the disk.* is full")
    with enough, contextlib.suppress(*([ResourceError] if leave else [])):
        start(way, tmp_path / "meeting")
    nothing_is_left(small.disk)
    small.filler.unlink()
    start(way, tmp_path / "meeting")


def test_a_full_disk_in_the_middle_of_a_run_stops_what_needs_it_and_nothing_else(small):
    with nbdist.Cluster(2, backend="gloo") as cluster:
        cluster.execute("import torch.distributed as dist")
        small()
        assert cluster.evaluate("1 + 1") == [2, 2]
        assert len(rpc.rpc_sync("worker0", bytes, args=(3_000_000,))) == 3_000_000
        cluster.execute("t = torch.ones(1); dist.all_reduce(t)")
        assert cluster.evaluate("t.item()") == [2.0, 2.0]
        os.kill(cluster.workers[1].pid, signal.SIGKILL)
        while cluster.workers[1].lost is None:
            time.sleep(0.01)
        with pytest.raises(ResourceError, match=r"the workers cannot be restarted: the disk.* is full"):
            cluster.restart()
        assert cluster.evaluate("1 + 1", 0) == 2
        small.filler.unlink()
        cluster.restart()
        assert cluster.evaluate("1 + 1") == [2, 2]
    nothing_is_left(small.disk)


def test_a_cluster_ends_on_a_full_disk(small):
    with nbdist.Cluster(2, backend="gloo") as cluster:
        cluster.execute("import torch.distributed as dist")
        small()
    nothing_is_left(small.disk)


# --- a full table of open files -------------------------------------------------------------------

_SWEEP = """
import sys
import test_used_up
from helpers.processes import file_table
from nbdist.errors import ResourceError

way, runtime, rooms = sys.argv[1], sys.argv[2], map(int, sys.argv[3].split(","))
test_used_up.start(way, runtime + "-meeting")  # imports what it takes
done = 0
for room in rooms:
    try:
        with file_table.full(room):
            test_used_up.start(way, runtime + "-meeting")
        done += 1
    except ResourceError as error:
        assert "files open, its limit" in str(error), error
    test_used_up.nothing_is_left(runtime)
    test_used_up.start(way, runtime + "-meeting")
    print(room, done, flush=True)
assert done == 1, "only the last of these rooms is enough"
"""


@pytest.mark.parametrize(
    ("way", "rooms"),
    [
        ("world", "0,1,2,4,7,9,12,15,60"),
        ("cluster", "3,90"),
        pytest.param("world", ",".join(map(str, [*range(16), 60])), marks=pytest.mark.soak),
        pytest.param("cluster", ",".join(map(str, [*range(0, 30, 2), 90])), marks=pytest.mark.soak),
    ],
)
def test_a_full_file_table_at_the_start_is_named(way, rooms):
    runtime = tempfile.mkdtemp(prefix="nbdist-", dir="/tmp")  # short enough for sockets
    environment = {**os.environ, "NBDIST_RUNTIME_DIR": runtime, **python_path(os.path.dirname(__file__), TESTS)}
    program = [sys.executable, "-c", _SWEEP, way, runtime, rooms]
    try:
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
