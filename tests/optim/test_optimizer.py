"""Optimizers, schedulers and clipping over workers do what torch's do in one process."""

import threading

import pytest
import torch

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.optim import DistributedLRScheduler, DistributedOptimizer, StepFailed, clip_grad_norm_


class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.spare = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x).tanh()


class Pair:
    """Two nets on two workers, and the same two here."""

    def __init__(self, world):
        self.local = [Net(1), Net(2)]
        self.remote = []
        for index in (1, 2):
            with world[index].activate():
                self.remote.append(Net(index))
        self.rrefs = []
        for index, net in zip((1, 2), self.remote, strict=True):
            _owned[index] = net
            self.rrefs.append(rpc.rpc_sync(f"worker{index}", parameter_rrefs, args=(index,)))

    @property
    def parameters(self):
        return [parameter for net in self.local for parameter in net.parameters()]

    @property
    def parameter_rrefs(self):
        return [rref for rrefs in self.rrefs for rref in rrefs]

    def local_loss(self, x):
        return self.local[1](self.local[0](x)).square().sum()

    def remote_loss(self, x):
        return rpc.rpc_sync("worker2", run, args=(2, rpc.rpc_sync("worker1", run, args=(1, x)))).square().sum()

    def assert_equal(self):
        for local, remote in zip(self.local, self.remote, strict=True):
            for (name, mine), theirs in zip(local.named_parameters(), remote.parameters(), strict=True):
                assert torch.equal(mine, theirs), name


_owned = {}


def parameter_rrefs(index):
    return [rpc.RRef(parameter) for parameter in _owned[index].parameters()]


def run(index, x):
    return _owned[index](x)


@pytest.fixture
def pair(world):
    return Pair(world)


INPUT = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
)
def test_steps_are_those_of_one_process(pair, cls, options):
    local = cls(pair.parameters, **options)
    distributed = DistributedOptimizer(cls, pair.parameter_rrefs, **options)
    for _ in range(4):
        local.zero_grad()
        pair.local_loss(INPUT).backward()
        local.step()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [pair.remote_loss(INPUT)])
            distributed.step(context_id)
        pair.assert_equal()
    assert all(parameter.grad is None for net in pair.remote for parameter in net.parameters())
    assert torch.equal(pair.remote[0].spare, torch.ones(2, dtype=torch.float64)), "it has no gradient"


def test_groups_schedulers_and_state(pair):
    first, second = pair.rrefs
    mine = [list(net.parameters()) for net in pair.local]
    local = torch.optim.SGD([{"params": mine[0], "lr": 0.5}, {"params": mine[1]}], lr=0.1, momentum=0.9)
    distributed = DistributedOptimizer(
        torch.optim.SGD, [{"params": first, "lr": 0.5}, {"params": second}], lr=0.1, momentum=0.9
    )
    local_rates = torch.optim.lr_scheduler.StepLR(local, step_size=1, gamma=0.5)
    rates = DistributedLRScheduler(torch.optim.lr_scheduler.StepLR, distributed, step_size=1, gamma=0.5)

    def step():
        local.zero_grad()
        pair.local_loss(INPUT).backward()
        local.step()
        with dist_autograd.context():
            dist_autograd.backward(pair.remote_loss(INPUT))
            distributed.step()

    for _ in range(2):
        step()
        local_rates.step()
        rates.step()
        pair.assert_equal()
    assert rates.get_last_lr() == {"worker1": [0.125, 0.025], "worker2": [0.125, 0.025]}
    state, rate_state = distributed.state_dict(), rates.state_dict()

    distributed = DistributedOptimizer(
        torch.optim.SGD, [{"params": first, "lr": 0.5}, {"params": second}], lr=0.1, momentum=0.9
    )
    distributed.load_state_dict(state)
    rates.load_state_dict(rate_state)
    step()
    pair.assert_equal()


def test_local_references_too(world):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=1.0)
    with dist_autograd.context():
        dist_autograd.backward((weight * 3).sum())
        optimizer.step()
    assert torch.equal(weight.detach(), torch.full((2,), -2.0))


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("limit", [0.1, 1000.0])
def test_clipping_goes_by_the_norm_of_all(world, pair, norm, limit):
    pair.local_loss(INPUT).backward()
    expected = torch.nn.utils.clip_grad_norm_(pair.parameters, limit, norm)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(pair.remote_loss(INPUT))
        total = clip_grad_norm_(context_id, pair.parameter_rrefs, limit, norm)
        torch.testing.assert_close(total, expected.double())
        for local, remote, index in zip(pair.local, pair.remote, (1, 2), strict=True):
            found = world[index].recorder.contexts.get(context_id).gradients()
            for mine, theirs in zip(local.parameters(), remote.parameters(), strict=True):
                if mine.grad is not None:
                    torch.testing.assert_close(found[theirs], mine.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_the_norm_of_no_gradients_is_zero(pair, norm):
    expected = torch.nn.utils.clip_grad_norm_(pair.parameters, 1.0, norm)
    with dist_autograd.context() as context_id:
        assert clip_grad_norm_(context_id, pair.parameter_rrefs, 1.0, norm).equal(expected.double())


def test_a_norm_that_is_not_finite(pair):
    with torch.no_grad():
        pair.remote[0].layer.weight[0, 0] = float("nan")
    with dist_autograd.context() as context_id:
        dist_autograd.backward(pair.remote_loss(INPUT))
        with pytest.raises(nbdist.UsageError, match="nan: nothing was clipped"):
            clip_grad_norm_(context_id, pair.parameter_rrefs, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (lambda pair: pair.parameter_rrefs[0], "put it in a list"),
        (lambda pair: [pair.parameter_rrefs[0], torch.ones(2)], "entry 1 of params_rref is a Tensor .*not an RRef"),
        (lambda pair: torch.ones(2), "should be a list of RRefs"),
    ],
)
def test_clipping_needs_references(pair, params, told):
    with dist_autograd.context() as context_id, pytest.raises(nbdist.UsageError, match=told):
        clip_grad_norm_(context_id, params(pair), 1.0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_makes_gradients_what_torch_makes_them(world, pair, wrong):
    for net in (pair.local[0], pair.remote[0]):
        net.layer.weight.register_hook(lambda gradient: gradient * wrong)
    pair.local_loss(INPUT).backward()
    torch.nn.utils.clip_grad_norm_(pair.parameters, 1.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(pair.remote_loss(INPUT))
        clip_grad_norm_(context_id, pair.parameter_rrefs, 1.0)
        for index, local, remote in zip((1, 2), pair.local, pair.remote, strict=True):
            found = world[index].recorder.contexts.get(context_id).gradients()
            for mine, theirs in zip(local.parameters(), remote.parameters(), strict=True):
                if mine.grad is not None:
                    torch.testing.assert_close(found[theirs], mine.grad, equal_nan=True)


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError(f"no step of {len(self.param_groups[0]['params'])}")


def test_one_error_is_itself_and_several_are_all_told(pair):
    one = DistributedOptimizer(Failing, pair.rrefs[0], lr=0.1)
    both = DistributedOptimizer(Failing, pair.parameter_rrefs, lr=0.1)
    with dist_autograd.context() as context_id:
        with pytest.raises(ValueError, match="no step of 3") as raised:
            one.step(context_id)
        assert "raised on worker1" in "".join(raised.value.__notes__)
        with pytest.raises(StepFailed, match=r"2 workers failed:\n  worker1: ValueError: .*\n  worker2: ValueError: "):
            both.step(context_id)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "empty parameter list"),
        ([{"params": []}], "empty parameter list"),
        ([5], r"entry 0 of params_rref is 5 \(of type int\), not an RRef"),
        (5, r"a list of RRefs to parameters, or of groups, not 5 \(of type int\)"),
        ([torch.ones(2)], r"entry 0 of params_rref is a Tensor of shape \(2,\), not an RRef: .* rpc.RRef\(parameter\)"),
        (torch.ones(2), r"rpc.RRef\(parameter\)"),
        ({"params": []}, "put it in a list"),
        ([{"lr": 0.1}], "group 0 of params_rref has no 'params'; it has lr"),
        ([{"params": 5}], "'params' of group 0 should be a list of RRefs to parameters, not 5"),
        ([{"params": [5]}], "entry 0 of 'params' of group 0 is 5"),
        ([("a", 5)], "entry 0 of params_rref is 5"),
        ([5, {"params": []}], "entry 0 of params_rref is 5"),
    ],
)
def test_what_is_no_parameter_is_refused_in_words(world, given, told):
    with pytest.raises(nbdist.UsageError, match=told):
        DistributedOptimizer(torch.optim.SGD, given, lr=0.1)


def test_groups_and_references_are_not_mixed_and_names_are_used_once(pair):
    one, *_ = pair.parameter_rrefs
    with pytest.raises(nbdist.UsageError, match="a group beside bare references: make all of them groups"):
        DistributedOptimizer(torch.optim.SGD, [one, {"params": [one]}], lr=0.1)
    with pytest.raises(nbdist.UsageError, match="two parameters have the name 'a'"):
        DistributedOptimizer(torch.optim.SGD, [("a", rref) for rref in pair.parameter_rrefs], lr=0.1)
    with pytest.raises(nbdist.UsageError, match="optimizer_class should be a class"):
        DistributedOptimizer("SGD", [one], lr=0.1)


def test_an_iterator_of_references_is_as_good_as_a_list(pair):
    optimizer = DistributedOptimizer(torch.optim.SGD, iter(pair.parameter_rrefs), lr=0.1)
    before = pair.remote[0].layer.weight.clone()
    with dist_autograd.context():
        dist_autograd.backward(pair.remote_loss(INPUT))
        optimizer.step()
    assert not torch.equal(pair.remote[0].layer.weight, before)


def lbfgs(*args, **kwargs):
    return torch.optim.LBFGS(*args, **kwargs)


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, lbfgs])
def test_an_optimizer_that_needs_a_closure_is_refused_when_it_is_made(pair, cls):
    with pytest.raises(nbdist.UsageError, match="LBFGS computes the loss several times in a step, by a closure"):
        DistributedOptimizer(cls, pair.rrefs[0])


def test_concurrent_steps_on_the_same_parameters_follow_each_other(world):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    rref = rpc.RRef(weight)
    problems = []

    def train(number):
        try:
            with world[0].activate():
                optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=1.0)
                for _ in range(10):
                    with dist_autograd.context():
                        dist_autograd.backward((weight * number).sum())
                        optimizer.step()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, problems[0]
    assert weight.item() == -10 * (1 + 2 + 3 + 4 + 5)
