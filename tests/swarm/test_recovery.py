"""Sessions that survive: what is lost is brought back at once or step by step, and what is to go elsewhere moves."""

import re
import threading
import time

import pytest
import torch
import transformers
from helpers.models import swarm_models

import nbdist
from nbdist.errors import UsageError
from nbdist.swarm import model_cache, serve
from nbdist.swarm.client.crew import Gone
from nbdist.swarm.directory.routing import NoRoute
from nbdist.testing import World


@pytest.fixture(scope="module")
def world():
    with World(4) as world, world[0].activate():
        yield world


class Each(transformers.StoppingCriteria):
    """Does something behind certain tokens."""

    def __init__(self, steps):
        self.steps = steps
        self.count = 0

    def __call__(self, ids, scores, **_):
        self.count += 1
        self.steps.get(self.count, lambda: None)()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def each(steps):
    return transformers.StoppingCriteriaList([Each(steps)])


def forget(swarm, name):
    """A server that has lost all of its sessions, as one that has been started anew."""
    member = swarm.crew.member(name)
    for id in [session.id for session in swarm.sessions.open()]:
        swarm.crew.ask(member, "close", id)


@pytest.mark.parametrize("family", list(swarm_models.CONFIGS))
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup"])
def test_at_once(world, family, mode):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2, 3], recover="fast")
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, mode)
    steps = {2: lambda: forget(swarm, "worker1"), 3: lambda: forget(swarm, "worker3")}
    assert torch.equal(swarm_models.generate(remote, mode, stopping_criteria=each(steps)), expected)
    told = [line for line in swarm.log if "goes on" in line]
    assert len(told) == 2
    assert all("tokens at once" in line or "1 step again" in line for line in told), told
    swarm.close()


def test_what_comes_out_different_at_once_is_done_step_by_step(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2])
    remote = swarm.causal_lm(recover="fast")
    expected = swarm_models.generate(model, "greedy")
    monkeypatch.setattr("nbdist.swarm.client.merging.is_near", lambda *_: False)
    steps = {4: lambda: forget(swarm, "worker2")}
    assert torch.equal(swarm_models.generate(remote, "greedy", stopping_criteria=each(steps)), expected)
    assert "its result was different); replaying step by step" in "\n".join(swarm.log)
    assert "4 steps again" in "\n".join(swarm.log)
    swarm.close()


def test_what_is_not_pushed_is_brought(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3])
    monkeypatch.setattr("nbdist.swarm.server.neighbours.Address.hand_on", lambda *_: None)
    monkeypatch.setattr("nbdist.swarm.client.session._PUSH_SECONDS", 0.01)
    found = swarm_models.generate(swarm.causal_lm(), "greedy")
    assert torch.equal(found, swarm_models.generate(model, "greedy"))
    assert set(swarm.states.values()) == {"online"}
    swarm.close()


EMPTY = {"no sequences": (0, 5), "no tokens": (1, 0)}


@pytest.mark.parametrize("what", list(EMPTY))
@pytest.mark.parametrize("family", ["falcon", "llama"])
@torch.no_grad()
def test_an_empty_text_is_answered_as_by_one_process(world, family, what):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2], step_timeout=5.0)
    remote = swarm.causal_lm()
    ids = torch.zeros(EMPTY[what], dtype=torch.long)
    try:
        expected = model(ids).logits
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            remote(ids)
    else:
        assert torch.equal(remote(ids).logits, expected)
    assert set(swarm.states.values()) == {"online"}
    swarm.close()


@pytest.mark.parametrize("recover", ["exact", "fast"])
@torch.no_grad()
def test_an_empty_step_is_replayed_as_others(world, recover):
    model = swarm_models.make("falcon")
    swarm = serve(model, workers=[1, 2], recover=recover, cache_bytes=10**6)
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    caches = [model_cache.new_cache(each.config) for each in (model, remote)]
    for given in (ids[:, :0], ids[:, :5], ids[:, :0], ids[:, 5:]):
        forget(swarm, "worker1")
        expected, found = (
            each(given, past_key_values=cache).logits for each, cache in zip((model, remote), caches, strict=True)
        )
        assert torch.allclose(found, expected, atol=1e-5)
    assert set(swarm.states.values()) == {"online"}
    swarm.close()


# -- moving ------------------------------------------------------------------------------------------


def test_a_worker_that_leaves_takes_nothing_along(world):
    model = swarm_models.make("gemma2")
    swarm = serve(model, workers=[1, 2, 3])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "beams", tokens=20)
    states = []

    def leave():
        swarm.listen(lambda: states.append(swarm.states["worker2"]))
        swarm.leave("worker2")

    steps = {6: leave, 12: lambda: swarm.join("worker2", 2, 4), 15: lambda: swarm.leave("worker1")}
    assert torch.equal(swarm_models.generate(remote, "beams", tokens=20, stopping_criteria=each(steps)), expected)
    log = "\n".join(swarm.log)
    assert "moved from worker2 to worker" in log
    assert "again" not in log  # nothing was computed twice
    assert "at once" not in log
    assert states.index("draining") < states.index("offline")
    assert swarm.states == {"worker1": "offline", "worker3": "online", "worker2": "online"}
    with pytest.raises(UsageError, match="worker1 serves no blocks"):
        swarm.leave("worker1")
    swarm.close()


def test_blocks_move_and_sessions_with_them(world):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "greedy", tokens=16)
    steps = {5: lambda: swarm.move(2, 4, "worker3"), 9: lambda: swarm.move(0, 1, "worker3")}
    found = swarm_models.generate(remote, "greedy", tokens=16, stopping_criteria=each(steps))
    assert torch.equal(found, expected)
    assert swarm.blocks == {"worker1": [1], "worker2": [], "worker3": [0, 2, 3, 4, 5]}
    assert "moved from worker2 to worker3" in "\n".join(swarm.log)
    swarm.close()


@torch.no_grad()
def test_a_session_that_a_move_left_behind_computes_no_token_twice(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3], spans=[(0, 2), (2, 6), (2, 4)])
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    caches = [model_cache.new_cache(each.config) for each in (model, remote)]
    for number in range(4, ids.shape[1]):
        if number == 7:

            def interrupted(session):
                raise KeyboardInterrupt

            session = caches[1].nbdist[1]
            assert session.route[1:] == [("worker2", 2, 6)]
            with monkeypatch.context() as patched:
                patched.setattr(type(session), "settle", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    swarm.move(4, 6, "worker3")
        given = ids[:, :5] if number == 4 else ids[:, number : number + 1]
        expected, found = (
            each(given, past_key_values=cache).logits for each, cache in zip((model, remote), caches, strict=True)
        )
        assert torch.equal(found, expected)
    assert "again" not in "\n".join(swarm.log)  # the caches have moved
    assert session.route[1:] == [("worker3", 2, 6)]
    swarm.close()


@torch.no_grad()
def test_a_session_whose_move_failed_is_replayed_at_once_and_nobody_is_banned(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3], spans=[(0, 2), (2, 6), (2, 4)])
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    own, cache = (model_cache.new_cache(each.config) for each in (model, remote))
    model(ids, past_key_values=own)
    remote(ids, past_key_values=cache)

    def full(*_):
        raise nbdist.swarm.CacheFull("there is no memory")

    with monkeypatch.context() as patched:  # after the caches have been fetched
        patched.setattr("nbdist.swarm.server.cache_room.Room.reserve", full)
        swarm.move(2, 6, "worker3")
    assert "could not leave worker2 yet: there is no memory" in "\n".join(swarm.log)
    found, expected = remote(ids[:, :1], past_key_values=cache), model(ids[:, :1], past_key_values=own)
    assert torch.equal(found.logits, expected.logits)
    assert set(swarm.states.values()) == {"online"}
    swarm.close()


@torch.no_grad()
def test_caches_that_a_failed_recovery_has_begun_anew_do_not_move(world, monkeypatch):
    """worker1 loses some blocks, stays in the route with the others, and gets the steps again; then worker2 dies."""
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2], spans=[(0, 6), (3, 6)])
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    own, cache = (model_cache.new_cache(each.config) for each in (model, remote))
    for part in (ids[:, :3], ids[:, 3:5]):
        model(part, past_key_values=own)
        remote(part, past_key_values=cache)
    session = cache.nbdist[1]
    assert session.route == [("worker1", 0, 6)]
    done = []

    def again(session, *args):
        if done:  # of two steps, the first
            monkeypatch.undo()
            swarm.join("worker3", 0, 6)
            swarm.crew.forsake(swarm.crew.member("worker2"), "died")
            raise Gone("worker2")
        done.append(args)
        return step(session, *args)

    step = type(session)._step_of_lost_part
    monkeypatch.setattr(type(session), "_step_of_lost_part", again)
    swarm.move(3, 6, "worker2")
    assert "2 steps again" in "\n".join(swarm.log)
    found, expected = remote(ids[:, 5:6], past_key_values=cache), model(ids[:, 5:6], past_key_values=own)
    assert torch.equal(found.logits, expected.logits)
    swarm.close()


def test_who_comes_is_waited_for(world):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1], route_timeout=20.0)
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "greedy")
    threads = []

    def lose_all():
        forget(swarm, "worker1")
        swarm.crew.lose(swarm.crew.member("worker1").incarnation, "it is said to be gone")
        threads.append(threading.Timer(0.5, lambda: swarm.join("worker2")))
        threads[0].start()

    assert torch.equal(swarm_models.generate(remote, "greedy", stopping_criteria=each({5: lose_all})), expected)
    threads[0].join()
    assert swarm.states == {"worker1": "gone", "worker2": "online"}
    swarm.close()


def test_who_cannot_come_is_not_waited_for(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    monkeypatch.setattr("nbdist.swarm.server.server.Server.load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swarm.join(2)
    assert swarm.states == {"worker1": "online", "worker2": "gone"}
    swarm.crew.lose(swarm.crew.member("worker1").incarnation, "it is said to be gone")
    with pytest.raises(NoRoute, match="worker2 is gone: division by zero"):
        swarm.route()
    swarm.close()


def test_the_last_cannot_leave(world):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    with pytest.raises(NoRoute):
        swarm.leave("worker1")
    assert swarm.states == {"worker1": "online"}
    assert swarm_models.generate(swarm.causal_lm(), "one").shape == (1, 21)
    swarm.close()


def test_a_worker_leaves_while_several_write(world):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3])
    expected = swarm_models.generate(model, "greedy", tokens=24)
    found = []

    def write():
        with world[0].activate():
            found.append(swarm_models.generate(swarm.causal_lm(), "greedy", tokens=24))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    swarm.leave("worker2")
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert all(torch.equal(one, expected) for one in found)
    assert swarm.states["worker2"] == "offline"
    swarm.close()


# -- room, parts, and who is served first ----------------------------------------------------------


def test_room_for_caches_is_asked_for_with_the_length_of_the_text(world):
    model = swarm_models.make("llama")
    per_token = 2 * 2 * 8 * 4 * 3
    swarm = serve(model, workers=[1, 2], cache_bytes=30 * per_token, step_timeout=5.0)
    remote = swarm.causal_lm()
    assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))  # 9 and 12 tokens
    with pytest.raises(nbdist.swarm.CacheFull, match="ever"):
        swarm_models.generate(remote, "beams", tokens=30)
    assert set(swarm.states.values()) == {"online"}
    # two side by side do not fit: the second waits for the first
    found = []

    def write():
        with world[0].activate():
            found.append(swarm_models.generate(swarm.causal_lm(), "one"))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert all(torch.equal(one, swarm_models.generate(model, "one")) for one in found)
    swarm.close()


@pytest.mark.parametrize("family", list(swarm_models.CONFIGS))
def test_long_steps_in_parts(world, family):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[1, 2], chunk=4, recover="fast")
    remote = swarm.causal_lm()
    for mode in ("greedy", "prompt lookup"):
        steps = {6: lambda: forget(swarm, "worker1")}
        found = swarm_models.generate(remote, mode, stopping_criteria=each(steps))
        assert torch.equal(found, swarm_models.generate(model, mode))
    swarm.close()


def test_who_spends_more(world):
    asked = []

    def spend(kind, tokens):
        asked.append((kind, tokens))
        return 3.0

    swarm = serve(swarm_models.make("llama"), workers=[1, 2], spend=spend)
    remote = swarm.causal_lm()
    swarm_models.generate(remote, "greedy", tokens=2)
    ids = swarm_models.batch()["input_ids"]
    remote(inputs_embeds=remote.get_input_embeddings()(ids).requires_grad_(), use_cache=False).logits.sum().backward()
    assert [each for each in asked if each[0] == "step"] == [("step", 18), ("step", 2)]
    assert {kind for kind, _ in asked} == {"step", "forward", "backward"}
    swarm.close()


def test_a_session_says_how_it_is(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    remote = swarm.causal_lm()
    told = []
    forget_it = swarm.listen(lambda: told.append(swarm.snapshot()))
    cache = model_cache.new_cache(remote.config)
    with torch.no_grad():
        remote(swarm_models.one()["input_ids"], past_key_values=cache)
    forget_it()
    last = told[-1]
    assert last["route"] == [["worker1", 0, 3], ["worker2", 3, 6]]
    assert last["session"]["tokens"] == 9
    assert [server["steps"] for server in last["servers"]] == [1, 1]
    assert last["servers"][0]["cache"] == 9 * 2 * 2 * 8 * 4 * 3
    assert last["count"] == 6
    assert last["bytes"] == sum(swarm.sizes)
    assert any("worker1 serves blocks 0-2" in text for _, text in last["log"])
    swarm.close()
