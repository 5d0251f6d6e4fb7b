"""Worker processes: how they start, how they end, and that nothing of them is left (G5)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers.suite.python_path import python_path
from helpers.waiting import wait_until

from nbdist.cluster.processes.worker_processes import Processes, describe_exit
from nbdist.errors import UsageError, WorkerLost

ENTRIES = "helpers.processes.entries"


class Owned:
    """A run directory, the processes in it, and the ends that were heard of."""

    def __init__(self, fork: bool, preload: tuple[str, ...] = ("fractions",), idle: tuple[str, ...] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nbdist-"))
        self.ends: dict[str, int] = {}
        self.processes = Processes(self.folder, self.ends.__setitem__, preload=preload, idle=idle, fork=fork)

    def start(self, name: str, entry: str, *arguments: str, **environment: str) -> int:
        return self.processes.start(name, f"{ENTRIES}:{entry}", arguments, {**os.environ, **environment}).result(30)

    def end_of(self, name: str) -> int:
        wait_until(lambda: name in self.ends)
        return self.ends[name]


@pytest.fixture(params=["fork", "spawn"])
def owned(request) -> Iterator[Owned]:
    found = Owned(request.param == "fork")
    yield found
    found.processes.close()
    assert not found.folder.exists()
    assert not psutil.pid_exists(found.processes.pid)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read(path: Path) -> str:
    wait_until(path.exists)
    return path.read_text()


def test_it_forks_where_it_can():
    found = Owned(True)
    assert found.processes.ready(30).forks
    assert found.processes.ready().complaints == []
    found.processes.close()


@pytest.mark.parametrize("reason", ["told not to", "a thread runs"])
def test_it_spawns_where_forking_is_not_safe(reason):
    found = Owned(reason != "told not to", (f"{ENTRIES}_threaded",) if reason == "a thread runs" else ())
    assert not found.processes.ready(30).forks
    found.start("worker0", "leave", "3")
    assert found.end_of("worker0") == 3
    found.processes.close()


def test_what_cannot_be_imported_beforehand_is_told_and_does_not_matter():
    found = Owned(True, ("no_such_module",))
    (complaint,) = found.processes.ready(30).complaints
    assert complaint.startswith("no_such_module: ModuleNotFoundError")
    found.start("worker0", "leave", "0")
    assert found.end_of("worker0") == 0
    found.processes.close()


@pytest.mark.parametrize("fork", [True, False])
def test_more_can_be_imported_before_workers_start(fork, tmp_path, caplog):
    found = Owned(fork, ())
    found.processes.preload(["decimal", "fractions"]).result(30)
    found.start("worker0", "tell", str(tmp_path / "told"), "")
    assert json.loads(read(tmp_path / "told"))["preloaded"] == fork  # what is spawned imports when it needs
    assert ("workers are not forked here" in caplog.text) != fork
    found.processes.close()


def write_module(monkeypatch, folder, name, code):
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


def test_more_is_imported_while_nothing_is_asked(tmp_path, monkeypatch):
    write_module(monkeypatch, tmp_path, "said_last", f"open({str(tmp_path / 'last')!r}, 'w')")
    found = Owned(True, (), ("no_such_module", "fractions", "said_last"))
    read(tmp_path / "last")
    found.start("worker0", "tell", str(tmp_path / "told"), "")
    assert json.loads(read(tmp_path / "told"))["preloaded"]
    found.processes.close()


def test_nothing_more_is_imported_once_workers_are_wanted(tmp_path, monkeypatch):
    begun, goes_on, last = (tmp_path / name for name in ("begun", "goes_on", "last"))
    waits = f"import os, time\nopen({str(begun)!r}, 'w')\nwhile not os.path.exists({str(goes_on)!r}): time.sleep(0.01)"
    write_module(monkeypatch, tmp_path, "waits", waits)
    write_module(monkeypatch, tmp_path, "said_last", f"open({str(last)!r}, 'w')")
    found = Owned(True, (), ("waits", "said_last"))
    read(begun)
    found.processes.hurry()
    time.sleep(0.5)  # a thread sends it
    goes_on.touch()
    time.sleep(0.5)  # five times as long as it waits before the next import
    found.start("worker0", "leave", "0")
    assert found.end_of("worker0") == 0
    assert not last.exists()
    found.processes.close()


def test_what_was_imported_already_does_not_keep_workers_from_being_forked(tmp_path):
    for number in range(10):
        found = Owned(True)
        found.processes.preload(["json"]).result(30)
        found.start("worker0", "tell", str(tmp_path / str(number)), "")
        assert json.loads(read(tmp_path / str(number)))["preloaded"]
        found.processes.close()


def test_it_is_imported_as_the_owner_would_now(tmp_path, monkeypatch):
    found = Owned(True)
    found.processes.ready(30)  # what follows is of no matter to what it has imported
    (tmp_path / "said_later.py").write_text(
        "import os\n"
        f"open({str(tmp_path / 'told')!r}, 'w').write(os.environ['NBDIST_TEST_VARIABLE'] + ' ' + os.getcwd())"
    )
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NBDIST_TEST_VARIABLE", "later")
    monkeypatch.chdir(tmp_path / "here")
    found.processes.preload(["said_later"]).result(30)
    assert (tmp_path / "told").read_text() == f"later {tmp_path / 'here'}"
    found.processes.close()


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("no_such_module", "cannot import no_such_module: ModuleNotFoundError"),
        (f"{ENTRIES}_that_exit", f"cannot import {ENTRIES}_that_exit: SystemExit: 3"),
    ],
)
def test_of_more_that_cannot_be_imported_is_told(module, says):
    found = Owned(True)
    with pytest.raises(UsageError, match=says):
        found.processes.preload([module, "json"]).result(30)
    found.start("worker0", "leave", "0")
    assert found.end_of("worker0") == 0
    found.processes.close()


def test_what_an_import_sets_is_there_and_signals_are_heeded_still(tmp_path, monkeypatch):
    (tmp_path / "sets_things.py").write_text(
        "import os, signal, sys\n"
        "os.environ['NBDIST_TEST_VARIABLE'] = 'set'\n"
        "sys.path.insert(0, '/set')\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Owned(True)
    found.processes.preload(["sets_things"]).result(30)
    found.start("worker0", "tell", str(tmp_path / "told"), "")
    facts = json.loads(read(tmp_path / "told"))
    assert facts["variable"] == "set"
    assert "/set" in facts["path"]
    assert found.end_of("worker0") == 0  # which is heard of by a signal
    found.processes.close()


def test_workers_are_spawned_if_what_was_imported_starts_threads(caplog, tmp_path):
    found = Owned(True)
    found.processes.preload([f"{ENTRIES}_threaded"]).result(30)
    assert "has begun a thread" in caplog.text
    found.start("worker0", "tell", str(tmp_path / "told"), "")
    assert not json.loads(read(tmp_path / "told"))["preloaded"]  # else it were forked
    found.processes.close()


def test_who_waits_for_an_import_hears_of_a_zygote_that_ends():
    found = Owned(True)
    preloading = found.processes.preload([f"{ENTRIES}_that_end_the_process"])
    with pytest.raises(WorkerLost, match="has ended"):
        preloading.result(30)
    found.processes.close()


def test_a_worker_has_the_owners_surroundings(owned, tmp_path):
    pid = owned.start("worker0", "tell", str(tmp_path / "told"), "hello", NBDIST_TEST_VARIABLE="here")
    facts = json.loads(read(tmp_path / "told"))
    assert facts["word"] == "hello"
    assert facts["pid"] == facts["session"] == pid
    assert facts["variable"] == "here"
    assert facts["directory"] == os.getcwd()
    assert facts["argv"] == [f"{ENTRIES}:tell"]  # code reads it, and logs it: no secret is there
    assert facts["interruptible"]
    assert facts["stdin"] == ""
    assert facts["preloaded"] == facts["frozen"] == owned.processes.ready().forks
    assert facts["collects"]
    wait_until(lambda: owned.processes.log("worker0").read_text() == "told\nand complained\n")
    assert owned.end_of("worker0") == 0


def test_variables_and_paths_need_not_be_text(owned, tmp_path, monkeypatch):
    odd = os.fsdecode(b"caf\xe9")  # Latin-1
    (tmp_path / odd).mkdir()
    monkeypatch.chdir(tmp_path / odd)
    monkeypatch.syspath_prepend(str(tmp_path / odd))
    owned.processes.preload(["json"], {**os.environ, "NBDIST_TEST_VARIABLE": odd}).result(30)
    owned.start("worker0", "tell", str(tmp_path / "told"), odd, NBDIST_TEST_VARIABLE=odd)
    facts = json.loads(read(tmp_path / "told"))
    assert facts["variable"] == facts["word"] == odd
    assert facts["directory"] == str(tmp_path / odd)
    assert str(tmp_path / odd) in facts["path"]


def test_a_start_in_a_deleted_directory_says_so_and_can_be_repeated(owned, tmp_path, monkeypatch):
    owned.processes.ready(30)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").mkdir()
    os.chdir("short")
    (tmp_path / "short").rmdir()
    with pytest.raises(UsageError, match=r"the working directory of this process, .*, has been deleted: change to"):
        owned.start("worker0", "sleep")
    with pytest.raises(UsageError, match=r"the working directory of this process, .*, has been deleted: change to"):
        owned.processes.preload(["json"])
    os.chdir(tmp_path)
    owned.start("worker0", "sleep")


def test_a_directory_that_is_deleted_meanwhile_ends_no_zygote(tmp_path, monkeypatch):
    found = Owned(True)
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"cannot import anything in .*gone: No such file or directory"):
        found.processes.preload(["json"]).result(30)
    monkeypatch.undo()
    found.start("worker0", "sleep")
    found.processes.close()


def test_random_numbers_differ(owned, tmp_path):
    for number in range(3):
        owned.start(f"worker{number}", "tell", str(tmp_path / str(number)), "")
    assert len({json.loads(read(tmp_path / str(number)))["random"] for number in range(3)}) == 3


def test_ends_are_told_with_their_code(owned):
    owned.start("worker0", "leave", "0")
    owned.start("worker1", "leave", "7")
    owned.start("worker2", "crash", str(signal.SIGSEGV.value))
    owned.start("worker3", "crash", str(signal.SIGKILL.value))
    owned.start("worker4", "fail")
    assert [owned.end_of(f"worker{number}") for number in range(5)] == [0, 7, -signal.SIGSEGV, -signal.SIGKILL, 1]
    assert "ValueError: nothing works" in owned.processes.log("worker4").read_text()
    assert owned.processes.living == {}


def test_a_name_is_free_again_when_its_worker_has_ended(owned):
    first = owned.start("worker0", "sleep")
    with pytest.raises(UsageError, match="worker0"):
        owned.start("worker0", "sleep")
    owned.processes.signal("worker0", signal.SIGKILL)
    assert owned.end_of("worker0") == -signal.SIGKILL
    second = owned.start("worker0", "sleep")
    assert second != first
    assert owned.processes.living == {"worker0": second}


def test_an_interrupt_reaches_the_one_that_it_is_meant_for(owned, tmp_path):
    owned.start("worker0", "tell", str(tmp_path / "told"), "")  # by now Python's own handler is in place
    read(tmp_path / "told")
    owned.start("worker1", "sleep")
    owned.start("worker2", "with_children", str(tmp_path / "children"))
    read(tmp_path / "children")
    owned.processes.signal("worker2", signal.SIGINT)
    assert owned.end_of("worker2") in (1, -signal.SIGINT)
    assert list(owned.processes.living) == ["worker1"]


def test_what_a_worker_started_ends_with_the_cluster(owned, tmp_path):
    owned.start("worker0", "with_children", str(tmp_path / "children"))
    owned.start("worker1", "ignore_signals", str(tmp_path / "deaf"))
    children = [int(pid) for pid in read(tmp_path / "children").split()]
    read(tmp_path / "deaf")
    pids = [*owned.processes.living.values(), *children]
    assert not any(gone(pid) for pid in pids)
    owned.processes.close()
    assert all(gone(pid) for pid in pids)


def test_what_a_killed_worker_started_in_its_session_ends_with_it(owned, tmp_path):
    owned.start("worker0", "with_children", str(tmp_path / "children"))
    child, stray = (int(pid) for pid in read(tmp_path / "children").split())
    owned.processes.signal("worker0", signal.SIGKILL)
    owned.end_of("worker0")
    wait_until(lambda: gone(child))
    assert not gone(stray)  # it asked to stay; the end of the cluster is the end of it too


def test_the_death_of_the_zygote_is_the_workers_death(owned):
    pids = [owned.start("worker0", "sleep"), owned.start("worker1", "hold_the_gil")]
    os.kill(owned.processes.pid, signal.SIGKILL)
    assert owned.end_of("worker0") == owned.end_of("worker1") == -signal.SIGKILL
    wait_until(lambda: all(gone(pid) for pid in pids))
    with pytest.raises(WorkerLost, match="has ended"):
        owned.start("worker0", "sleep")


def test_a_worker_that_cannot_be_made_harms_no_other(owned, monkeypatch):
    pid = owned.start("worker0", "sleep")
    if not owned.processes.ready().forks:
        monkeypatch.setattr(owned.processes, "log", lambda name: owned.folder / "nowhere" / name)
        with pytest.raises(WorkerLost, match=r"worker1 cannot start: .*nowhere"):
            owned.start("worker1", "sleep")
        monkeypatch.undo()
    owned.start("worker2", "no_such_function")
    assert owned.end_of("worker2") == 1
    assert "no_such_function" in owned.processes.log("worker2").read_text()
    assert owned.processes.living == {"worker0": pid}


def test_a_variable_that_cannot_be_fails_one_start(owned):
    pid = owned.start("worker0", "sleep")
    impossible = {**os.environ, "NBDIST=TEST": "x"}
    if owned.processes.ready().forks:
        owned.processes.start("worker1", f"{ENTRIES}:sleep", (), impossible).result(30)
        assert owned.end_of("worker1") == 1
    else:
        with pytest.raises(WorkerLost, match="worker1 cannot start: illegal environment variable name"):
            owned.processes.start("worker1", f"{ENTRIES}:sleep", (), impossible).result(30)
    assert owned.processes.living == {"worker0": pid}


def test_a_zygote_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr("nbdist.cluster.processes.worker_processes._BOOT", "raise SystemExit('no way')")
    found = Owned(True)
    with pytest.raises(WorkerLost, match=r"has ended, so no worker can live.*: no way"):
        found.processes.ready(30)
    found.processes.close()


def test_many_threads_start_workers_with_large_environments_at_once():
    found = Owned(True)
    names = [f"worker{number}" for number in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        pids = list(pool.map(lambda name: found.start(name, "sleep", **LARGE), names))
    assert found.processes.living == dict(zip(names, pids, strict=True))
    found.processes.close()


@pytest.fixture
def deaf() -> Iterator[Owned]:
    """A zygote that is stopped, so that it reads nothing."""
    found = Owned(True)
    found.processes.ready(30)
    os.kill(found.processes.pid, signal.SIGSTOP)
    yield found
    found.processes.close()


LARGE = {f"NBDIST_TEST_{number}": "x" * 60_000 for number in range(5)}
"""An environment with which a request does not fit into the socket."""


def test_nobody_waits_for_a_zygote_that_reads_nothing(deaf):
    """It imports, say, for as long as a module takes. So Ctrl-C ends a start meanwhile."""
    names = [f"worker{number}" for number in range(4)]
    futures = [deaf.processes.start(name, f"{ENTRIES}:sleep", (), {**os.environ, **LARGE}) for name in names]
    assert not any(future.done() for future in futures)
    os.kill(deaf.processes.pid, signal.SIGCONT)
    pids = [future.result(30) for future in futures]
    assert deaf.processes.living == dict(zip(names, pids, strict=True))


def test_the_end_of_a_zygote_that_reads_nothing(deaf):
    future = deaf.processes.start("worker0", f"{ENTRIES}:sleep", (), {**os.environ, **LARGE})
    deaf.processes.close(0.5)
    with pytest.raises(WorkerLost):
        future.result(30)
    wait_until(lambda: not any(thread.name == "nbdist-to-zygote" for thread in threading.enumerate()))


def test_a_zygote_that_fails_says_why(owned):
    owned.start("worker0", "sleep")
    owned.processes.line.send_encoded(b"no message")
    assert owned.end_of("worker0") == -signal.SIGKILL
    with pytest.raises(WorkerLost, match="has ended"):
        owned.start("worker1", "sleep")
    assert "DecodeError" in (owned.folder / "zygote.log").read_text()


OWNER = """
import json, os, sys, time
from pathlib import Path
from nbdist.cluster.processes.worker_processes import Processes
folder, entry, fork = sys.argv[1:]
processes = Processes(Path(folder), lambda *_: None, preload=["slow_to_import" if entry == "none" else "fractions"],
                      fork=fork == "fork")
pids = [processes.pid]
if entry != "none":
    for n in range(2):
        started = processes.start(f"worker{n}", "helpers.processes.entries:" + entry, [f"{folder}.told{n}"])
        pids.append(started.result(30))
if os.fork() == 0:  # what the owner has forked keeps its end of the line open
    time.sleep(600)
print(json.dumps(pids), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fork", ["fork", "spawn"])
@pytest.mark.parametrize("entry", ["sleep", "hold_the_gil", "ignore_signals", "with_children", "none"])
def test_nothing_is_left_of_a_killed_owner(tmp_path, entry, fork):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "slow_to_import.py").write_text(
        f"import {ENTRIES} as entries; entries.with_children({str(folder) + '.told0'!r})"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), entry, fork],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **python_path(tmp_path, Path(__file__).parents[1])},
    )
    assert owner.stdout is not None
    try:
        pids = json.loads(owner.stdout.readline())
        sons = [child.pid for child in psutil.Process(owner.pid).children() if child.pid not in pids]
        for number in range(1 if entry == "none" else 2):  # by then it does what it shall be found doing
            pids += [int(pid) for pid in read(Path(f"{folder}.told{number}")).split()]
        assert not any(gone(pid) for pid in pids)
    finally:
        owner.kill()
        owner.wait()
    try:
        wait_until(lambda: all(gone(pid) for pid in pids) and not folder.exists())
    finally:
        for pid in sons:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL (out of memory, or killed by hand)"),
        (-11, "was killed by SIGSEGV (a crash in native code)"),
        (-15, "was killed by SIGTERM"),
        (-35, "was killed by signal 35"),
    ],
)
def test_an_end_in_words(code, words):
    assert describe_exit(code) == words
