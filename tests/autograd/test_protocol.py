"""Passes over workers that are only queues: every order of messages gives what plain autograd gives.

No sockets and no threads: a `Net` holds all messages under way and delivers one at a time, at random. The programs are
those of a generator of its own, which moves tensors between workers directly, so that each shape of graph can come up,
also such as no sequence of calls would make.
"""

import random
from functools import partial

import pytest
import torch

from nbdist.autograd.graph import edges, messages
from nbdist.autograd.graph.messages import Missing, PassId, Report, Token
from nbdist.autograd.passes.contexts import Contexts
from nbdist.autograd.passes.ddp_turns import Turns
from nbdist.autograd.passes.ledger import Ledger
from nbdist.autograd.passes.pass_driver import Passes
from nbdist.autograd.passes.worker_part import Entry, Part
from nbdist.rpc.futures import Future

WORKERS = 3


class Net:
    def __init__(self, chance):
        self.chance, self.flying = chance, []
        self.combined = 0
        """How many gradients had a report with them."""
        self.workers = [Worker(self, number) for number in range(WORKERS)]

    def deliver_all(self):
        while self.flying:
            self.flying.pop(self.chance.randrange(len(self.flying)))()


class Worker:
    """What passes need of an agent."""

    def __init__(self, net, number):
        self.net, self.me, self.name = net, number, f"worker{number}"
        self.contexts = Contexts(number, number)
        self.passes = Passes(self, self.contexts, lambda context, frozen: None)

    def post(self, to, message, body=None):
        message = messages.decode(messages.encode(message))
        self.net.combined += type(message) is messages.Gradients and message.report is not None
        self.net.flying.append(partial(self.net.workers[to].take, message, body, self.me))

    def tell(self, to, message, body=None):
        self.post(to, message, body)

    def name_of(self, worker):
        return f"worker{worker}"

    def is_there(self, worker):
        return True

    def submit(self, job):
        self.net.flying.append(job)

    def take(self, message, body, sender):
        kind = type(message)
        if kind is messages.Gradients:
            self.passes.on_gradients(message, [None if g is None else g.clone() for g in body])
        elif kind is messages.Report:
            self.passes.on_report(message, sender)
        elif kind is messages.Failed:
            self.passes.on_failed(message, body)
        else:
            {
                messages.Mark: self.passes.on_mark,
                messages.Marked: self.passes.on_marked,
                messages.Cancel: self.passes.on_cancel,
            }[kind](message)


def moved(net, context_id, sender, receiver, tensors):
    """The tensors, on another worker."""
    recorded = [tensor for tensor in tensors if tensor.requires_grad]
    if not recorded:
        return [tensor.clone() for tensor in tensors]
    message = net.workers[sender].contexts.next_message()
    net.workers[sender].contexts.get(context_id).sends[message] = edges.Sent(message, receiver, recorded, "f")
    end = edges.Received(message, sender, "f")
    net.workers[receiver].contexts.get(context_id).receives[message] = end
    made = iter(edges.receive(end, [tensor.detach().clone() for tensor in recorded]))
    return [next(made) if tensor.requires_grad else tensor.clone() for tensor in tensors]


def program(chance, move, counts):
    """Leaves and roots of a random computation on several workers; ``counts`` has an entry for each hook."""
    values, leaves = {worker: [] for worker in range(chance.choice([2, WORKERS]))}, []
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))

    def counted(change):
        number = len(counts)
        counts.append(0)

        def hook(gradient, *_):
            counts[number] += 1
            return change(gradient)

        return hook

    def leaf(worker):
        made = torch.randint(-3, 4, (2,), generator=generator).double().requires_grad_()
        leaves.append(made)
        values[worker].append(made)
        if chance.random() < 0.3:
            made.register_hook(counted(lambda g: g * 2))
        if chance.random() < 0.2:
            made.register_post_accumulate_grad_hook(counted(lambda _: None))

    for worker in values:
        leaf(worker)
        leaf(worker)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: a - b,
        lambda a, _: a * 2,
        lambda a, b: torch.stack([a, b]).unbind(0)[0],
        lambda a, b: torch.stack([a, b]).unbind(0)[1],
    ]
    for _ in range(chance.randrange(3, 25)):
        worker, what = chance.choice(list(values)), chance.random()
        here = values[worker]
        if what < 0.5:
            made = chance.choice(operations)(chance.choice(here), chance.choice(here))
            here.append(made)
            if made.requires_grad and chance.random() < 0.3:
                made.register_hook(counted(lambda g: None if g is None else g + 1))
            if made.requires_grad and chance.random() < 0.2:
                made.grad_fn.register_hook(counted(lambda _: None))
        elif what < 0.9:
            chosen = {id(t): t for t in (chance.choice(here) for _ in range(chance.randrange(1, 4)))}
            other = chance.choice(list(values))
            values[other] += move(worker, other, list(chosen.values()))
        else:
            leaf(worker)
    return leaves, sum(t.sum() for t in chance.sample(values[0], min(len(values[0]), 2)))


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_any_order_of_messages(first):
    """The same programs every time, so many that each planted fault of the protocol meets several that show it."""
    combined = 0
    for seed in range(first, first + 500):
        try:
            combined += run_and_compare(seed)
        except BaseException as error:
            error.add_note(f"program {seed}")
            raise
    assert combined, "no gradient took a report along"


def run_and_compare(seed):
    counts = []
    leaves, loss = program(random.Random(seed), lambda *_: [t.view_as(t) for t in _[2]], counts)
    loss.backward()

    net, found_counts = Net(random.Random(seed + 1)), []
    context = net.workers[0].contexts.new()
    for worker in net.workers[1:]:
        worker.contexts.enter(context.id, 0)
    moved_leaves, loss = program(
        random.Random(seed), lambda *arguments: moved(net, context.id, *arguments), found_counts
    )
    passes = net.workers[0].passes
    ended = Future()
    run = passes.begin(context, Entry([(loss.grad_fn, 0)], [torch.ones_like(loss)]), ended)
    passes.go(run)
    net.deliver_all()
    assert ended.done(), "the pass does not end"
    passes.wait(run)
    gradients = {}
    for worker in net.workers:
        gradients.update({id(leaf): g for leaf, g in worker.contexts.get(context.id).gradients().items()})
    for leaf, other in zip(leaves, moved_leaves, strict=True):
        found = gradients.get(id(other))
        assert other.grad is None
        assert (found is None or not found.any()) if leaf.grad is None else torch.equal(found, leaf.grad)
    assert found_counts == counts
    return net.combined


@pytest.fixture
def hasty(monkeypatch):
    """When a thread has run what it can, another begins to take note that the marking is over, and is held up there."""
    nets, run = [], Part.run
    cut_short = []

    def run_and_be_told(part, before_step):
        waits = run(part, before_step)
        for message in nets[0].flying:
            told = getattr(message, "args", None)
            if told and type(told[0]) is messages.Marked:
                receiver = message.func.__self__
                (worker,) = [each for each in nets[0].workers if receiver in (each, each.passes)]
                theirs = [each for context in worker.contexts.all() for each in context.runs.values()]
                if any(each.head.id == told[0].id and each.part is part for each in theirs):
                    cut_short.append(part.unsure)
                    part.end_marking()
        return waits

    monkeypatch.setattr(Part, "run", run_and_be_told)
    monkeypatch.setattr(Net, "__init__", _then(Net.__init__, lambda net: nets.insert(0, net)))
    yield
    assert any(cut_short), "it did not come to that"


def _then(function, action):
    def both(self, *args):
        function(self, *args)
        action(self)

    return both


def test_what_waits_is_not_dealt_with_because_the_marking_ends_at_that_moment(hasty):
    for seed in range(500):
        run_and_compare(seed)


# --- the ledger -----------------------------------------------------------------------------------

ROOT, OTHER, THIRD = 1, 2, 3
BEGUN, MARK, GRADIENT, LATER = (Token(ROOT, n, n == 1) for n in range(4))


def report(number, settled=(), sent=(), marked=(), waits=False):
    return Report(PassId(ROOT, 1), number, list(settled), list(marked), list(sent), waits, [])


def test_nothing_is_over_before_the_root_has_said_what_it_began_with():
    ledger = Ledger(ROOT)
    assert not ledger.over
    ledger.take(OTHER, report(1, waits=True))
    assert not ledger.over
    assert not ledger.marking_is_over
    ledger.take(ROOT, report(1, sent=[(BEGUN, ROOT), (MARK, OTHER)]))
    assert not ledger.marking_is_over
    ledger.take(ROOT, report(2, settled=[BEGUN]))
    ledger.take(OTHER, report(2, settled=[MARK]))
    assert ledger.marking_is_over
    assert ledger.over


def test_a_report_that_has_overtaken_another_waits_for_it():
    ledger = Ledger(ROOT)
    ledger.take(ROOT, report(1, settled=[BEGUN], sent=[(BEGUN, ROOT), (GRADIENT, OTHER)]))
    ledger.take(OTHER, report(2, settled=[GRADIENT]))
    assert not ledger.over
    ledger.take(OTHER, report(1, sent=[(LATER, THIRD)]))
    assert not ledger.over, "what came of the gradient is still under way"
    ledger.take(THIRD, report(1, settled=[LATER]))
    assert ledger.over
    assert ledger.workers == {ROOT, OTHER, THIRD}


def test_what_waits_does_not_keep_the_marking_from_its_end():
    ledger = Ledger(ROOT)
    ledger.take(ROOT, report(1, settled=[BEGUN], sent=[(BEGUN, ROOT), (GRADIENT, OTHER)]))
    assert not ledger.marking_is_over, "nobody knows yet what will come of the gradient"
    ledger.take(OTHER, report(1, marked=[GRADIENT], waits=True))
    assert ledger.marking_is_over
    assert ledger.waiting == {OTHER}
    assert not ledger.over


@pytest.mark.parametrize("order", [(ROOT, OTHER, THIRD), (THIRD, OTHER, ROOT), (OTHER, ROOT, THIRD)])
def test_what_is_owed_does_not_depend_on_whose_report_came_first(order):
    ledger = Ledger(OTHER)
    owed = {worker: [Missing(8, "second", worker), Missing(7, "first", worker)] for worker in order}
    for worker in order:
        ledger.take(worker, Report(PassId(OTHER, 1), 1, [], [], [], False, owed[worker]))
    assert [worker for worker, _ in ledger.owed()] == [OTHER, OTHER, ROOT, ROOT, THIRD, THIRD]
    assert [missing.message for _, missing in ledger.owed()] == [7, 8] * 3


# --- turns ----------------------------------------------------------------------------------------


def test_passes_have_their_turns_in_the_order_in_which_they_asked():
    first, second, third = (PassId(root, 1) for root in (ROOT, OTHER, THIRD))
    turns = Turns()
    assert turns.ask(first) == first
    assert turns.ask(second) is None
    assert turns.ask(third) is None
    assert turns.end(second) is None, "it was given up while it waited"
    assert turns.end(first) == third
    assert turns.ask(first) is None
    assert turns.lose(THIRD) == first
    assert turns.lose(OTHER) is None
    assert turns.end(first) is None
