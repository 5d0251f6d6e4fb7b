"""Recorded graphs that are made by hand, for tests of how they are drawn."""

from nbdist.autograd.graph.origins import NodeOrigin
from nbdist.autograd.graph.traces import Edge, NodeInfo, Trace
from nbdist.nn import schedules
from nbdist.nn.watched import plan_of_step


class HandmadeTrace:
    """A trace that is made by hand."""

    def __init__(self, *workers):
        self.trace = Trace(0, {worker: [] for worker in workers})

    def add(self, worker, name, *inputs, kind="operation", module=None, **more):
        nodes = self.trace.nodes[worker]
        nodes.append(NodeInfo(len(nodes), name, kind, (2,), "float32", inputs, origin=NodeOrigin(module), **more))
        return nodes[-1].number

    def leaf(self, worker, label):
        return self.add(worker, "Parameter", kind="leaf", label=label)

    def send(self, sender, source, receiver):
        number = len(self.trace.edges)
        self.trace.edges.append(Edge(number, sender, receiver, "call", (((2,), "float32", 8),), (source,)))
        return self.add(receiver, "RecvRpcBackward", kind="receive", message=number, tensors=(0,))

    def linear(self, worker, x, name, module=None):
        weight = self.add(worker, "TBackward0", self.leaf(worker, f"{name}.weight"), module=module)
        return self.add(worker, "AddmmBackward0", self.leaf(worker, f"{name}.bias"), x, weight, module=module)


def residual(blocks, modules=True):
    """A chain of residual blocks on worker1, of 22 nodes each, and the root of a pass."""
    found = HandmadeTrace("worker0", "worker1")
    x = found.send("worker0", found.leaf("worker0", "x"), "worker1")
    for number in range(blocks):
        name = f"Net.blocks.{number}" if modules else None
        y = x
        for layer in range(5):
            inner = f"{name}.fc{layer}" if modules else None
            y = found.linear("worker1", y, f"blocks.{number}.fc{layer}", inner)
        x = found.add("worker1", "ReluBackward0", found.add("worker1", "AddBackward0", x, y, module=name), module=name)
    x = found.send("worker1", x, "worker0")
    return found.trace, ("worker0", found.add("worker0", "SumBackward0", x))


def branches():
    """Two workers that get the same tensor, one of them after the other; a leaf that is used three times."""
    found = HandmadeTrace("notebook", "worker0", "worker1")
    x = found.leaf("notebook", "x")
    first = found.add("worker0", "ExpBackward0", found.send("notebook", x, "worker0"))
    here = found.send("worker0", first, "notebook")
    second = found.linear("worker1", found.send("notebook", x, "worker1"), "fc")
    far = found.send("notebook", here, "worker1")
    shared = found.leaf("worker1", "shared")
    both = found.add("worker1", "MulBackward0", second, far, shared)
    both = found.add("worker1", "MulBackward0", both, shared)
    back = found.send("worker1", both, "notebook")
    unused = found.add("notebook", "CosBackward0", here)
    assert unused
    return found.trace, ("notebook", found.add("notebook", "AddBackward0", back, here, x))


def chain(count):
    found = HandmadeTrace("worker0")
    x = found.leaf("worker0", "x")
    for _ in range(count):
        x = found.add("worker0", "AddBackward0", x)
    return found.trace, ("worker0", x)


def tangle(count):
    """A graph that cannot be folded into runs: each operation sends to the other worker, and gets something back."""
    found = HandmadeTrace("worker0", "worker1")
    x = found.leaf("worker0", "x")
    for _ in range(count):
        there = found.add("worker1", "ExpBackward0", found.send("worker0", x, "worker1"))
        x = found.add("worker0", "MulBackward0", found.send("worker1", there, "worker0"), x)
    return found.trace, ("worker0", x)


def step(workers, micro_batches):
    """The plan of a pipeline's step."""
    names = [f"worker{number}" for number in range(workers)]
    return plan_of_step(0, schedules.one_f_one_b(workers, workers, micro_batches), names, workers)
