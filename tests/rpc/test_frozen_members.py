"""A member joins while another one is busy or stopped, and does not answer in time."""

from __future__ import annotations

import signal
import tempfile
import time

import pytest
from helpers.processes import workers
from helpers.waiting import wait_until
from msgspec import structs

import nbdist
from nbdist import rpc
from nbdist.rpc.api import current_agent
from nbdist.testing import World
from nbdist.wire.messages import Envelope, encode_envelope

SERVE = "workers.released.wait(60)"
SOON = 0.5


@pytest.fixture
def impatient(monkeypatch):
    """Do not wait 12 s for an answer."""
    monkeypatch.setattr("nbdist.rpc.world.handshake._LEAST_PATIENCE", SOON)


def join(name: str, rank: int, store: str) -> None:
    rpc.init_rpc(
        name,
        rank=rank,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}", suspect_after=0.2, lost_after=SOON),
    )


def names() -> list[str]:
    return sorted(record.name for record in current_agent().members())


def met_by(name: str) -> int:
    """How many members another member knows, with itself."""
    return rpc.rpc_sync(name, workers.statistics)["members"]


@pytest.mark.parametrize("replaced", [False, True], ids=["new", "restarted"])
def test_a_stopped_member_of_this_host_stays_a_member(impatient, replaced):
    """It may have to notice first that the process which had the newcomer's name has ended."""
    store = tempfile.mktemp(prefix="nbdist-test-")
    others = workers.Workers()
    try:
        frozen = others.start("frozen", workers.member("frozen", 1, None, store, then=SERVE))
        others.start("first", workers.member("first", 0, None, store, then=SERVE))
        join("witness", 2, store)
        wait_until(lambda: names() == ["first", "frozen", "witness"])
        wait_until(lambda: met_by("frozen") == 3)  # the two may have started at the same time
        assert rpc.rpc_sync("frozen", workers.call_there, args=("first", workers.name)) == "first"
        rpc.shutdown(graceful=False)
        workers.stop(frozen.pid)
        if replaced:
            others.kill("first")
        name, rank = ("first", 0) if replaced else ("late", 3)
        join(name, rank, store)
        assert "frozen" in names()
        later = rpc.rpc_async("frozen", workers.name)
        frozen.send_signal(signal.SIGCONT)
        assert later.wait() == "frozen"
        assert rpc.rpc_sync("frozen", workers.call_there, args=(name, workers.name)) == name
        others.start("last", workers.member("last", 4, None, store, then=SERVE))  # the list still has all
        wait_until(lambda: "last" in names())
        wait_until(lambda: met_by("last") == len(names()))
        assert rpc.rpc_sync("last", workers.call_there, args=("frozen", workers.name)) == "frozen"
    finally:
        rpc.shutdown(graceful=False)
        others.end()


def test_a_member_of_another_host_that_was_given_up_learns_it_when_it_answers(impatient, monkeypatch):
    with World(1, dynamic=True) as world:
        first = world[0]
        late = world._make("late", 1, None)
        world.agents.append(late)
        greetings = []
        with monkeypatch.context() as patch:
            patch.setattr(first.handshake, "on_stranger", greetings.append)
            far = structs.replace(first.me, host="far")
            assert late.handshake.join_dynamic([far], time.monotonic() + SOON) == [far]
        with late.activate(), pytest.raises(nbdist.WorkerLost, match="worker0 did not answer when late joined"):
            rpc.rpc_sync("worker0", workers.name)
        lost = []
        first.on_lost(lambda record, why: lost.append(record.name))
        envelope = Envelope(late.me.incarnation, first.me.incarnation, 0, 1, 0, [], greetings[-1])
        late.channel.connect(first.me.addresses).send([encode_envelope(envelope)], "hello")
        wait_until(lambda: lost == ["late"])
        assert [record.name for record in first.members()] == ["worker0"]
