"""Tests keep their sockets and their secret in a directory of their own, and leave none behind.

And a world of agents in this process, for the tests of what is built on calls: autograd, optim and nn.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.processes.shared_cluster import FIXTURE, SHARED_CLUSTER, is_shared_by
from helpers.suite.needs import names_of, need_of
from helpers.waiting import wait_until
from hypothesis import settings

_runtime = tempfile.mkdtemp(prefix="nbdist-tests-", dir="/tmp")
os.environ["NBDIST_RUNTIME_DIR"] = _runtime

# Whoever runs the tests in the background has them ignore Ctrl-C, and all that they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# An example may take long on a busy machine: that is no failure. All else is as hypothesis chose, for CI or here.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.register_profile("quick", parent=settings.get_profile("patient"), max_examples=20)
settings.load_profile("patient")


def pytest_collection_modifyitems(items) -> None:
    """Mark each test with what it needs."""
    for item in items:
        fixtures = [each[-1].func for each in item._fixtureinfo.name2fixturedefs.values()]
        names = names_of(item.function, *fixtures, *filter(None, [item.cls]))
        item.add_marker(need_of(names))
        SHARED_CLUSTER.note(item, names)


def pytest_collection_finish() -> None:
    """Hide the objects of all collected tests from the garbage collector.

    There are 700,000, and one collection of them takes 0.4 s. Some tests ask for hundreds of collections.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    SHARED_CLUSTER.end()
    shutil.rmtree(_runtime, ignore_errors=True)


@pytest.fixture(autouse=True)
def _ctrl_c_does_what_it_did_before():
    """Fail the test that leaves another handler of Ctrl-C behind, and not a later one that needs it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is before


@pytest.fixture
def tmp_path():
    """A folder of one test, with a shorter name than pytest's: the sockets in it may have 107 bytes in theirs."""
    path = Path(tempfile.mkdtemp(prefix="nbd-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def three():
    from nbdist.testing import World  # not before there is the directory

    with World(3) as world:
        yield world


@pytest.fixture
def world(three):
    """Three agents of this process; the test's thread is the first one's."""
    with three[0].activate():
        yield three
    wait_until(lambda: not any(agent.recorder.contexts.all() for agent in three), "the end of all contexts")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    """End the shared cluster, if the test needs that, before the first fixture of the test starts another."""
    SHARED_CLUSTER.make_way(item)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Have one process run all files whose tests share a cluster: elsewhere tests between them would end it."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return FIXTURE if is_shared_by(config.rootpath / file) else file

    shares = config.getoption("dist") == "loadfile" and not config.getoption("--one-process")
    return ByFile(config, log) if shares else None


@pytest.fixture
def shared_cluster():
    """Two workers with a process group, which other tests use before and after: a test that leaves something fails."""
    yield SHARED_CLUSTER.take()
    if left := SHARED_CLUSTER.left():
        pytest.fail("the test leaves behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture
def own_variables(shared_cluster):
    """The variables that a test gives the workers of the shared cluster end with it."""
    yield
    SHARED_CLUSTER.remove_variables()


def pytest_addoption(parser):
    parser.addoption("--pictures", help="a folder in which tests of pages leave pictures of them")
    parser.addoption(
        "--one-process", action="store_true", help="fail a test that starts a process: see tests/helpers/suite/needs.py"
    )


_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Python's audit events of what starts a process."""
_running: list[str] = []
"""The test that runs, while it must start no process; else nothing."""


def _refuse(event: str, arguments: tuple) -> None:
    if _running and event in _STARTS:
        raise AssertionError(
            f"{_running[0]} starts a process, which tests/helpers/suite/needs.py overlooks: {event}{arguments}"
        )


def pytest_configure(config) -> None:
    if config.getoption("--one-process"):
        sys.addaudithook(_refuse)
        settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _starts_no_process(request):
    """Fail a test of `make quick` that starts a process."""
    if request.config.getoption("--one-process"):
        _running.append(request.node.nodeid)
    yield
    _running.clear()
