"""``python -m nbdist worker --connect FILE --serve``: a worker that takes what a swarm needs most, by itself."""

import subprocess
import sys

import pytest
import torch
from helpers.hosts.keepers import Keepers
from helpers.models import swarm_models
from helpers.waiting import wait_until

from nbdist.__main__ import main
from nbdist.swarm import serve
from nbdist.swarm.directory.routing import Offer, needed
from nbdist.swarm.placer import VOLUNTEER
from nbdist.testing import World

MODEL = swarm_models.make("llama")


def offer(*blocks, pace=1e-3):
    return Offer(blocks, pace=pace)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([], (0, 6)),
        ([offer(0, 1, 2), offer(3, 4, 5)], (0, 2)),
        ([offer(0, 1), offer(4, 5)], (2, 4)),  # nobody has these
        ([offer(0, 1, 2, 3, 5)], (2, 5)),
        ([offer(0, 1, 2), offer(3, 4, 5), offer(0, 1, 2)], (3, 5)),  # one server only
        ([offer(0, 1, 2), offer(3, 4, 5, pace=2e-3)], (3, 5)),  # a slow one
        ([offer(0), offer(1, 2, 3, 4, 5)], (1, 3)),  # one with many blocks
    ],
)
def test_what_a_new_server_takes(offers, expected):
    assert needed(dict(enumerate(offers)), [1] * 6) == expected


def test_a_new_server_takes_what_fits_and_one_block_in_any_case():
    assert needed({}, [4, 1, 2, 9], room=7) == (0, 3)
    assert needed({}, [4, 1, 2, 9], room=3) == (0, 1)


def volunteers(swarm, count):
    """The blocks of so many workers that joined by themselves, once all serve."""
    wait_until(lambda: sum(state == "online" for state in swarm.states.values()) == 2 + count)
    return {worker: blocks for worker, blocks in swarm.blocks.items() if worker not in ("worker0", "worker1")}


@pytest.fixture
def keepers(tmp_path):
    found = Keepers(tmp_path)
    yield found
    found.end()


@pytest.mark.timeout(240)
def test_workers_that_are_started_with_serve(keepers):
    """Two come while a swarm serves. One is restarted, and leaves. Another swarm, which begins later, has both."""
    with keepers.cluster(2) as cluster:
        swarm = serve(MODEL, workers=[0, 1])
        keepers.grow(cluster, "-n", "2", "--serve", uses=2)
        assert sorted(volunteers(swarm, 2).values()) == [[0, 1], [2, 3]]
        assert torch.equal(swarm_models.generate(swarm.causal_lm(), "greedy"), swarm_models.generate(MODEL, "greedy"))
        cluster.restart("2")
        assert set(volunteers(swarm, 2)) == {"worker2", "worker3"}
        swarm.leave("worker2")
        swarm.crew.placing.take_in(swarm.crew._agent.find("worker2"))
        assert swarm.states["worker2"] == "offline"
        swarm.close()
        later = serve(MODEL, workers=[0, 1])
        assert len(volunteers(later, 2)) == 2
        later.close()


def test_a_volunteer_takes_what_nobody_has_and_nothing_of_a_swarm_that_is_closed(monkeypatch):
    monkeypatch.setenv(VOLUNTEER, "1")
    with World(3) as world, world[0].activate():
        swarm = serve(MODEL, workers=[1], spans=[(0, 4)])
        wait_until(lambda: list(swarm.states.values()), equals=["online"] * 3)
        blocks = swarm.blocks
        assert blocks.pop("worker1") == [0, 1, 2, 3]
        assert sorted(blocks.values()) == [[0, 1], [3, 4, 5]]
        swarm.close()
        swarm.crew.placing._directory.reset([], [])
        wait_until(lambda: not swarm_models.servers_here())
        swarm.crew.placing.take_in(world[2].me)
        assert not swarm_models.servers_here()


def test_a_host_that_cannot_serve_says_what_is_missing(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('no transformers here')")
    found = subprocess.run(
        [sys.executable, "-m", "nbdist", "worker", "--connect", "-", "--serve"],
        env={"PYTHONPATH": ":".join(filter(None, [str(tmp_path), *sys.path]))},
        input="",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 2
    assert 'nbdist.swarm needs transformers: pip install "nbdist[swarm]"' in found.stderr
    with pytest.raises(SystemExit):
        main(["worker", "--serve"])  # serves whom?
