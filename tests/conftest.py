"""Tests keep their sockets and their secret in a directory of their own, and leave none behind.

And a world of agents in this process, for the tests of what is built on calls: autograd, optim and nn.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

_runtime = tempfile.mkdtemp(prefix="nbdist-tests-", dir="/tmp")
os.environ["NBDIST_RUNTIME_DIR"] = _runtime

# Whoever runs the tests in the background has them ignore Ctrl-C, and all that they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# An example may take long on a busy machine: that is no failure. All else is as hypothesis chose, for CI or here.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Hide the objects of all collected tests from the garbage collector.

    There are 700,000, and one collection of them takes 0.4 s. Some tests ask for hundreds of collections.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
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
    deadline = time.monotonic() + 10
    while any(agent.recorder.contexts.all() for agent in three):
        assert time.monotonic() < deadline, "a context is left somewhere"
        time.sleep(0.01)


def pytest_addoption(parser):
    parser.addoption("--pictures", help="a folder in which tests of pages leave pictures of them")
