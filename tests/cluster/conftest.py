"""A notebook with a cluster, shared by the tests of one module; and keepers, whose workers join a cluster."""

import pytest
from helpers.hosts.keepers import Keepers
from helpers.notebook.frontend import Notebook


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("import os, signal, sys, threading, time\nimport torch")
        notebook.run("%dist_init -n 2 -t 60")
        yield notebook
        notebook.run("%dist_shutdown")


@pytest.fixture
def two(notebook):
    """A cluster of two living workers with a process group, whatever the test before did."""
    notebook.run(
        "from nbdist import Cluster\n"
        "if any(worker.lost for worker in Cluster.current.workers):\n"
        "    Cluster.current.restart(process_group=True)"
    )
    return notebook


@pytest.fixture
def keepers(tmp_path):
    """The keepers that a test starts; they end with the test."""
    keepers = Keepers(tmp_path)
    yield keepers
    keepers.end()
