"""All launchers pass the contract of `nbdist.testing.LauncherContract`: workers of this host, joined ones, Ray's."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.notebook.frontend import Notebook
from helpers.suite.python_path import python_path
from helpers.waiting import wait_for_file

import nbdist
from nbdist.testing import LauncherContract


@contextlib.contextmanager
def joined(count: int, file: Path, start, **options):
    """A cluster whose workers join: ``start(invitation)`` starts them once the invitation is written."""

    def wait() -> None:
        start(wait_for_file(file))

    threading.Thread(target=wait, daemon=True).start()
    with nbdist.Cluster(count, launcher="join", invitation=str(file), **options) as cluster:
        yield cluster
    assert not file.exists()


class TestLocal(LauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls):
        with nbdist.Cluster(2) as cluster:
            yield cluster


class TestOpenToOthers(LauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls):
        with nbdist.Cluster(2, host="127.0.0.1") as cluster:
            yield cluster


class TestJoinedOnThisHost(LauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, tmp_path_factory):
        file = tmp_path_factory.mktemp("join") / "invitation.json"
        started: list[subprocess.Popen] = []

        def start(invitation: bytes) -> None:
            command = [sys.executable, "-m", "nbdist", "worker", "--connect", str(file), "-n", "2"]
            started.append(subprocess.Popen(command))

        with joined(2, file, start, host="127.0.0.1") as cluster:
            yield cluster
        assert started[0].wait(20) == 0


@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
class TestJoinedOnTwoOtherHosts(LauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, tmp_path_factory):
        file = tmp_path_factory.mktemp("join") / "invitation.json"
        with hosts(2) as (address, others):

            def start(invitation: bytes) -> None:
                for other in others:
                    other.start("-m", "nbdist", "worker", "--connect", "-", stdin=invitation)

            with joined(2, file, start, host=address) as cluster:
                yield cluster
            for other in others:
                for process in other.processes:
                    assert process.wait(20) == 0
                assert other.pids() == []


def processes_of_this_run() -> list[psutil.Process]:
    """The processes that have the runtime folder of this test run: those that a run beside it started have another."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("NBDIST_RUNTIME_DIR") == os.environ["NBDIST_RUNTIME_DIR"]:
                found.append(process)
    return found


@pytest.mark.timeout(600)  # Ray may take minutes to start on a busy machine
class TestRay(LauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls):
        pytest.importorskip("ray")
        before = {process.pid for process in processes_of_this_run()}
        with nbdist.Cluster(2, launcher="ray", timeout=300) as cluster:
            begun = [each for each in processes_of_this_run() if each.pid not in before]
            assert any("nbdist" in " ".join(each.cmdline()) for each in begun)
            yield cluster
        _, left = psutil.wait_procs([each for each in processes_of_this_run() if each.pid not in before], 20)
        assert left == []


BLIND = Path(__file__).parents[1] / "stand_ins" / "blind"
"""The folder of a launcher whose pids mean nothing on this host."""
OF_MAGICS = ("magics", "views/test_map.py", "views/test_displays.py", *(f"cluster/test_{name}.py" for name in (
    "asking_workers", "captured", "cutting", "first_hour", "labels", "page_lines", "parity", "printing", "running",
    "telling",
)))  # fmt: skip
"""The tests of cells and magics, below the folder of tests."""


def test_the_pids_of_the_blind_launcher_mean_nothing():
    with Notebook(env=python_path(BLIND)) as notebook:
        notebook.run("%dist_init -n 1 --backend none --launcher blind")
        shown = notebook.run("(worker,) = __import__('nbdist').Cluster.current.workers; worker.pid, worker.host").result
        assert shown == "(5000000, 'elsewhere')"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_cells_and_magics_use_no_pid_of_a_worker():
    """Their tests pass with a launcher whose pids mean nothing here."""
    tests = [str(BLIND.parents[1] / name) for name in OF_MAGICS]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "NBDIST_TEST_BLIND_PATH": str(BLIND)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]


ROOMS = ("processes", "hosts", "worker")
"""The parts of `nbdist.cluster` that know processes: those below the launchers, and the worker's own side."""


def test_no_module_above_the_launchers_touches_a_process_of_a_worker():
    """No file of ``/proc``, no signal to a pid, no path of another process: the launcher does that, on its host."""
    package = Path(nbdist.__file__).parent
    found = []
    for folder in ("cluster", "views", "magics"):
        for path in sorted((package / folder).rglob("*.py")):
            if path.relative_to(package / folder).parts[0] in ROOMS:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Constant(value=str(text)) if text.startswith("/proc/"):
                        found.append(f"{path}:{node.lineno}: {text}")
                    case ast.Attribute(value=ast.Name(id="os"), attr=("kill" | "killpg" | "pidfd_open") as name):
                        found.append(f"{path}:{node.lineno}: os.{name}")
    assert found == []
