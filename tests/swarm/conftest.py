"""Three workers for tests that kill them."""

import gc

import pytest

import nbdist


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_of_other_files():
    """Errors that a test of another file has seen may refer to its servers, which tests here count."""
    gc.collect()


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(3, backend="none", preload=["nbdist.swarm"]) as cluster:
        yield cluster


@pytest.fixture
def three(cluster):
    """All workers, whatever the test before has done to them."""
    if any(worker.lost for worker in cluster.workers):
        cluster.restart()
    return cluster
