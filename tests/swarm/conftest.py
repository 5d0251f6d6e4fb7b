"""Three workers for tests that kill them."""

import pytest
from helpers.models import swarm_models

import nbdist


@pytest.fixture(scope="module", autouse=True)
def _no_servers_of_other_files():
    swarm_models.forget_servers()


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
