"""Another user who knows the port of a store writes to it, and takes no rank: when a world forms, and again (G6)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes import workers
from helpers.processes.listening import free_port
from helpers.suite.python_path import TESTS, python_path

import nbdist
from nbdist import rpc

MEMBER = """
import sys
from helpers.processes import workers
from helpers.processes.listening import free_port
from nbdist import rpc
options = rpc.RpcBackendOptions(init_method=sys.argv[1])
sys.stdin.readline()
rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
rpc.shutdown()
"""


class Talk:
    """Another process that reads a line and answers with a line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **python_path(TESTS), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        """Return the next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Kill the process, unless it has ended."""
        self.process.kill()
        self.process.communicate()


class Attacked:
    """A world whose store a stranger can reach: this process is worker0."""

    def __init__(self) -> None:
        port = free_port()
        self._url = f"tcp://127.0.0.1:{port}"
        self.stranger = Talk(str(Path(__file__).with_name("stranger.py")), str(port))
        self.members: list[Talk] = []
        assert self.stranger.heard() == "here"

    def form(self, attack: str) -> None:
        """Form the world anew, while the stranger attacks; the other member comes when he is through."""
        if self.members:
            self.members[-1].end()  # by a SIGKILL
        if workers.is_running():
            rpc.shutdown(graceful=False)
        member = Talk("-c", MEMBER, self._url)
        self.members.append(member)
        answers: list[str] = []

        def wait_for_attack() -> None:
            answers.append(self.stranger.heard())
            member.tell("join")

        waiting = threading.Thread(target=wait_for_attack)
        waiting.start()
        self.stranger.tell(attack)
        try:
            options = rpc.RpcBackendOptions(init_method=self._url)
            rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        finally:
            waiting.join()
        assert answers == [{"keys": "written", "replay": "replayed", "forge": "forged"}[attack]]
        assert {record.pid for record in rpc.api.current_agent().membership.members()} == {
            os.getpid(),
            member.process.pid,
        }
        assert rpc.rpc_sync("worker1", os.getpid) == member.process.pid

    def end(self) -> None:
        """Leave nothing behind."""
        if workers.is_running():
            rpc.shutdown(graceful=False)
        for process in (self.stranger, *self.members):
            process.end()


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    attacked = Attacked()
    yield attacked
    attacked.end()


def test_a_stranger_writes_keys_to_the_store_and_takes_no_rank(attacked):
    with pytest.raises(nbdist.SecurityError, match="not signed with this cluster's secret"):
        attacked.form("forge")
    attacked.form("keys")
    attacked.stranger.tell("keep")
    assert attacked.stranger.heard() == "kept"
    attacked.form("replay")
    with pytest.raises(nbdist.SecurityError, match="not signed with this cluster's secret"):
        attacked.form("forge")
    attacked.stranger.tell("calls")
    assert attacked.stranger.heard() == "nobody called"
