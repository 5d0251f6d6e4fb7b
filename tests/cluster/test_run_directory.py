"""The run directory of a cluster lives as long as its owner, also where others cannot see the owner's process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import wait_until

from nbdist.cluster.processes.run_directory import make_folder, remove_folder

OWNER = (
    "import os, time\n"
    "from nbdist.cluster.processes.run_directory import make_folder\n"
    "print(make_folder(), flush=True)\n"
    "if os.fork() == 0:\n"  # what the owner has forked does not keep the directory
    "    print(os.getpid(), flush=True)\n"
    "time.sleep(600)\n"
)
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def can_make_containers() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*CONTAINER, "true"]).returncode == 0


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("container", [False, True], ids=["this host", "a container"])
def test_a_run_directory_stays_as_long_as_its_owner_lives(base, container):
    if container and not can_make_containers():
        pytest.skip("only root can make a process namespace, and only where the kernel allows it")
    own = make_folder()
    command = [*(CONTAINER if container else ()), sys.executable, "-c", OWNER]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        other, child = (owner.stdout.readline().strip() for _ in range(2))
        assert set(base.glob("*cluster-*")) == {own, Path(other)}
        third = make_folder()
        assert set(base.glob("*cluster-*")) == {own, third, Path(other)}
        owner.kill()
        owner.wait()
        if not container:
            os.kill(int(child), 0)
        remove_folder(third)

        def left() -> set[Path]:
            remove_folder(make_folder())
            return set(base.glob("*cluster-*"))

        wait_until(left, equals={own})  # the kernel ends a container a little after its first process
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    remove_folder(own)
    assert not list(base.glob("*cluster-*"))
