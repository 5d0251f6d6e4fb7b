"""What objects hold, counted once, within bounds, and without any code of theirs."""

import functools
import gc
import mmap
import sys
import threading
import weakref

import pytest
import torch
from helpers.abuse import hostile_objects

from nbdist.cluster.inspection import variables
from nbdist.cluster.inspection.census import Census, CensusWalk
from nbdist.cluster.inspection.roots import NamedValue
from nbdist.cluster.processes.process_memory import Regions, measure, own_bytes, parse_smaps, resident_bytes
from nbdist.rpc.references.describing import describe_value

KB = 1000


def walked(value, census=None, most=10**6):
    walk = CensusWalk(census or Census(), "variables", value)
    walk.go(most)
    return walk


def buffers(value):
    census = Census()
    assert walked(value, census).done
    return sorted(buffer.nbytes for buffer in census.buffers.values())


def small(value):
    """The size of Python's own objects around the buffers is not what is asked here."""
    return [nbytes for nbytes in buffers(value) if nbytes >= 100]


class Thing:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("held",)


def test_tensors_wherever_they_are():
    def generate():
        held = torch.ones(60)
        yield held

    slotted, generator = Slotted(), generate()
    slotted.held = torch.ones(30)
    next(generator)
    cached = functools.lru_cache(torch.ones)
    cached(70)
    for value, nbytes in (
        (torch.ones(25), 100),
        ([{"a": (torch.ones(26),)}], 104),
        (Thing(inner=Thing(tensor=torch.ones(27))), 108),
        (slotted, 120),
        ((lambda held: lambda: held)(torch.ones(50)), 200),
        (functools.partial(print, torch.ones(51)), 204),
        (generator, 240),
        (cached, 280),
        (Thing(held=torch.ones(80)).__init__, 320),
    ):
        assert small(value) == [nbytes], value


def test_a_storage_counts_once_and_as_a_whole():
    whole = torch.ones(1000)
    assert buffers([whole, whole[:10], whole.view(10, 100), whole.detach()]) == [4000]
    assert buffers(whole[:10]) == [4000]
    census = Census()
    assert walked([whole], census).nbytes >= 4000
    assert walked(whole[:10], census).nbytes == 0


def test_modules_gradients_and_optimizers():
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    census = Census()
    assert walked(model, census).nbytes == 2 * 40_000  # the weight, and its gradient
    assert walked(optimizer, census).nbytes // KB in (80, 81, 82, 83, 84)  # and what Adam keeps


def test_the_graph_behind_a_loss_is_counted():
    """The leak that everybody writes once: ``losses.append(loss)``."""
    leaf = torch.ones(10_000, requires_grad=True)
    losses = []
    census = Census()
    assert walked(leaf, census).nbytes == 40_000
    losses += [leaf.exp().sum() for _ in range(3)]
    assert 3 * 40_000 <= walked(losses, census).nbytes < 3 * 40_000 + 2 * KB
    with torch.no_grad():
        assert walked([leaf.exp().sum()]).nbytes < KB


def test_what_a_function_of_the_users_and_hooks_have_saved():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.ones(300))
            ctx.extra = torch.ones(400)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    leaf = torch.ones(2, requires_grad=True)
    assert small(Twice.apply(leaf)) == [1200, 1600]
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: ("packed", saved.repeat(100)), lambda packed: 1 / 0):
        kept = leaf.exp()
    assert small(kept) == [800]


def test_arrays():
    numpy = pytest.importorskip("numpy")
    array = numpy.ones((100, 100))
    assert buffers(array[3:]) == [80_000]
    assert buffers([array, torch.from_numpy(array)]) == [80_000]
    tensor = torch.ones(500)
    assert buffers([tensor.numpy(), tensor]) == [2000]
    assert small(numpy.array([torch.ones(200), None], dtype=object)) == [800]


def test_a_memory_map_is_no_memory_of_the_process(tmp_path):
    numpy = pytest.importorskip("numpy")
    (tmp_path / "file").write_bytes(bytes(10_000))
    assert buffers(numpy.memmap(tmp_path / "file", dtype="uint8", mode="r")) == []


def test_subclasses_of_containers():
    class List(list):
        pass

    class Dict(dict):
        pass

    value = List([torch.ones(100)])
    value.more = torch.ones(200)
    assert buffers(value) == [400, 800]
    mapping = Dict({torch.ones(300): 1})
    mapping.more = torch.ones(100)
    assert buffers(mapping) == [400, 1200]


def test_what_leads_to_everything_is_passed_by():
    assert walked([sys, torch, threading.main_thread, gc.collect, test_arrays, int]).count < 60


def test_no_code_of_hostile_classes_is_called():
    tensor = torch.ones(50_000)
    objects = hostile_objects.every(tensor)
    named = [NamedValue([f"x{number}"], "variable", value) for number, value in enumerate(objects)]
    named.append(NamedValue(["all"], "variable", [*objects, *map(type, objects)]))
    hostile_objects.called.clear()
    census = Census()
    census.watched[id(tensor)] = 5
    rows, leading = variables.count(census, named)
    states = [describe_value(value) for value in objects]
    assert not hostile_objects.called
    assert (next(iter(census.buffers.values())).nbytes, len(census.buffers)) == (200_000, 3)
    assert rows[0].main_part == "attribute one of HostilePlain x0: Tensor"
    assert {pin.path for pin in leading[5]} >= {
        "attribute one of HostilePlain x1",
        "an element of Hostilelist x2 (1 element)",
    }
    assert {pin.name for pin in leading[5]} == {"x0", "x1", "x2", "x6"}
    assert {row.state.qualname for row in rows} >= {"HostilePlain", "Hostilelist", "Hostiledict", "HostileTensor"}
    told = {state.qualname: state for state in states}
    assert told["HostileTensor"].shape == [30]
    assert told["HostileModule"].nbytes == 280
    assert told["Hostilestr"].nbytes > 4


def test_a_tensor_whose_class_answers_torch_itself():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), dtype=inner.dtype, dispatch_sizes_strides_policy="sizes", dispatch_device=True
            )

        def __init__(self, inner):
            self.inner = inner

        __torch_dispatch__ = classmethod(hostile_objects.refuse("__torch_dispatch__"))
        __torch_function__ = classmethod(hostile_objects.refuse("__torch_function__"))

    wrapper = Wrapper(torch.ones(100))
    hostile_objects.called.clear()
    state = describe_value(wrapper)
    assert (state.qualname.rpartition(".")[2], state.shape) == ("Wrapper", None)
    assert buffers([wrapper]) == [400]
    assert not hostile_objects.called


# -- bounds ---------------------------------------------------------------------------------------


def test_a_walk_stops_and_says_so():
    walk = walked([[float(each)] for each in range(1000)], most=100)
    assert (walk.count, walk.done) == (100, False)
    assert walk.nbytes >= list.__sizeof__([None] * 1000)  # of what was met, all is counted


def test_one_huge_variable_hides_no_other(monkeypatch):
    monkeypatch.setattr(variables, "MOST_OBJECTS", 20_000)
    huge = [[number] for number in range(30_000)]
    named = [NamedValue(["huge"], "variable", huge), NamedValue(["tensor"], "variable", [torch.ones(50_000)])]
    rows, _ = variables.count(Census(), named)
    assert [(row.names, row.is_partial, row.contents) for row in rows] == [
        (["huge"], True, " of 30,000, the first 1,000: 1,000 list"),
        (["tensor"], False, " of 1 Tensor float32"),
    ]


def test_a_long_chain():
    chain = None
    for _ in range(20_000):
        chain = [chain]
    walk = walked(chain)
    assert (walk.done, walk.count) == (True, 20_001)
    while chain is not None:
        (chain,) = chain


def test_many_variables_fit_into_the_answer():
    named = [NamedValue([f"x{number}"], "variable", [number]) for number in range(1500)]
    rows, _ = variables.count(Census(), named)
    assert len(rows) == 1000
    assert rows[-1].names == ["x999 and 500 more"]


def test_a_dict_that_changes_meanwhile():
    changing = {number: [number] for number in range(100)}
    walk = CensusWalk(Census(), "variables", [changing, torch.ones(1000)])
    walk.go(10)
    changing["more"] = 1
    walk.go(1000)
    assert (walk.done, walk.is_partial) == (True, True)
    assert walk.nbytes > 4000  # what comes behind it is counted all the same


def test_nothing_is_kept():
    kept = Thing(tensor=torch.ones(3), graph=torch.ones(3, requires_grad=True).exp())
    known = weakref.ref(kept)
    census = Census()
    walked([kept], census)
    del kept, census
    assert known() is None


# -- the process ----------------------------------------------------------------------------------

SMAPS = b"""55e0-55e1 r-xp 00000000 fe:00 26723                      /usr/bin/python3
Size:                  4 kB
Rss:                 100 kB
Private_Clean:        10 kB
Private_Dirty:        20 kB
1000-3000 rw-s 00000000 00:01 7                          /memfd:nbdist-5-1 (deleted)
Rss:                 500 kB
Private_Dirty:       300 kB
VmFlags: rd wr sh
4000-5000 rw-p 00000000 00:00 0
Rss:                  50 kB
Private_Dirty:        50 kB
9000-a000 rw-s 00000000 fe:00 9                          /home/user/weights.bin
Private_Clean:         5 kB
"""


def test_reading_what_the_kernel_says():
    usage, regions = parse_smaps(SMAPS)
    assert (usage.private, usage.shared, usage.total) == (85 * 1024, 500 * 1024, 585 * 1024)
    assert [regions.contain(at) for at in (0x0FFF, 0x1000, 0x2FFF, 0x3000, 0x9500)] == [False, True, True, False, False]


@pytest.mark.skipif(own_bytes() is None, reason="the kernel does not say")
def test_measuring_this_process():
    usage, _ = measure()
    assert 0.8 < usage.private / own_bytes() < 1.2
    assert own_bytes(None) is None
    assert own_bytes(-1) is None


@pytest.mark.skipif(own_bytes() is None, reason="the kernel does not say")
def test_what_was_never_written_to_is_in_no_memory():
    # Memory of its own: torch.empty may reuse what earlier tests have freed, which has been written to.
    memory = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    census = Census()
    walked(tensor, census)
    (amount,) = census.amounts(Regions()).values()
    assert amount.private < 1 << 20
    assert amount.private + amount.absent >= 32 << 20
    tensor[: 16 << 20] = 1
    assert abs(resident_bytes(tensor.data_ptr(), tensor.nbytes) - (16 << 20)) < 1 << 20


def test_bytes_of_other_devices_are_counted_apart(monkeypatch):
    place = ("cuda:0", 0x7F00)
    monkeypatch.setattr("nbdist.cluster.inspection.census.storage_of", lambda tensor: (place, 5000))
    census = Census()
    walk = walked([torch.ones(3), torch.ones(4)], census)
    assert (walk.gpu, walk.nbytes < KB) == (5000, True)
    amount = census.amounts(Regions())["variables"]
    assert (amount.gpu, amount.absent, amount.shared) == (5000, 0, 0)
