"""One storm: starts a workload, strikes its processes at random, lets them settle, and compares the ledger."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.processes.stacks import collect
from helpers.suite.python_path import python_path

from chaos import disturbances, leftovers, phases, recorder
from chaos.ledger import Finding, Ledger, Struck

_START = 90.0
"""Seconds within which all processes of a storm must work; starting takes 3 on a machine that is free."""
_PHASE = 120.0
"""Seconds within which all must end their part in a phase; the longest call takes half of that."""
_GONE = 10.0
"""Seconds within which nothing may be left of a storm whose processes have ended (G5)."""

PLAIN = ("calls", "passes")
CLUSTERS = ("collectives", "pipelines", "swarms")
WORKLOADS = (*PLAIN, *CLUSTERS)

_DRIVER_DIES = 0.3
"""The share of storms over a cluster that end with a SIGKILL of its driver."""

WEIGHTS = {"kill": 2, "stop": 3, "full files": 2, "cut links": 4, "bad frames": 3}
"""How often each kind of strike comes, relative to the others."""

_NOT_FOR: dict[bool, tuple[str, ...]] = {False: (), True: ("full files",)}
"""Strikes that are left out for members, and for clusters: a kernel without room for a file may lose a cell, which is
its kernel's protocol's affair, and not nbdist's."""


@dataclass
class Outcome:
    """What came of a storm."""

    findings: list[Finding]
    counts: dict[str, int]
    folder: Path | None = None
    """Where the ledger, the strikes, the logs and the stacks are, if there are findings."""


@dataclass
class Storm:
    """One storm; ``seed`` and ``number`` decide everything that is random in it."""

    workload: str
    seed: int
    number: int = 0
    seconds: float = 20.0
    strikes: tuple[str, ...] = tuple(WEIGHTS)
    members: int = 4
    """How many processes a world of plain scripts has."""
    leaks_after: float = 20.0
    """Seconds after which something that is still there has leaked: a delete may have to be sent again."""
    package: Path | None = None
    """A folder with a copy of the package that the processes use instead of the installed one."""

    def __post_init__(self) -> None:
        self._dice = random.Random(f"{self.seed}/{self.number}/{self.workload}")
        self._found: list[Finding] = []
        self._struck: list[Struck] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._generation = itertools.count()

    def run(self) -> Outcome:
        """Run the storm to its end."""
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: a socket's path has 107 characters
        for name in ("ledger", "phases", "here", "logs", "run", "tmp"):
            (self.folder / name).mkdir(mode=0o700)
        try:
            with contextlib.suppress(_Stuck):
                self._go_through()
        finally:
            leftovers.end(self.folder)
            for process in self._started.values():
                process.wait()
        ledger = Ledger([*recorder.read(self.folder), *self._struck])
        outcome = Outcome(self._found + ledger.compare(), ledger.counts())
        if outcome.findings:
            outcome.folder = self.folder
            (self.folder / "strikes").write_text("".join(f"{each}\n" for each in self._struck))
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        return outcome

    # -- the phases ---------------------------------------------------------------------------

    def _go_through(self) -> None:
        for name in self._names():
            self._start(name)
        self._until("start", _START, lambda: self._present().keys() >= set(self._names()))
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(self._dice.uniform(0.1, 1.2))
            self._tend()
            self._strike()
        self._undo_all()
        if self.workload in CLUSTERS and self._dice.random() < _DRIVER_DIES:
            self._kill_the_driver()
            return
        self._until("come back after the storm", _START, self._all_are_back)
        for phase in (phases.SETTLE, phases.CHECK, phases.RELEASE):
            phases.begin(self.folder, phase)
            self._until(phase, _PHASE, lambda phase=phase: self._have_marked(phase))
        phases.begin(self.folder, phases.LEAVE)
        self._until("end", _PHASE, lambda: all(process.poll() is not None for process in self._started.values()))
        for name, process in self._started.items():
            if process.returncode:
                self._find("failed afterwards", name, f"ended with {process.returncode}: {self._last_words(name)}")
        self._look_for_leftovers()

    def _kill_the_driver(self) -> None:
        """Kill the driver of a cluster, after which nothing may be left (G5)."""
        process = self._started["driver"]
        now = time.monotonic()
        self._struck.append(Struck("kill", "driver", process.pid, now, now))
        process.kill()
        process.wait()
        self._look_for_leftovers()

    def _until(self, what: str, limit: float, condition: Callable[[], bool]) -> None:
        """Wait for a condition; where it does not come about, keep the stacks of all and end the storm."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                file = self.folder / "stacks"
                file.write_text(collect(leftovers.processes(self.folder)))
                missing = sorted(set(self._names()) - {name for name in self._names() if self._has_marked(what, name)})
                self._find("stuck", ", ".join(missing), f"{what} took more than {limit:g} s; stacks in {file}")
                raise _Stuck
            time.sleep(0.05)

    def _have_marked(self, phase: str) -> bool:
        for name, process in self._started.items():
            if process.poll() is not None and not self._has_marked(phase, name):
                self._find("failed afterwards", name, f"ended while it should {phase}: {self._last_words(name)}")
                raise _Stuck
        return all(self._has_marked(phase, name) for name in self._started)

    def _has_marked(self, phase: str, name: str) -> bool:
        return phases.is_marked(self.folder, phase, name)

    def _look_for_leftovers(self) -> None:
        deadline = time.monotonic() + _GONE
        while leftovers.processes(self.folder) or self._files_left():
            if time.monotonic() > deadline:
                if found := leftovers.processes(self.folder):
                    self._find("left behind", self.workload, f"processes: {found}")
                if files := self._files_left():
                    self._find("left behind", self.workload, f"files: {files[:20]}")
                return
            time.sleep(0.1)

    def _files_left(self) -> list[str]:
        return leftovers.files(self.folder / "run") + leftovers.files(self.folder / "tmp")

    # -- processes ----------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return [f"worker{number}" for number in range(self.members)] if self.workload in PLAIN else ["driver"]

    def _start(self, name: str) -> None:
        """Start a process of the workload: a member, or the driver of a cluster."""
        seed = f"{self.seed}/{self.number}/{next(self._generation)}"
        if self.workload in PLAIN:
            module = ["chaos.member", self.workload, name, name.removeprefix("worker"), str(self.members), seed]
        else:
            module = ["chaos.driver", self.workload, seed]
        environment = {
            **os.environ,
            recorder.FOLDER: str(self.folder),
            "NBDIST_RUNTIME_DIR": str(self.folder / "run"),
            "TMPDIR": str(self.folder / "tmp"),
            **python_path(self.package or "", Path(__file__).parent.parent),
            "OMP_NUM_THREADS": "1",
            "NBDIST_CHAOS_LEAKS_AFTER": str(self.leaks_after),
        }
        with (self.folder / "logs" / name).open("ab") as log:
            self._started[name] = subprocess.Popen(
                [sys.executable, "-m", *module], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _present(self) -> dict[str, int]:
        return phases.present(self.folder)

    def _all_are_back(self) -> bool:
        self._tend()
        return self._present().keys() >= set(self._names())

    def _tend(self) -> None:
        """Undo what has lasted long enough, and start anew whoever was killed."""
        now = time.monotonic()
        for item in [item for item in self._undo if item[0] <= now]:
            self._undo.remove(item)
            item[1]()
        for name, process in list(self._started.items()):
            code = process.poll()
            if code is None:
                continue
            if not any(each.kind == "kill" and each.pid == process.pid for each in self._struck):
                self._find("failed afterwards", name, f"ended by itself with {code}: {self._last_words(name)}")
                raise _Stuck
            self._start(name)

    def _last_words(self, name: str) -> str:
        return (self.folder / "logs" / name).read_text(errors="replace")[-1500:]

    # -- strikes ------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Do one thing to one process. The dice are thrown the same whoever is there."""
        kinds = [kind for kind in self.strikes if kind not in _NOT_FOR[self.workload in CLUSTERS]]
        kind = self._dice.choices(kinds, [WEIGHTS[each] for each in kinds])[0]
        lasts, seed, which = self._dice.uniform(0.1, 3.0), self._dice.random(), self._dice.random()
        present = sorted((name, pid) for name, pid in self._present().items() if name != "driver")
        if not present:
            return
        name, pid = present[int(which * len(present))]
        now = time.monotonic()
        until = now
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if kind == "kill":
                self._struck.append(Struck(kind, name, pid, now, now))  # before anybody can have seen it
                disturbances.kill(pid)
                return
            if kind == "stop":
                disturbances.stop(pid)
                until = self._later(lasts, lambda: disturbances.go_on(pid))
            elif kind == "full files":
                disturbances.fill_files(pid)
                until = self._later(lasts, lambda: disturbances.free_files(pid))
            elif kind == "cut links":
                disturbances.cut_links(pid, random.Random(seed))
            else:
                disturbances.send_bad_frames(pid, self.folder / "run", random.Random(seed))
            self._struck.append(Struck(kind, name, pid, now, until))

    def _later(self, seconds: float, action: Callable[[], None]) -> float:
        def undo() -> None:
            with contextlib.suppress(OSError):  # it has been killed meanwhile
                action()

        at = time.monotonic() + seconds
        self._undo.append((at, undo))
        return at + 1.5  # `_tend` comes at least that often

    def _undo_all(self) -> None:
        for _, action in self._undo:
            action()
        self._undo.clear()

    def _find(self, kind: str, who: str, text: str) -> None:
        self._found.append(Finding(kind, who, text))


class _Stuck(Exception):
    """The storm cannot go on; why is among its findings."""


def storms(seed: int, minutes: float, workloads: tuple[str, ...] = WORKLOADS, seconds: float = 20.0) -> Iterator[Storm]:
    """Return the storms of a run, one after the other until its time is over."""
    end = time.monotonic() + minutes * 60
    for number in itertools.count():
        if time.monotonic() > end:
            return
        yield Storm(workloads[number % len(workloads)], seed, number, seconds)
