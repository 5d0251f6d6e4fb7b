"""The names of leaves: found when somebody looks, without a call of the user's code, and remembered."""

import gc
import weakref

import pytest
import torch

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.graph.parameters import ParameterName, names_of
from nbdist.testing import World


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(2, 3)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(3, 1)])
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.heads[0](self.fc1(x)) * self.scale


net = Named()
here = Named()


def run_net(x):
    return net(x)


def labels(trace, worker):
    return {node.label: node.parameter_of for node in trace.nodes[worker] if node.kind == "leaf"}


def name_of(leaf):
    return names_of([leaf]).get(id(leaf))


@pytest.fixture
def scans(monkeypatch):
    """How often the process was searched for modules."""
    found = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: found.append(1) or get_objects())
    return found


def test_of_a_file_whose_objects_are_frozen():
    """As those of a file that workers import with --preload are."""
    assert not any(found is here for found in gc.get_objects())
    assert name_of(here.heads[0].weight) == ParameterName("heads.0.weight", "Named.heads.0")


def test_on_a_worker_and_here():
    x = torch.ones(1, 2)
    with World(2) as world, world[0].activate(), dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", run_net, args=(here.fc1.weight[:1],)).sum() + here(x).sum()
        plan = dist_autograd.plan(context_id, loss)
        trace = dist_autograd.trace(context_id)
    names = {
        "fc1.weight": "Named.fc1",
        "fc1.bias": "Named.fc1",
        "heads.0.weight": "Named.heads.0",
        "heads.0.bias": "Named.heads.0",
        "scale": "Named",
    }
    assert labels(trace, "worker1") == names
    assert labels(plan.trace, "worker0") == names
    assert "Named.heads.0.bias: Parameter float32[1]" in plan._repr_mimebundle_()["image/svg+xml"]
    assert "heads.0.weight 1" in repr(plan)


def test_of_a_remote_module():
    from nbdist.nn import RemoteModule

    with World(2) as world, world[0].activate(), dist_autograd.context(lines=True) as context_id:
        module = RemoteModule("worker1", torch.nn.Linear, args=(2, 2))
        dist_autograd.backward(context_id, [module(torch.ones(1, 2, requires_grad=True)).sum()])
        found = labels(dist_autograd.trace(context_id), "worker1")
    assert found == {"weight": "Linear", "bias": "Linear"}


def test_it_is_searched_for_once_and_again_only_for_what_is_new(scans):
    one, other = Named(), Named()
    assert name_of(one.scale) == ParameterName("scale", "Named")
    assert name_of(one.scale) == ParameterName("scale", "Named")
    assert len(scans) == 1
    assert name_of(torch.ones(2, requires_grad=True)) is None, "a tensor is not in a module"
    assert len(scans) == 1
    assert name_of(other.fc1.bias) == ParameterName("fc1.bias", "Named.fc1")
    assert len(scans) == 2
    loose = torch.nn.Parameter(torch.ones(2))
    assert name_of(loose) is None
    assert name_of(loose) is None
    assert len(scans) == 3, "that it has no name is remembered, too"


def test_a_parameter_that_is_put_elsewhere_gets_its_new_name():
    module = Named()
    weight = module.fc1.weight
    assert name_of(weight).label == "fc1.weight"
    module.fc1.weight = torch.nn.Parameter(torch.ones(3, 2))
    second = torch.nn.Module()
    second.w = weight
    assert name_of(weight) == ParameterName("w", "Module")


def test_the_largest_of_several_modules_names_it():
    module = Named()
    part = torch.nn.Sequential(module.fc1)
    assert name_of(part[0].bias) == ParameterName("fc1.bias", "Named.fc1")


def test_a_variable_of_a_cell(monkeypatch):
    import __main__

    w = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(__main__, "_5", w, raising=False)
    assert name_of(w) is None
    monkeypatch.setattr(__main__, "w", w, raising=False)
    assert name_of(w) == ParameterName("w")


class Meta(type):
    """A class that does not want to be looked at."""

    @property
    def __mro__(cls):
        raise AssertionError("called")

    def __subclasscheck__(cls, other):
        raise AssertionError("called")

    __instancecheck__ = __subclasscheck__

    def __hash__(cls):
        assert not cls.__dict__["armed"]
        return 5


class Strange(torch.nn.Module, metaclass=Meta):
    """A module whose every hook is a trap, once it is armed."""

    armed = False

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def __getattribute__(self, name):
        assert not Strange.armed, name
        return super().__getattribute__(name)

    def __getattr__(self, name):
        assert not Strange.armed, name
        return super().__getattr__(name)

    def __eq__(self, other):
        raise AssertionError("called")

    __repr__ = __len__ = __bool__ = __hash__ = named_parameters = children = lambda self: self.called


class Liar:
    @property
    def __class__(self):
        raise AssertionError("called")


def test_no_code_of_the_users_is_called(monkeypatch):
    module, liar = Strange(), Liar()
    weight = module.inner.weight
    monkeypatch.setattr(Strange, "armed", True)
    assert name_of(weight) == ParameterName("inner.weight", "Strange.inner")
    assert liar is not None


def test_nothing_is_kept_alive():
    module = Named()
    assert name_of(module.scale) is not None
    gone = [weakref.ref(module), weakref.ref(module.scale)]
    del module
    gc.collect()
    assert [each() for each in gone] == [None, None]
    another = Named()
    assert name_of(another.scale) is not None
    # Python makes one weak reference to an object: what was known of the parameter had this one, and is dropped.
    assert gc.get_referrers(gone[1]) == [gone]
