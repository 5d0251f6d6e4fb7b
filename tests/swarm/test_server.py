"""One server: what it is asked, by whom, in which order, with how much room."""

import threading
import weakref

import pytest
import torch
from helpers.models import swarm_models
from helpers.threads import in_thread
from helpers.waiting import wait_until

from nbdist.errors import UsageError
from nbdist.gpus import staging
from nbdist.rpc import api
from nbdist.swarm import adapter, model_cache, serve
from nbdist.swarm.history import Step
from nbdist.swarm.server.cache_budget import CacheFull
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.queues import TooLarge
from nbdist.swarm.server.server import NotHere, Options, Server
from nbdist.swarm.server.session_caches import NoSession
from nbdist.swarm.server.sources import offer
from nbdist.swarm.stacking import StackInput
from nbdist.testing import World


@pytest.fixture(scope="module")
def world():
    with World(3) as world, world[0].activate():
        yield world


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, and how its blocks are called for a text of five tokens, and then for one more."""
    model = swarm_models.make("llama")
    folder = tmp_path_factory.mktemp("llama")
    adapter.write_checkpoint(model, folder)
    notes = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: notes.append((args[0].detach(), adapter.strip(args[1:], kwargs, cache))),
            with_kwargs=True,
        )
    cache = model_cache.new_cache(model.config)
    ids = swarm_models.one()["input_ids"][:, :5]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    hiddens = [notes[0][0], notes[6][0]]
    calls = [tuple(call for _, call in notes[:6]), tuple(call for _, call in notes[6:])]
    return folder, model.config, hiddens, calls


@pytest.fixture
def ask(world, llama):
    """Servers with options, and what they are asked."""
    made = []

    def make(**options):
        key = f"key{len(made)}"
        rref = api.remote(
            f"worker{1 + len(made) % 2}", Server, (offer(adapter.Checkpoint(llama[0])), Options(**options), key)
        )
        rref.rpc_sync().load(0, 6)
        made.append(rref)
        return rref, key

    yield make
    made.clear()


class Client:
    """Asks a server for steps of sessions."""

    def __init__(self, llama, server, key, me):
        _, self.config, self.hiddens, self.calls = llama
        self.server = server
        self.key = key
        self.me = me

    def held(self, id, begin=0):
        return swarm_models.servers_here()[self.key].find(id, begin)  # all workers are in this process

    def open(self, id, begin=0, expected=0):
        self.server.rpc_sync().open(id, begin, model_cache.new_cache(self.config), self.me, expected)

    def step(self, id, number, begin=0, end=6, hidden=None, **options):
        given = self.hiddens[number] if hidden is None else hidden
        step = Step((), given, self.calls[number][begin:end])
        return self.server.rpc_async().step(id, begin, number, step, pushed=not given.numel(), **options)


@pytest.fixture
def client(world, llama, ask):
    return lambda **options: Client(llama, *ask(**options), world[0].me.incarnation)


def test_a_step_that_was_taken_has_the_same_answer_again(client):
    one = client()
    one.open("s")
    first = one.step("s", 0).wait().result
    second = one.step("s", 1)
    again = one.step("s", 1)  # a client that has not heard in time asks once more
    assert torch.equal(second.wait().result, again.wait().result)
    assert one.server.rpc_sync().info().steps == 2
    assert not torch.equal(first[:, -1:], second.wait().result)
    with pytest.raises(UsageError, match="step 0 comes after step 1"):
        one.step("s", 0).wait()
    with pytest.raises(NoSession, match="no session t at block 0"):
        one.step("t", 0).wait()


@pytest.mark.parametrize("worker", ["worker0", "worker1"])
def test_what_comes_out_may_be_used_in_a_graph_also_where_the_server_is(world, llama, worker):
    server = api.remote(worker, Server, (offer(adapter.Checkpoint(llama[0])), Options(), f"graph on {worker}"))
    server.rpc_sync().load(0, 6)
    one = Client(llama, server, f"graph on {worker}", world[0].me.incarnation)
    one.open("s")
    weight = torch.ones(one.hiddens[0].shape[-1], requires_grad=True)
    for number in (0, 1):  # the second with what the first has left in the caches
        result = one.step("s", number).wait().result
        (result * weight).sum().backward()  # which tensors of inference mode refuse
        result += 1.0
    assert weight.grad is not None


def test_what_goes_in_may_come_before_or_after_and_twice(client):
    one = client()
    one.open("s")
    expected = [one.step("s", number).wait().result for number in (0, 1)]
    hidden, nothing = one.hiddens[0], torch.empty(0)
    for order in ("before", "after"):
        one.open(order)
        if order == "after":
            asked = one.step(order, 0, hidden=nothing)
            wait_until(lambda: one.held(order).asked)  # noqa: B023
            assert not asked.done()
        for _ in range(2):
            one.server.rpc_sync().push(order, 0, 0, hidden)
        if order == "before":
            asked = one.step(order, 0, hidden=nothing)
        assert torch.equal(asked.wait(10).result, expected[0])
        one.server.rpc_sync().push(order, 0, 0, torch.zeros(1, 5, 32))  # late: that step is over
        assert torch.equal(one.step(order, 1).wait(10).result, expected[1])


def test_what_goes_in_is_brought_to_the_gpu_while_the_session_is_free(client, monkeypatch):
    """Large hidden states take the pinned way, whose GPU is a stand-in here; nobody waits with a lock."""
    one = client()
    one.open("s")
    expected = [one.step("s", number).wait().result for number in (0, 1)]
    one.open("t")
    brought = []

    def to_gpu(hidden, device):
        owner = one.held("t").changed
        assert owner.acquire(timeout=10)  # at once in the thread that holds it, else when it is free
        brought.append(owner._is_owned() and owner._release_save()[0])
        return hidden.clone()

    monkeypatch.setattr(staging, "to_gpu", to_gpu)
    one.server.rpc_sync().push("t", 0, 0, one.hiddens[0])
    assert torch.equal(one.step("t", 0, hidden=torch.empty(0)).wait(10).result, expected[0])
    assert torch.equal(one.step("t", 1).wait(10).result, expected[1])
    assert brought == [1, 1], "the thread had the lock once, from here"


def test_it_pushes_to_the_next(client, world):
    one, two = client(), client()
    one.open("alone")
    expected = one.step("alone", 0).wait().result
    one.open("s", 0)
    two.open("s", 3)
    one.server.rpc_sync().link("s", 0, Address("worker2", "key1"), 3)
    last = two.step("s", 0, 3, hidden=torch.empty(0))
    middle = one.step("s", 0, 0, 3).wait().result
    assert torch.equal(last.wait(10).result, expected)
    two.open("t", 3)
    assert torch.equal(two.step("t", 0, 3, hidden=middle).wait().result, expected)


def test_a_session_that_is_opened_anew_while_it_ends_keeps_its_room(world, llama):
    folder, config, hiddens, calls = llama
    server = Server(offer(adapter.Checkpoint(folder)), Options(cache_bytes=10**6), "anew")
    server.load(0, 6)
    cache = model_cache.new_cache(config)
    server.open("s", 0, cache, 1)
    server.step("s", 0, 0, Step((), hiddens[0], calls[0])).wait(10)
    used, before = server.info().cache, server.find("s", 0)
    assert used
    end = before.end

    def late(why):
        server.open("s", 0, cache, 1, 0, (1, 5, 6, 1.0))  # while the first is on its way out
        end(why)

    before.end = late
    server.close("s")
    assert before.ended
    assert not server.find("s", 0).ended
    assert server.info().cache == used
    server.close("s")
    assert server.info().cache == server.info().sessions == 0


def test_what_does_not_come_in_time_is_an_error(client):
    one = client()
    one.open("s")
    asked = one.step("s", 0, hidden=torch.empty(0), patience=0.1)
    with pytest.raises(TimeoutError, match="the input of step 0 has not arrived"):
        asked.wait(10)
    assert one.step("s", 0).wait().result.shape == (1, 5, 32)  # nothing has happened to the session


def test_only_so_many_steps_wait_for_what_goes_in(client, monkeypatch):
    monkeypatch.setattr("nbdist.swarm.server.server._MOST_ASKED", 2)
    one = client()
    one.open("s")
    waiting = [one.step("s", number, hidden=torch.empty(0), patience=5.0) for number in range(2)]
    with pytest.raises(UsageError, match="has 2 steps without an input"):
        one.step("s", 1, hidden=torch.empty(0), patience=5.0).wait(10)
    one.server.rpc_sync().close("s")
    for each in waiting:
        with pytest.raises(NoSession):
            each.wait(10)


def test_a_cache_has_no_other_sequences_than_its_own(llama):
    cache = model_cache.new_cache(llama[1])
    cache.layers[0].update(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))
    model_cache.operate(cache, "reorder_cache", (torch.tensor([1, 1]),), 0, 1)
    for wrong in ([2, 0], [0, -1], [10**6]):
        with pytest.raises(UsageError, match="the cache has 2 sequences, and reorder_cache asks for others"):
            model_cache.operate(cache, "reorder_cache", (torch.tensor(wrong),), 0, 1)
    assert cache.layers[0].keys.shape == (2, 2, 3, 4)


def test_a_session_that_is_closed_lets_go_of_who_waits(client):
    one = client()
    one.open("s")
    asked = one.step("s", 0, hidden=torch.empty(0))
    one.server.rpc_sync().close("s")
    with pytest.raises(NoSession, match=r"its client has closed it|there is no session"):  # which of both comes first
        asked.wait(10)
    assert one.server.rpc_sync().info().sessions == 0


def test_a_step_without_all_blocks_changes_no_cache(client):
    one = client()
    for name in ("s", "t"):
        one.open(name)
        one.step(name, 0).wait()
    expected = one.step("s", 1).wait().result
    one.server.rpc_sync().unload(range(4))
    with pytest.raises(NotHere, match=r"does not have block 4, only \[0, 1, 2, 3\]: the swarm has moved it"):
        one.step("t", 1).wait(10)
    assert [layer.get_seq_length() for layer in one.held("t").cache.layers] == [5] * 6
    one.server.rpc_sync().load(4, 6)
    assert torch.equal(one.step("t", 1).wait().result, expected)


def test_a_step_that_fails_inside_ends_the_session(client):
    one = client()
    one.open("s")
    one.step("s", 0).wait()
    blocks = swarm_models.servers_here()[one.key].blocks
    whole, blocks[3] = blocks[3], Failing()
    with pytest.raises(NotHere, match="as a failing block"):
        one.step("s", 1).wait(10)
    blocks[3] = whole
    for again in (lambda: one.step("s", 1).wait(10), lambda: one.server.rpc_sync().export("s", 0, 0, 6, 1.0)):
        with pytest.raises(NoSession, match="NotHere in a step left its caches incomplete"):
            again()
    one.open("s")
    assert one.step("s", 0).wait().result.shape == (1, 5, 32)


class Failing(torch.nn.Module):
    """A block that fails."""

    def forward(self, hidden, **kwargs):
        raise NotHere("as a failing block")


def test_a_session_whose_caches_were_fetched_fails_at_once(client):
    one = client()
    one.open("s")
    one.step("s", 0).wait()
    waiting = one.step("s", 1, hidden=torch.empty(0))
    wait_until(lambda: one.held("s").asked)
    cache, taken, _, _ = one.server.rpc_sync().export("s", 0, 0, 6, 1.0)
    assert model_cache.length(cache, (0, 6)) == 5
    assert taken == 0
    for late in (waiting, one.step("s", 1)):
        with pytest.raises(NoSession, match="another server has fetched its caches"):
            late.wait(10)
    with pytest.raises(NoSession, match="another server has fetched its caches"):
        one.server.rpc_sync().export("s", 0, 0, 6, 1.0)


PER_TOKEN = 2 * 2 * 8 * 4 * 6  # keys and values, two heads of eight floats, six blocks


def test_room_is_waited_for_in_order_and_is_free_when_a_session_ends(client):
    one = client(cache_bytes=16 * PER_TOKEN)
    info = one.server.rpc_sync().info
    one.open("a", expected=12)
    assert one.step("a", 0).wait().cache == 5 * PER_TOKEN or info().cache >= 12 * PER_TOKEN
    assert info().cache == 12 * PER_TOKEN  # for all that it is going to have
    for name in ("b", "c"):
        one.open(name, expected=6)
    waiting = []
    for name in ("b", "c"):
        waiting.append(one.step(name, 0))
        wait_until(lambda: info().wanting == len(waiting))
    assert one.step("a", 1).wait(10)  # who has room goes on
    assert not any(each.done() for each in waiting)
    one.server.rpc_sync().close("a")
    assert all(each.wait(10) for each in waiting)
    assert info().cache == 12 * PER_TOKEN
    one.server.rpc_sync().close("b")
    one.server.rpc_sync().close("c")
    assert info().cache == 0


def test_what_never_fits_fails_at_once_and_what_does_not_in_time_then(client):
    one = client(cache_bytes=8 * PER_TOKEN)
    one.open("a")
    one.step("a", 0).wait()
    one.open("b")
    with pytest.raises(CacheFull, match="did not become free in time"):
        one.step("b", 0, patience=0.2).wait(10)
    assert one.step("a", 1).wait(10)
    one.server.rpc_sync().close("a")
    small = client(cache_bytes=4 * PER_TOKEN)
    small.open("a")
    with pytest.raises(CacheFull, match="ever"):
        small.step("a", 0).wait(10)


def test_who_is_cancelled_while_waiting_for_room_waits_no_longer(client):
    one = client(cache_bytes=8 * PER_TOKEN)
    one.open("a")
    one.step("a", 0).wait()
    one.open("b")
    asked = one.step("b", 0)
    wait_until(lambda: one.server.rpc_sync().info().wanting)
    one.server.rpc_sync().close("b")
    with pytest.raises(NoSession):
        asked.wait(10)
    assert one.server.rpc_sync().info().cache == 5 * PER_TOKEN


def test_a_session_that_nobody_uses_expires(client):
    one = client(session_timeout=2.0)
    one.open("s")
    one.step("s", 0).wait()
    wait_until(lambda: one.server.rpc_sync().info().sessions == 0)
    assert one.server.rpc_sync().info().cache == 0
    with pytest.raises(NoSession):
        one.step("s", 1).wait()


def test_a_request_may_be_too_large(client):
    one = client(largest=4)
    one.open("s")
    with pytest.raises(TooLarge, match="step of 5 tokens is more than the 4"):
        one.step("s", 0).wait()
    with pytest.raises(TooLarge, match="forward"):
        one.server.rpc_sync().forward(0, StackInput(one.hiddens[0], one.calls[0]))


class Slow(torch.nn.Module):
    """A block that takes its time, and notes when it began."""

    def __init__(self, own, began):
        super().__init__()
        self.own = own
        self.began = began
        self.go = threading.Event()

    def forward(self, hidden, **kwargs):
        self.began.append(hidden.shape[0])
        self.go.wait(10)
        return self.own(hidden, **kwargs)


@pytest.fixture(params=[False, True], ids=["one by one", "stacked"])
def slow(world, llama, request):
    """A server of this process, whose first block can be held."""
    options = Options(stack=request.param, prioritize=lambda kind, size, points: -points)
    server = Server(offer(adapter.Checkpoint(llama[0])), options, "slow")
    server.load(0, 6)
    began = []
    server.blocks[0] = Slow(server.blocks[0], began)
    yield server, server.blocks[0], began
    server.blocks[0].go.set()


def test_a_busy_server_answers_and_does_first_what_is_paid_for(slow, llama):
    server, block, began = slow
    _, _, hiddens, calls = llama
    texts = lambda count: hiddens[0].expand(count, -1, -1)  # noqa: E731
    ends = [in_thread(server.forward, 0, StackInput(texts(1), calls[0]))]
    wait_until(lambda: began == [1])
    assert server.info().waiting == 0
    for count, points in ((2, 0.0), (3, 5.0), (4, 9.0)):
        item = StackInput(texts(count), calls[0], gradient=torch.ones(count, 5, 32))
        ends.append(in_thread(server.backward, 0, item, points))
        wait_until(lambda count=count: server.info().waiting == count - 1)
    block.go.set()
    replies = [end.result(10) for end in ends]
    assert began == ([1, 9] if server.options.stack else [1, 4, 3, 2])
    assert [reply.result[0].shape[0] for reply in replies[1:]] == [2, 3, 4]


def test_requests_that_are_alike_are_computed_as_one(slow, llama):
    server, block, began = slow
    _, _, hiddens, calls = llama
    torch.manual_seed(0)
    given = [torch.randn(count, 5, 32) for count in (1, 2, 3)]
    block.go.set()
    alone = [server.forward(0, StackInput(each, calls[0])).result for each in given]
    block.go.clear()
    began.clear()
    ends = [in_thread(server.forward, 0, StackInput(hiddens[0], calls[0]))]
    wait_until(lambda: began == [1])
    for number, each in enumerate(given, 1):
        ends.append(in_thread(server.forward, 0, StackInput(each, calls[0])))
        wait_until(lambda number=number: server.info().waiting == number)
    block.go.set()
    found = [end.result(10).result for end in ends[1:]]
    assert began == ([1, 6] if server.options.stack else [1, 1, 2, 3])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("shape", [(1, 5, 31), (2, 5, 32)])
def test_a_request_that_is_wrong_does_not_spoil_those_beside_it(slow, llama, shape):
    server, block, began = slow
    _, _, hiddens, calls = llama
    ends = [in_thread(server.forward, 0, StackInput(hiddens[0], calls[0]))]
    wait_until(lambda: began == [1])
    for number, given in enumerate((torch.ones(1, 5, 32), torch.ones(*shape)), 1):
        ends.append(in_thread(server.backward, 0, StackInput(hiddens[0], calls[0], gradient=given)))
        wait_until(lambda number=number: server.info().waiting == number)
    block.go.set()
    assert ends[1].result(10).result[0].shape == (1, 5, 32)
    assert isinstance(ends[2].exception(10), RuntimeError)


def test_a_server_goes_with_its_swarm(world, monkeypatch):
    removed, on_lost = [], world[1].on_lost

    def noted(listener):
        remove = on_lost(listener)
        return lambda: removed.append(remove())

    monkeypatch.setattr(world[1], "on_lost", noted)
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    server = weakref.ref(swarm_models.servers_here()[swarm.crew.member("worker1").address.name])
    swarm.close()
    wait_until(lambda: len(removed) == 2)  # by its deputy, and when it was freed
    assert server() is None
    with pytest.raises(UsageError, match="closed"):
        swarm.causal_lm()


def test_what_all_layers_share_is_moved_once():
    shared = torch.ones(3)
    told = adapter.LayerCall((shared, adapter.CACHE), {"mask": [shared], "n": 1})
    other = adapter.LayerCall((shared,), {})
    found = adapter.moved((told, other, told), "cpu", torch.bfloat16)
    assert found[0] is found[2]
    tensor = found[0].args[0]
    assert tensor.dtype == torch.bfloat16
    assert found[1].args[0] is found[0].kwargs["mask"][0] is tensor
    assert found[0].args[1] is adapter.CACHE
    assert told.args[0] is shared, "the given value stays as it is"
