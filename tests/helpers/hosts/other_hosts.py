"""Hosts for tests: network, mount and process namespaces of this machine, joined by a bridge to the machine itself.

A process on such a host has an address of its own, sees none of the machine's folders below ``/tmp`` (nor the run
directory of a notebook) but Python's and the tests' own, and none of its processes: its process ids mean nothing
outside. Only root can make them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Host", "can_make_hosts", "hosts", "ip"]

_numbers = itertools.count()


def _hide_tmp() -> str:
    """Shell commands that hide all of ``/tmp`` but the folders of Python, its packages and the tests, if there."""
    needed = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, Path(__file__).parents[3])}
    seen = [shlex.quote(str(path)) for path in sorted(needed) if path.is_relative_to("/tmp")]
    numbered = list(enumerate(seen, 3))
    return "; ".join(
        [
            "set -e",
            *(f"exec {number}<{path}" for number, path in numbered),  # to reach it once it is hidden
            "mount -t tmpfs none /tmp",
            *(f"mkdir -p {path}; mount -c --bind /proc/self/fd/{number} {path}" for number, path in numbered),
            *(f"exec {number}<&-" for number, _ in numbered),
            "set +e",
        ]
    )


def can_make_hosts() -> bool:
    """Return whether this process may make namespaces and bridges."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    name = f"nbt{os.getpid():x}"
    made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True).returncode == 0
    if made:
        ip("link", "del", name)
    return made and subprocess.run(["unshare", "-n", "-m", "-p", "--fork", "true"]).returncode == 0


def ip(*words: str) -> None:
    """Run the program ``ip``, which changes network devices and namespaces."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """One host: what runs there is started by `start` and ends with `kill`."""

    def __init__(self, name: str, address: str, link: str, interface: str) -> None:
        self.name = name
        self.address = address
        self.interface = interface
        """The name of the network interface that has the address, on the host."""
        self.link = link
        """The name of the other end of its line, on the machine."""
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, *arguments: str, stdin: bytes = b"", stdout: int | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start Python with these arguments on the host; return the process that stands for it here.

        What it writes goes to the test's output, or to ``stdout``. Its working directory is ``/``, and ``/tmp`` has
        nothing at first but Python and the tests, if they are there.
        """
        inside = f'{_hide_tmp()}; cd /; "$@"'
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.name, "unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "sh", "-c", inside, "sh", sys.executable, *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=stdout,
            env={key: value for key, value in os.environ.items() if key != "NBDIST_RUNTIME_DIR"} | (environment or {}),
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(stdin)
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """Return the ids, on the machine, of the processes that run on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def kill(self) -> None:
        """End the host's processes, all at once, as if it had lost its power."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        for process in self.processes:
            process.wait(10)
        self.processes.clear()

    def cut(self) -> None:
        """Cut the host off: its packets, and those to it, are lost."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Connect the host again."""
        ip("link", "set", self.link, "up")

    def part_from(self, other: Host) -> None:
        """Let this host and another one no longer reach each other; both still reach the machine."""
        self._change_routes("add", other)

    def join_again(self, other: Host) -> None:
        """Undo `part_from`."""
        self._change_routes("del", other)

    def _change_routes(self, how: str, other: Host) -> None:
        for here, there in ((self, other), (other, self)):
            ip("-n", here.name, "route", how, "blackhole", f"{there.address}/32")

    def slow_down(self, rate: str) -> None:
        """Limit what it sends and gets to a rate, such as ``40mbit``, as a slow line would."""
        limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        for where in (
            ["tc", "qdisc", "add", "dev", self.link],
            ["tc", "-n", self.name, "qdisc", "add", "dev", self.interface],
        ):
            subprocess.run([*where, "root", *limit], check=True)

    def use_reno(self) -> None:
        """Have new TCP connections of this host use Reno, whatever the machine uses.

        BBR, which some machines use, spreads a burst of small messages over time.
        """
        setting = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
        ip("netns", "exec", self.name, "sh", "-c", setting)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[str, list[Host]]]:
    """Make hosts; return the address at which they reach this machine, and the hosts. They end with the block."""
    label = f"{os.getpid():x}{next(_numbers)}"
    net = f"10.{200 + os.getpid() % 50}.{(os.getpid() // 50 + next(_numbers)) % 250}"
    bridge = f"nb{label}"
    found: list[Host] = []
    with contextlib.ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{net}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index in range(count):
            name, outer, inner = f"nb{label}h{index}", f"v{label}o{index}", f"v{label}i{index}"
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", outer, "master", bridge, "up")
            ip("link", "set", inner, "netns", name)
            address = f"{net}.{index + 2}"
            for words in (
                ("addr", "add", f"{address}/24", "dev", inner),
                ("link", "set", inner, "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *words)
            host = Host(name, address, outer, inner)
            found.append(host)
            undo.callback(host.kill)
        yield f"{net}.1", found
