"""Clusters whose workers join: from hosts that `other_hosts` made, or from processes of this host. For tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

import nbdist
from helpers.hosts.other_hosts import Host
from helpers.suite.python_path import python_path
from helpers.waiting import wait_for_file, wait_until
from nbdist.cluster.hosts.hub import KeeperMember

__all__ = ["Keepers", "cluster_on", "keeper_of"]


class Keepers:
    """The keepers of a cluster, each a process of this host. Their workers can import the modules of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "invitation.json"
        """The first invitation."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.told: list[str] = []
        """The lines that the cluster has told about growth."""

    def start(
        self, *options: str, file: Path | None = None, address: str = "127.0.0.1", **more: Any
    ) -> subprocess.Popen[bytes]:
        """Start a keeper at an address of 127.0.0.0/8, with the invitation in a file or the first one.

        ``options`` are those of its command, ``more`` those of `Popen`.
        """
        command = [sys.executable, "-m", "nbdist", "worker", "--connect", str(file or self.file)]
        command += ["--host", address, *options]
        environment = {**os.environ, **python_path(self.folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, **more)
        self.processes.append(process)
        return process

    def another(self, cluster: nbdist.Cluster, *options: str, uses: int = 1, **more: Any) -> subprocess.Popen[bytes]:
        """Start one more, with a new invitation; the arguments are those of `start`."""
        file = self.folder / f"another{len(self.processes)}.json"
        cluster.invite(str(file), uses=uses)
        return self.start(*options, file=file, **more)

    def grow(self, cluster: nbdist.Cluster, *options: str, uses: int = 1) -> subprocess.Popen[bytes]:
        """Start one more that becomes ``uses`` new workers, and wait until the line about it has been told."""
        told, count = len(self.told), len(cluster.workers) + uses
        process = self.another(cluster, *options, uses=uses)
        cluster.wait_for_workers(count, timeout=60)
        wait_until(lambda: len(self.told) > told)
        return process

    @contextlib.contextmanager
    def cluster(self, count: int = 1, addresses: Sequence[str] = (), **options: Any) -> Iterator[nbdist.Cluster]:
        """A cluster of one keeper with ``count`` workers, or of a keeper with a worker at each of these addresses.

        The workers have imported ``os``.
        """

        def start() -> None:
            wait_for_file(self.file)
            for address in addresses:
                self.start(address=address)
            if not addresses:
                self.start("-n", str(count))

        threading.Thread(target=start, daemon=True).start()
        options = {"host": "127.0.0.1", "invitation": str(self.file), "timeout": 60} | options
        with nbdist.Cluster(len(addresses) or count, launcher="join", **options) as cluster:
            cluster.on_joined = self.told.append
            cluster.execute("import os")
            yield cluster

    def end(self) -> None:
        """Kill all keepers, frozen ones too."""
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                psutil.Process(process.pid).resume()
            process.kill()
            process.wait(10)


def keeper_of(cluster: nbdist.Cluster, name: str) -> KeeperMember:
    """Return the keeper that has a worker, as its hub knows it."""
    launcher: Any = cluster.lifecycle.launcher
    (member,) = [each for each in launcher.hub.members if name in each.workers]
    return member


@contextlib.contextmanager
def cluster_on(others: Sequence[Host], address: str, folder: Path, **options: Any) -> Iterator[nbdist.Cluster]:
    """A cluster with a worker on each of these hosts, which reach this machine at ``address``."""
    file = folder / "invitation.json"

    def start() -> None:
        text = wait_for_file(file)
        for other in others:
            other.start("-m", "nbdist", "worker", "--connect", "-", stdin=text)

    threading.Thread(target=start, daemon=True).start()
    with nbdist.Cluster(len(others), launcher="join", host=address, invitation=str(file), **options) as cluster:
        yield cluster
