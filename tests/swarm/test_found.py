"""What a reading of the swarm has found, and is not to come back."""

import copy
import gc
import sys
import threading
import time
import weakref

import pytest
import torch
import transformers
from helpers.models import swarm_models
from helpers.waiting import wait_until

from nbdist.errors import NbdistError, RpcTimeout, UsageError, WorkerLost
from nbdist.rpc.named import NamedObject
from nbdist.swarm import CacheFull, NoRoute, adapter, model_cache, serve
from nbdist.swarm.client.crew import Crew
from nbdist.swarm.directory import routing
from nbdist.swarm.placer import Placer
from nbdist.swarm.server.cache_room import Room
from nbdist.swarm.server.queues import TooLarge
from nbdist.swarm.server.server import Options, Server
from nbdist.swarm.server.session_caches import NoSession
from nbdist.swarm.server.sources import offer
from nbdist.swarm.stacking import StackInput, compare, parts, split, stack
from nbdist.testing import World

COMMON = {"vocab_size": 97}
ODD = {
    "mpt": lambda: transformers.MptConfig(d_model=32, n_heads=4, n_layers=6, max_seq_len=64, **COMMON),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        hidden_size=32,
        num_layers=6,
        num_heads=4,
        intermediate_size=64,
        attention_types=[[["global"], 6]],
        max_position_embeddings=64,
        **COMMON,
    ),
    "gptj": lambda: transformers.GPTJConfig(n_embd=32, n_layer=6, n_head=4, rotary_dim=4, n_positions=64, **COMMON),
}


@pytest.fixture(scope="module")
def world():
    with World(4) as world, world[0].activate():
        yield world


def make(family):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(ODD[family]()).eval()


@pytest.mark.parametrize("family", list(ODD))
@torch.no_grad()
def test_a_block_that_has_been_elsewhere_is_whole_again(world, family):
    model = make(family)
    swarm = serve(model, workers=[1, 2])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "one")
    swarm.move(0, 2, "worker2")
    swarm.move(0, 2, "worker1")
    assert torch.equal(swarm_models.generate(remote, "one"), expected)
    swarm.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_that_are_heads_are_not_taken_for_texts(world, size):
    model = make("mpt")
    swarm = serve(model, workers=[1, 2], micro_batch=size)
    ids = torch.randint(3, 97, (4, 7), generator=torch.Generator().manual_seed(0))
    remote = swarm.causal_lm()
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, remote(ids, use_cache=False).logits, atol=1e-5)
    assert swarm.crew.layout.shared
    swarm.close()


def test_what_is_stacked_is_told_apart_again(world):
    call = lambda **kwargs: adapter.LayerCall((), kwargs)  # noqa: E731
    layout = compare(
        call(heads=torch.zeros(4, 1, 3), alibi=torch.zeros(4, 1, 3), mask=torch.zeros(1, 1, 3, 3)),
        call(heads=torch.zeros(4, 1, 3), alibi=torch.zeros(8, 1, 3), mask=torch.zeros(2, 1, 3, 3)),
    )
    heads = torch.randn(4, 1, 3)

    def item(texts, **more):
        kwargs = {
            "heads": heads,
            "alibi": torch.randn(4 * texts, 1, 3),
            "mask": torch.randn(texts, 1, 3, 3),
            "both": (torch.ones(1, 3), True),
            **more,
        }
        return StackInput(
            torch.randn(texts, 3, 2), (adapter.LayerCall((), kwargs),), None, torch.randn(texts, 3, 2), layout
        )

    items = [item(4), item(1), item(2)]
    found = stack(items)
    (called,) = found.calls
    assert called.kwargs["heads"] is heads
    assert called.kwargs["alibi"].shape[0] == 28
    assert called.kwargs["mask"].shape[0] == 7
    assert [part.shape[0] for part in split(found.hidden, items)] == [4, 1, 2]
    assert stack([item(4), item(1, heads=torch.randn(4, 1, 3))]) is None
    assert stack([item(4), item(1, both=(torch.ones(1, 3), False))]) is None
    assert stack([item(4), item(1, both=(torch.ones(1, 3),))]) is None
    again = parts(items[0]._replace(gradient=None), 2)
    assert [part.calls[0].kwargs["alibi"].shape[0] for part in again] == [8, 8]
    assert all(part.calls[0].kwargs["heads"] is heads for part in again)
    assert torch.equal(torch.cat([part.calls[0].kwargs["mask"] for part in again]), items[0].calls[0].kwargs["mask"])


@pytest.mark.parametrize("error", [WorkerLost("worker2 was killed"), RpcTimeout("it does not answer")])
def test_who_cannot_hand_over_is_not_the_fault_of_who_asks(world, monkeypatch, error):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3])
    remote = swarm.causal_lm()

    def fail(*_):
        raise error

    monkeypatch.setattr("nbdist.swarm.server.server.Server.export", fail)
    criteria = transformers.StoppingCriteriaList([At(4, lambda: swarm.leave("worker2"))])
    found = swarm_models.generate(remote, "greedy", stopping_criteria=criteria)
    assert torch.equal(found, swarm_models.generate(model, "greedy"))
    assert swarm.states == {"worker1": "online", "worker2": "offline", "worker3": "online"}
    swarm.close()


class At(transformers.StoppingCriteria):
    def __init__(self, token, act):
        self.left, self.act = token, act

    def __call__(self, ids, scores, **_):
        self.left -= 1
        if not self.left:
            self.act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def test_room_that_is_asked_for_by_a_session_that_is_over_is_not_kept(world, tmp_path):
    model = swarm_models.make("llama")
    adapter.write_checkpoint(model, tmp_path)
    server = Server(offer(adapter.Checkpoint(tmp_path)), Options(cache_bytes=1000), "over")
    server.open("s", 0, model_cache.new_cache(model.config), client=0)
    session, room = server.find("s", 0), Room(1000)
    server.close("s")  # an interrupt, while it computes
    with pytest.raises(NoSession, match="its client has closed it"):
        room.reserve("s", session, 10.0, 5, time.monotonic() + 1)
    assert room.used == 0


def test_a_session_that_is_opened_anew_while_it_ends_is_not_taken_for_it(world, tmp_path):
    model = swarm_models.make("llama")
    adapter.write_checkpoint(model, tmp_path)
    server = Server(offer(adapter.Checkpoint(tmp_path)), Options(), "anew")
    cache = model_cache.new_cache(model.config)
    for begin in (0, 3):
        server.open("s", begin, cache, 1)
    first, other = server.find("s", 0), server.find("s", 3)
    end = first.end

    def late(why):
        server.open("s", 3, cache, 1)  # while `close` still has the earlier session of block 3 in hand
        end(why)

    first.end = late
    server.close("s")
    assert other.ended
    assert not server.find("s", 3).ended
    server.close("s")
    assert server.info().sessions == 0


def test_an_opening_that_fails_gives_back_what_it_had(world):
    per_token = 2 * 2 * 8 * 4
    swarm = serve(swarm_models.make("llama"), workers=[1, 2], spans=[(0, 1), (1, 6)], cache_bytes=50 * per_token)
    remote = swarm.causal_lm()
    with pytest.raises(CacheFull) as kept:
        swarm_models.generate(remote, "one")
    wait_until(
        lambda: not any(info.cache or info.sessions for info in swarm.info().values()),
        f"room, with {kept.value!r} still there",
    )
    swarm.close()


def test_the_first_that_fails_ends_all_parts_of_a_batch(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1], micro_batch=1)
    remote = swarm.causal_lm()
    count = []

    def fail(*_, **__):
        count.append(1)
        time.sleep(0.05)
        raise ZeroDivisionError

    monkeypatch.setattr("nbdist.swarm.server.server.Server.forward", fail)
    with pytest.raises(ZeroDivisionError):
        remote(torch.zeros(200, 3, dtype=torch.long), use_cache=False)
    assert len(count) < 100
    swarm.close()


@torch.no_grad()
def test_caches_that_are_elsewhere_are_not_copied_and_refused_operations_not_told(world):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1])
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    cache = remote(ids).past_key_values
    with pytest.raises(UsageError, match=r"copy\.deepcopy cannot copy this cache"):
        copy.deepcopy(cache)
    with pytest.raises(TypeError):
        cache.crop("three")
    assert remote(ids[:, :1], past_key_values=cache).logits.shape == (1, 1, 97)
    swarm.close()


def test_gradients_and_prompts_of_blocks(world):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    blocks = swarm.sequential()
    with blocks.session() as session, pytest.raises(UsageError, match="no gradient"):
        session.step(torch.zeros(1, 2, 32, requires_grad=True))
    with torch.no_grad():
        assert blocks(torch.zeros(2, 1, 32), prompts=torch.zeros(6, 1, 5, 32)).shape == (2, 1, 32)
    swarm.close()


def test_one_that_cannot_take_blocks_is_left_alone_and_another_asked(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3], spans=[(0, 2), (2, 3), (3, 6)])
    remote = swarm.causal_lm()
    own = Server.load

    def load(self, begin, end):
        if 2 in self.blocks:
            raise MemoryError("none left")
        return own(self, begin, end)

    monkeypatch.setattr(Server, "load", load)
    swarm.crew.lose(swarm.crew.member("worker3").incarnation, "it is said to be gone")
    swarm.crew.ban_seconds = 600
    assert torch.equal(swarm_models.generate(remote, "one"), swarm_models.generate(model, "one"))
    assert swarm.states == {"worker1": "online", "worker2": "banned", "worker3": "gone"}
    assert "worker2 could not take blocks 3-5: MemoryError: none left" in "\n".join(swarm.log)
    swarm.close()


def test_one_does_not_kill_oneself(world):
    swarm = serve(swarm_models.make("llama"), workers=["worker0"])
    with pytest.raises(UsageError, match="this process"):
        swarm.kill("worker0")
    swarm.close()


# -- a second reading --------------------------------------------------------------------------------


class Slow(torch.nn.Module):
    """A block that takes its time."""

    def __init__(self, own, seconds):
        super().__init__()
        self.own, self.seconds = own, seconds

    def forward(self, hidden, **kwargs):
        time.sleep(self.seconds)
        return self.own(hidden, **kwargs)


def server_of(swarm, name):
    return swarm_models.servers_here()[swarm.crew.member(name).address.name]  # all workers are in this process


def make_slow(swarm, name, seconds):
    server = server_of(swarm, name)
    first = min(server.blocks)
    server.blocks[first] = Slow(server.blocks[first], seconds)


@torch.no_grad()
def test_a_listener_that_fails_harms_nobody(world, monkeypatch):
    told = []  # pytest would keep what is logged, and with it the caches of whoever had news
    monkeypatch.setattr("nbdist.swarm.client.journal._log.exception", lambda *_: told.append(str(sys.exception())))
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    remote = swarm.causal_lm()
    swarm.listen(lambda: 1 / 0)
    for _ in range(2):
        swarm_models.generate(remote, "one")
        wait_until(lambda: not any(info.sessions for info in swarm.info().values()))
    swarm.crew.lose(swarm.crew.member("worker2").incarnation, "it is said to be gone")
    swarm_models.generate(remote, "one")
    assert set(told) == {"division by zero"}
    swarm.close()


@torch.no_grad()
def test_nobody_is_blamed_for_those_before(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2, 3], step_timeout=3.0)
    remote = swarm.causal_lm()
    for worker in ("worker1", "worker2", "worker3"):
        make_slow(swarm, worker, 1.2)
    remote(swarm_models.one()["input_ids"], use_cache=True)
    assert set(swarm.states.values()) == {"online"}
    assert len(swarm.log) == 3
    swarm.close()


@torch.no_grad()
def test_a_time_out_that_many_meet_is_one(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2], spans=[(0, 6), (0, 6)], step_timeout=2.0, micro_batch=1)
    remote = swarm.causal_lm()
    make_slow(swarm, "worker1", 3.0)
    remote(swarm_models.one()["input_ids"].repeat(6, 1), use_cache=False)
    assert [line for line in swarm.log if "left alone" in line] == [
        "worker1 did not answer for 2 s: it is left alone for 5 s"
    ]
    swarm.close()


def test_a_priority_that_is_none_is_its_askers_error(world):
    swarm = serve(swarm_models.make("llama"), workers=[1], prioritize=lambda kind, *_: 0.0 if kind == "step" else None)
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    with torch.no_grad():
        with pytest.raises(TypeError, match="float"):
            remote(ids, use_cache=False)
        assert remote(ids, use_cache=True).logits.shape[-1] == 97
    assert swarm.states == {"worker1": "online"}
    swarm.close()


@pytest.mark.parametrize("what", ["a step", "a forward"])
@torch.no_grad()
def test_an_error_keeps_neither_caches_nor_servers(world, what):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2], largest=10)
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    cache = model_cache.new_cache(remote.config)
    gc.collect()
    gc.disable()
    try:
        remote(ids, past_key_values=cache)
        session = cache.nbdist[1]
        servers = [(server_of(swarm, span.server), span.begin) for span in session.route]
        known = [weakref.ref(each) for server, at in servers for each in (server, server.find(session.id, at))]
        assert len(known) == 4
        del servers, session
        with pytest.raises(TooLarge):
            remote(ids.repeat(1, 3), past_key_values=cache) if what == "a step" else remote(ids.repeat(1, 3))
        del cache
        swarm.close()
        wait_until(lambda: not any(each() for each in known))
    finally:
        gc.enable()


def test_blocks_that_there_are_not(world):
    model = swarm_models.make("llama")
    with pytest.raises(UsageError, match="no blocks from 3 to 7: there are 6"):
        serve(model, workers=[1, 2], spans=[(0, 3), (3, 7)])
    swarm = serve(model, workers=[1])
    for call in (swarm.join, swarm.move):
        args = (2, -2, 3) if call == swarm.join else (-2, 3, "worker1")
        with pytest.raises(UsageError, match="no blocks from -2 to 3"):
            call(*args)
    with pytest.raises(UsageError, match="no blocks from 3 to 3"):
        swarm.route(3, 3)
    assert swarm.states == {"worker1": "online"}
    swarm.close()


def test_a_join_that_fails_leaves_nothing_behind(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    known = set(swarm_models.servers_here())
    monkeypatch.setattr(Server, "load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swarm.join(2)
    wait_until(lambda: known.issuperset(swarm_models.servers_here()))
    swarm.close()


@pytest.mark.parametrize("what", ["leave", "close"])
def test_who_has_left_does_not_come_back_by_itself(world, monkeypatch, what):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2], spans=[(0, 6), (0, 3)])
    own, loading, go = Server.load, threading.Event(), threading.Event()

    def load(self, begin, end):
        loading.set()
        go.wait(10)
        return own(self, begin, end)

    failed = []

    def join():
        with world[0].activate(), pytest.raises(NbdistError, match="offline" if what == "leave" else "closed") as error:
            swarm.join(2, 3, 6)
        failed.append(str(error.value))

    monkeypatch.setattr(Server, "load", load)
    thread = threading.Thread(target=join)
    thread.start()
    loading.wait(10)
    swarm.leave(2) if what == "leave" else swarm.close()
    go.set()
    thread.join(10)
    assert failed
    assert swarm.states == {"worker1": "online" if what == "leave" else "offline", "worker2": "offline"}
    swarm.close()


@torch.no_grad()
def test_a_call_to_a_server_that_has_left_does_not_blame_the_next_one_there(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2], spans=[(0, 3), (3, 6)])
    remote = swarm.causal_lm()
    crew, ids = swarm.crew, swarm_models.one()["input_ids"]
    own = crew.compute

    def compute(member, *args):
        found = own(member, *args)
        if member.name == "worker1" and "worker3" not in swarm.states:  # between the two spans of the call's route
            swarm.join(3, 3, 6)
            swarm.leave(2)
            swarm.join(2, 3, 6)
        return found

    monkeypatch.setattr(crew, "compute", compute)
    assert torch.equal(remote(ids, use_cache=False).logits, model(ids).logits)
    assert swarm.states == {"worker1": "online", "worker3": "online", "worker2": "online"}
    assert "is gone" not in "\n".join(swarm.log)
    swarm.close()


@pytest.mark.parametrize(("part", "where"), [(Placer, "_send_load"), (Crew, "outwait")])
def test_an_interrupted_join_is_not_waited_for(world, monkeypatch, part, where):
    swarm = serve(swarm_models.make("llama"), workers=[1], spans=[(0, 3)])
    known = set(swarm_models.servers_here())

    def interrupted(_, member, *__):
        wait_until(lambda: member.address.name in swarm_models.servers_here())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(part, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            swarm.join(2, 3, 6)
    assert swarm.states == {"worker1": "online", "worker2": "gone"}
    wait_until(lambda: known.issuperset(swarm_models.servers_here()))  # its worker frees the server
    swarm.crew.lose(swarm.crew.member("worker1").incarnation, "it is said to be gone")
    with pytest.raises(NoRoute):
        swarm.route()
    swarm.close()


def test_who_dies_while_it_is_relieved_is_gone(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    crew, member = swarm.crew, swarm.crew.member("worker1")
    own = routing.assign

    def assign(*args):
        crew.lose(member.incarnation, "it is said to be gone")
        return own(*args)

    monkeypatch.setattr(routing, "assign", assign)
    with pytest.raises(NoRoute, match="worker1 is gone"):
        swarm.leave(1)
    assert swarm.states == {"worker1": "gone"}
    swarm.close()


def test_a_session_that_comes_just_as_the_thread_would_end_is_looked_after(world, monkeypatch, tmp_path):
    model = swarm_models.make("llama")
    adapter.write_checkpoint(model, tmp_path)
    monkeypatch.setattr("nbdist.swarm.server.runtime._IDLE_SECONDS", 0.3)
    came, plain = [], Server.look

    def look(server):
        found = plain(server)
        if not found and not came:
            came.append(server.open("second", 0, model_cache.new_cache(model.config), 1))
        return found

    monkeypatch.setattr(Server, "look", look)
    server = Server(offer(adapter.Checkpoint(tmp_path)), Options(session_timeout=0.2), "just")
    server.open("first", 0, model_cache.new_cache(model.config), 1)
    wait_until(lambda: came)
    wait_until(lambda: server.info().sessions == 0)


@torch.no_grad()
def test_a_way_that_a_move_left_unlinked_is_linked(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    remote = swarm.causal_lm()
    cache = model_cache.new_cache(remote.config)
    ids = swarm_models.one()["input_ids"]
    remote(ids, past_key_values=cache)
    swarm.join(3, 0, 3)
    swarm.move(0, 3, "worker3")
    assert server_of(swarm, "worker3").find(cache.nbdist[1].id, 0).next is None
    monkeypatch.setattr("nbdist.swarm.client.session._PUSH_SECONDS", 60)
    own = swarm.crew.send

    def send(member, method, *args, **kwargs):
        assert method != "push", "the server before did not push it"
        return own(member, method, *args, **kwargs)

    monkeypatch.setattr(swarm.crew, "send", send)
    remote(ids[:, :1], past_key_values=cache)
    assert server_of(swarm, "worker3").find(cache.nbdist[1].id, 0).next is not None
    swarm.close()


def test_a_leave_that_was_interrupted_is_gone_on_with(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(swarm.sessions, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swarm.leave(2)
    assert swarm.states == {"worker1": "online", "worker2": "draining"}
    swarm.leave(2)
    assert swarm.states == {"worker1": "online", "worker2": "offline"}
    swarm.close()


def test_a_session_that_cannot_leave_stops_nobody(world, monkeypatch):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2, 3])
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    with torch.no_grad():
        caches = [remote(ids).past_key_values for _ in range(2)]
        first = caches[0].nbdist[1]
        with monkeypatch.context() as patched:
            patched.setattr(first, "_replace", lambda at: swarm.crew.member("nobody"))
            swarm.leave(2)
        assert (
            f"session {first.id} could not leave worker2 yet: nobody serves no blocks: it never joined this swarm, "
            "has left it, or is gone"
        ) in swarm.log
        expected = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
        for cache in caches:
            found = remote(ids[:, :1], past_key_values=cache).logits
            assert torch.allclose(found, expected, atol=1e-5)
    swarm.close()


def test_all_servers_are_asked_at_once_how_they_are(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    meeting, info = threading.Barrier(2), Server.info

    def meet(server):
        meeting.wait(10)
        return info(server)

    monkeypatch.setattr(Server, "info", meet)
    assert sorted(swarm.info()) == ["worker1", "worker2"]


def test_what_was_interrupted_is_brought_to_its_end(world, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(swarm.sessions, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swarm.move(0, 2, "worker2")
    assert swarm.info()["worker1"].blocks == [2]  # the others are unloaded
    mine = {swarm.crew.member(name).address.name for name in ("worker1", "worker2")}
    assert mine.issubset(swarm_models.servers_here())
    with monkeypatch.context() as patched:
        patched.setattr(NamedObject, "cast", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swarm.close()
    swarm.close()
    wait_until(lambda: mine.isdisjoint(swarm_models.servers_here()))
