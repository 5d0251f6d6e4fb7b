"""A module on another worker, used like one that is here."""

import pytest
import torch

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.nn import RemoteModule
from nbdist.optim import DistributedOptimizer


class Shift(torch.nn.Module):
    def __init__(self, by, *, scale=1.0):
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(float(by)))
        self.scale = scale

    def forward(self, x, *, twice=False):
        return (x * self.scale + self.by) * (2 if twice else 1)


@pytest.mark.parametrize("place", ["worker1", "worker1/cpu", "rank:1/cpu", "rank:1"])
def test_it_is_called_as_if_it_were_here(world, place):
    module = RemoteModule(place, Shift, args=(1,), kwargs={"scale": 3.0})
    x = torch.ones(2)
    assert torch.equal(module(x), torch.full((2,), 4.0))
    assert torch.equal(module.forward_async(x, twice=True).wait(), torch.full((2,), 8.0))
    assert module.get_module_rref().owner().name == "worker1"
    assert repr(module) == "RemoteModule(Shift on worker1/cpu)"
    again = RemoteModule.init_from_module_rref("worker1", module.get_module_rref())
    assert torch.equal(again(x), torch.full((2,), 4.0))


def test_it_is_trained_where_it_is(world):
    module = RemoteModule("worker1", Shift, args=(1,))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=1.0)
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        context_id.backward(module(x).sum())
        optimizer.step()
        assert torch.equal(context_id.gradients()[x], torch.ones(2))
    assert module.state_dict() == {"by": torch.tensor(-1.0)}
    module.load_state_dict({"by": torch.tensor(5.0)})
    assert torch.equal(module(torch.zeros(1)), torch.full((1,), 5.0))


def test_a_state_keeps_the_versions_of_its_modules(world):
    """By them torch tells that a state is no old one, and lacks something."""
    module = RemoteModule("worker1", torch.nn.BatchNorm1d, args=(2,))
    state = module.state_dict()
    assert state._metadata == torch.nn.BatchNorm1d(2).state_dict()._metadata
    del state["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        module.load_state_dict(state)


class Net(torch.nn.Module):
    """A model of which one part is elsewhere, or here."""

    def __init__(self, make):
        super().__init__()
        self.encoder = make(encoder)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


def encoder():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def test_the_state_of_a_model_includes_that_of_its_remote_part(world):
    torch.manual_seed(0)
    net, other, whole = (Net(make) for make in (remote, remote, lambda make: make()))
    x = torch.randn(4, 2)
    state = net.state_dict()
    assert list(state) == list(whole.state_dict())
    versions = {name: each["version"] for name, each in state._metadata.items()}
    assert versions == {name: each["version"] for name, each in whole.state_dict()._metadata.items()}
    for model in (other, whole):
        assert "matched" in str(model.load_state_dict(state))
        assert torch.equal(model(x), net(x))
    assert "matched" in str(other.load_state_dict(whole.state_dict(), assign=True))
    assert torch.equal(other.eval()(x), whole.eval()(x))
    names = [f"a.{name}" for name in net.encoder.state_dict()]
    assert list(net.encoder.state_dict(prefix="a.")) == list(net.encoder.state_dict({}, "a.", False)) == names


def remote(make):
    return RemoteModule("worker1", make)


def test_a_state_that_does_not_fit_a_remote_part_is_refused(world):
    net = Net(remote)
    state = net.state_dict()
    del state["encoder.1.num_batches_tracked"]  # as in states of old versions only
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "encoder.1.num_batches_tracked"'):
        net.load_state_dict(state)
    state["encoder.more"] = torch.zeros(1)
    found = net.load_state_dict(state, strict=False)
    assert found.missing_keys == ["encoder.1.num_batches_tracked"]
    assert found.unexpected_keys == ["encoder.more"]
    state["encoder.0.weight"] = torch.zeros(5)
    with pytest.raises(RuntimeError, match=r"(?s)loading state_dict for Net.*encoder: .*size mismatch for 0.weight"):
        net.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="loading state_dict for Net") as raised:
        net.load_state_dict(state)
    for told in ("size mismatch for 0.weight", '"encoder.1.num_batches_tracked"', '"encoder.more"'):
        assert told in str(raised.value)


def test_modes(world):
    module = RemoteModule("worker1", torch.nn.Dropout, args=(1.0,))
    x = torch.ones(3)
    assert not module(x).any()
    assert torch.equal(module.eval()(x), x)
    assert not module.training
    assert not module.train()(x).any()
    with pytest.raises(ValueError, match="expected to be boolean"):
        module.train("yes")
    assert module.training is True  # after an error, the handle's mode is still the module's


def test_it_travels(world):
    module = RemoteModule("worker1", Shift, args=(1,))
    assert rpc.rpc_sync("worker1", use, args=(module, torch.ones(1))).item() == 2.0


def use(module, x):
    return module(x)


def test_what_needs_the_module_here_is_refused_by_name(world):
    module = RemoteModule("worker1", Shift, args=(1,))
    with pytest.raises(nbdist.UsageError, match=r"``parameters`` not supported .* Use remote_parameters\(\)"):
        module.parameters()
    for name in ("to", "ipu", "xpu"):
        with pytest.raises(nbdist.UsageError, match=f"``{name}`` not supported"):
            getattr(module, name)("cpu")
    with pytest.raises(nbdist.UsageError, match=r"returns an instance of <class nn\.Module>"):
        RemoteModule("worker1", dict)
    for place in ("", "worker1/cpu/cpu", "rank:one", "cuda:0"):
        with pytest.raises(nbdist.UsageError):
            RemoteModule(place, Shift, args=(1,))
