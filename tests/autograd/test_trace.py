"""What a context has recorded, as data, as text and as a picture."""

import gc
import threading
import xml.etree.ElementTree as ET

import pytest
import torch

from nbdist import UsageError, rpc
from nbdist import autograd as dist_autograd
from nbdist.autograd.graph.origins import NodeOrigin, origin_of
from nbdist.autograd.graph.traces import Trace
from nbdist.testing import World
from nbdist.views.drawing.graph import as_svg


@pytest.fixture
def world():
    gc.collect()  # hooks of a context that an earlier test has dropped without closing it end with the context
    with World(3, dynamic=True) as world, world[0].activate():
        yield world


def twice(x):
    return x * 2


def by_way_of(name, x):
    return rpc.rpc_sync(name, twice, args=(x,)) + x


def test_a_trace_has_the_graphs_of_all_workers_and_the_edges_between_them(world):
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", by_way_of, args=("worker2", x))
        context_id.backward(y.sum())
        trace = dist_autograd.trace()
        assert trace.context_id == context_id
        assert sorted(trace.workers) == ["worker0", "worker1", "worker2"]
        ways = [(edge.sender, edge.receiver, edge.function.rpartition(".")[2]) for edge in trace.edges]
        assert sorted(ways) == [
            ("worker0", "worker1", "by_way_of"),
            ("worker1", "worker0", "by_way_of"),
            ("worker1", "worker2", "twice"),
            ("worker2", "worker1", "twice"),
        ]
        assert {edge.tensors for edge in trace.edges} == {(((2, 3), "float64", 48),)}
        assert {edge.nbytes for edge in trace.edges} == {48}
        (leaf,) = [node for node in trace.nodes["worker0"] if node.kind == "leaf"]
        assert (leaf.name, leaf.shape) == ("Tensor", (2, 3))
        names = {worker: sorted(node.name for node in nodes) for worker, nodes in trace.nodes.items()}
        assert names["worker2"] == ["MulBackward0", "torch::distributed::autograd::RecvRpcBackward"]
        assert "AddBackward0" in names["worker1"]
        assert "SumBackward0" in names["worker0"], "behind the roots of a pass"
        (sum_node,) = [node for node in trace.nodes["worker0"] if node.name == "SumBackward0"]
        (received,) = [node for node in trace.nodes["worker0"] if node.kind == "receive"]
        assert sum_node.inputs == (received.number,)
        assert received.message in {edge.autograd_message_id for edge in trace.edges}


def test_it_shows_itself(world):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", twice, args=(x,))
        trace = dist_autograd.trace(context_id)
    assert y.grad_fn is not None  # what nobody has any more is not shown
    text = repr(trace)
    assert text.startswith(f"context {context_id}: 2 workers, 2 edges\n")
    assert "  worker1: 1 operation, 0 leaves, 1 receive\n    -> worker0: float32[2]" in text
    picture = ET.fromstring(trace._repr_mimebundle_()["image/svg+xml"])
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"worker0", "worker1", "Mul", "receive", "Tensor"} <= set(words)
    titles = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(" to worker" in title and ", with a call of " in title for title in titles) == 2


def test_nothing_is_said_in_words_and_much_is_folded(world):
    assert "nothing has been recorded" in as_svg(Trace(0))
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", many, args=(x,))
        picture = ET.fromstring(as_svg(dist_autograd.trace(context_id)))
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    folded = [
        int(count) for name, _, count in (word.partition(" \N{MULTIPLICATION SIGN}") for word in words) if name == "Add"
    ]
    assert sum(folded) == 500


def many(x):
    for _ in range(500):
        x = x + 1
    return x


def test_a_worker_that_is_gone_is_named(world):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", by_way_of, args=("worker2", x))
        world.kill(2)
        trace = dist_autograd.trace(context_id)
        assert sorted(trace.workers) == ["worker0", "worker1"]


def test_a_plan_says_what_would_run_and_what_would_not(world):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        used = rpc.rpc_sync("worker1", twice, args=(x,))
        unused = rpc.rpc_sync("worker2", twice, args=(x,))
        loss = (used + used * 3).sum()
        plan = dist_autograd.plan(context_id, loss)
        assert sorted(plan.workers) == ["worker0", "worker1"]
        assert [(edge.sender, edge.receiver) for edge in plan.edges] == [("worker0", "worker1"), ("worker1", "worker0")]
        assert sorted((edge.sender, edge.receiver) for edge in plan.unused) == [
            ("worker0", "worker2"),
            ("worker2", "worker0"),
        ]
        (received,) = [
            node
            for node in plan.trace.nodes["worker0"]
            if node.kind == "receive" and ("worker0", node.number) in plan.waits_for
        ]
        assert plan.waits_for["worker0", received.number] == 2, "from the sum and from the product"
        (root,) = plan.roots
        assert plan.waits_for[root] == 0
        assert not context_id.gradients(), "nothing has run"
        context_id.backward(loss)
        assert torch.equal(context_id.gradients()[x], torch.full((2,), 8.0))
    assert unused.requires_grad


def test_what_one_cannot_plan(world):
    loss = torch.ones(2, requires_grad=True).sum()
    with dist_autograd.context() as context_id:
        with pytest.raises(UsageError, match="mode must be 'smart' or 'fast', not 'bad'"):
            dist_autograd.plan(context_id, loss, mode="bad")
        with pytest.raises(UsageError, match="No tensors"):
            dist_autograd.plan(context_id, [])
        with pytest.raises(TypeError, match="roots must be tensors"):
            dist_autograd.plan(context_id, "loss")
        with pytest.raises(RuntimeError, match="gradient edge"):
            dist_autograd.plan(context_id, torch.ones(1))


def test_a_plan_shows_itself(world):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        used = rpc.rpc_sync("worker1", twice, args=(x,))
        unused = rpc.rpc_sync("worker2", twice, args=(x,))
        smart = dist_autograd.plan(context_id, (used * 3).sum())
        fast = dist_autograd.plan(context_id, (used * 3).sum(), mode="fast")
    assert unused.requires_grad
    head, *lines = repr(smart).splitlines()
    assert head == (
        f"plan of a SMART pass in context {context_id}, from Sum@worker0: 6 of 9 nodes take part; "
        "for how many gradients each waits:"
    )
    assert lines == [
        "  worker0: Mul 1, Sum 0 (root), receive 1, Tensor 1; no part: receive",
        "    -> worker1: gradients of float32[2] (twice)",
        "    -> worker2: no gradient of float32[2] (twice)",
        "  worker1: Mul 1, receive 1",
        "    -> worker0: gradients of float32[2] (twice)",
        "  worker2: nothing; no part: Mul, receive",
        "    -> worker0: no gradient of float32[2] (twice)",
    ]
    assert (smart.mode, fast.mode) == ("smart", "fast")
    lines = repr(fast).splitlines()
    assert "    -> worker2: no gradient of float32[2] (twice), and FAST waits for one" in lines
    assert "  worker2: Mul 1, receive 1" in lines
    for plan in (smart, fast):
        bundle = plan._repr_mimebundle_()
        assert bundle["text/plain"] == repr(plan)
        assert "<img" in bundle["text/html"]
        ET.fromstring(bundle["image/svg+xml"])
    assert "does not come" in fast._repr_mimebundle_()["image/svg+xml"]
    assert "does not come" not in smart._repr_mimebundle_()["image/svg+xml"]


# --- where nodes come from ------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.heads = torch.nn.ModuleList([torch.nn.Linear(2, 1)])

    def forward(self, x):
        return self.heads[0](self.body(x) * 2)


net = Net()


def run_net(x):
    return net(x) + 1


def origins(trace, worker):
    return {
        node.name: (node.module, node.line and node.line.rpartition(": ")[2])
        for node in trace.nodes[worker]
        if node.kind == "operation"
    }


def test_lines_and_modules_are_noted_on_all_workers_where_asked_for(world):
    x = torch.ones(3, 2, requires_grad=True)
    with dist_autograd.context(lines=True) as context_id:
        received = rpc.rpc_sync("worker1", run_net, args=(x.sin(),))
        total = received.exp().sum()
        context_id.watch()
        context_id.backward(total)
        trace = dist_autograd.trace(context_id)
    here, there = origins(trace, "worker0"), origins(trace, "worker1")
    assert here["SinBackward0"] == (None, 'received = rpc.rpc_sync("worker1", run_net, args=(x.sin(),))')
    assert here["ExpBackward0"] == (None, "total = received.exp().sum()")
    assert there["ReluBackward0"] == ("Net.body.1", "return self.heads[0](self.body(x) * 2)")
    assert there["MulBackward0"][0] == "Net"
    assert there["AddBackward0"] == (None, "return net(x) + 1")
    assert "Net.heads.0" in {module for module, _ in there.values()}
    assert "Net.body.1\nreturn" not in trace._repr_mimebundle_()["image/svg+xml"]
    assert "Net.body.1\ntest_trace.py:" in trace._repr_mimebundle_()["image/svg+xml"]


def hooks_on_all_modules():
    found = torch.nn.modules.module
    return {*found._global_forward_hooks, *found._global_forward_pre_hooks}


def test_nothing_is_noted_where_nobody_asked(world):
    before = hooks_on_all_modules()  # perhaps some: a test elsewhere may have left a context open
    with dist_autograd.context(lines=True) as context_id:
        assert hooks_on_all_modules()
    assert hooks_on_all_modules() <= before
    assert torch._C._len_torch_function_stack() == 0
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", run_net, args=(torch.ones(3, 2, requires_grad=True),))
        assert set(origins(dist_autograd.trace(context_id), "worker1").values()) == {(None, None)}


def test_what_was_made_before_is_not_given_the_line_of_what_came_after(world):
    x = torch.ones(2, requires_grad=True)
    before = x.cos()
    with dist_autograd.context(lines=True) as context_id:
        rpc.rpc_sync("worker1", torch.add, args=(before.exp(), 1))
        found = origins(dist_autograd.trace(context_id), "worker0")
    assert found["CosBackward0"] == (None, None)
    assert found["ExpBackward0"][1]


class Other(torch.overrides.TorchFunctionMode):
    pass


def test_lines_are_noted_until_the_context_is_closed_whatever_was_entered_since(world):
    context_id = dist_autograd.open(lines=True)
    with Other() as other:
        context_id.close()
        assert torch.overrides._get_current_function_mode_stack() == [other]
    assert torch._C._len_torch_function_stack() == 0


def test_a_context_that_another_thread_closes_notes_no_more(world):
    before = hooks_on_all_modules()
    context_id = dist_autograd.open(lines=True)
    thread = threading.Thread(target=lambda: world[0].activate().__enter__() and context_id.close())
    thread.start()
    thread.join()
    x = torch.ones(2, requires_grad=True)
    assert origin_of(x.cos().grad_fn) == NodeOrigin()
    assert hooks_on_all_modules() <= before
    with dist_autograd.context(lines=True):  # takes the other's remains away
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch._C._len_torch_function_stack() == 0
