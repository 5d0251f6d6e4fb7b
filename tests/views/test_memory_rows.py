"""Rows of memory: the parts of a process, growth since the last look, few rows instead of many; on plain data."""

import re

from nbdist.cluster.inspection.census import Amount
from nbdist.cluster.inspection.holdings import Holding, Holdings, WorkerMemory
from nbdist.cluster.inspection.pins import Pin
from nbdist.cluster.inspection.variables import Variable
from nbdist.cluster.processes.process_memory import Usage
from nbdist.ids import GlobalId
from nbdist.views.workers.memory import MemoryTable
from nbdist.views.workers.memory_rows import Look, compare, fold, rows_of, split
from nbdist.wire.messages import State

MB = 1_000_000
USED = Usage(100 * MB, 0)


def tensor(*shape):
    return State("torch", "Tensor", shape=list(shape), dtype="float32", nbytes=4)


def variable(*names, nbytes=MB, state=None, **fields):
    digest = None if nbytes >= 100_000 else 0
    found = {"kind": "variable", "contents": "", "main_part": "", "digest": digest, "gpu": 0, "is_partial": False}
    found |= fields
    return Variable(names=list(names), state=state or State("m", "Net"), nbytes=nbytes, **found)


def memory(name="worker0", *variables, life=1, usage=USED, amounts=None, gpu_taken=None):
    number = int(name[6:]) if name.startswith("worker") else 99
    return WorkerMemory(name, life * 1000 + number, usage, 30 * MB, amounts or {}, list(variables), gpu_taken)


def holding(number, worker="worker0", nbytes=MB, holder="notebook", names=("x",), state=None, **fields):
    pins = [(holder, [Pin("variable", name) for name in names])]
    return Holding(worker, nbytes, pins, GlobalId(1, 1, number), state or tensor(number), **fields)


def holdings(*workers, items=(), silent=()):
    return Holdings(list(items), list(workers), list(silent))


# -- the parts ------------------------------------------------------------------------------------


def test_the_parts_together_are_the_whole():
    amounts = {
        "references": Amount(private=10 * MB),
        "contexts": Amount(private=5 * MB, absent=1 * MB),
        "variables": Amount(private=20 * MB, shared=3 * MB, gpu=7),
    }
    found = split(memory(usage=Usage(100 * MB, 8 * MB), amounts=amounts))
    assert found.parts == {"references": 10 * MB, "contexts": 5 * MB, "variables": 23 * MB}
    assert (found.shared, found.rest, found.absent, found.gpu) == (5 * MB, 65 * MB, 1 * MB, 7)
    assert found.total == 108 * MB


def test_no_part_is_negative_where_more_was_counted_than_the_process_has():
    """As for tensors of the process from which a worker was forked: they are in its pages, and not its own."""
    amounts = {"references": Amount(private=80 * MB), "variables": Amount(private=70 * MB)}
    found = split(memory(amounts=amounts))
    assert found.parts == {"references": 80 * MB, "contexts": 0, "variables": 20 * MB}
    assert (found.rest, found.absent, found.total) == (0, 50 * MB, 100 * MB)


def test_what_came_through_shared_memory_and_was_not_read_counts_here():
    found = split(memory(usage=Usage(10 * MB, 0), amounts={"variables": Amount(shared=12 * MB)}))
    assert (found.parts["variables"], found.shared, found.total) == (12 * MB, 0, 22 * MB)


def test_a_system_that_does_not_say():
    found = split(memory(usage=None, amounts={"variables": Amount(private=3 * MB)}))
    assert (found.parts["variables"], found.total, found.rest) == (3 * MB, None, None)
    assert "3.0 MB" in repr(MemoryTable(holdings(memory(usage=None, amounts={"variables": Amount(private=3 * MB)}))))


# -- growth ---------------------------------------------------------------------------------------


def test_the_first_look_has_no_growth():
    table = MemoryTable(holdings(memory("worker0", variable("x"))))
    assert "since" not in repr(table)
    assert "new" not in repr(table)


def test_a_leak_is_seen_as_growth():
    first = holdings(memory("worker0", variable("losses"), variable("model", nbytes=25 * MB)), items=[holding(1)])
    last = Look.at(first, None)
    workers = memory(
        "worker0", variable("losses", nbytes=13_500_000), variable("model", nbytes=25 * MB), usage=Usage(112_500_000, 0)
    )
    second = holdings(workers, items=[holding(1), holding(2, nbytes=MB)])
    grown = {row.held[0][1][0] + str(row.what[-3:]): (row.grown, row.new) for row in compare(rows_of(second), last)}
    assert grown == {"x1,)": (0, 0), "x2,)": (MB, 1), "lossesNet": (12_500_000, 0), "modelNet": (0, 0)}
    lines = [" ".join(line.split()) for line in repr(MemoryTable(second, last)).splitlines()]
    assert lines[0] == "worker memory since last look by reference variables not accounted for"
    assert lines[1] == "worker0 112 MB +12.5 MB 0 B 0 B 112 MB (30.0 MB at start)"
    assert "worker0 variable Net 13.5 MB +12.5 MB losses" in lines
    assert "worker0 variable Net 25.0 MB model" in lines
    assert "worker0 reference Tensor float32(2,) 1.0 MB new notebook: x" in lines


def test_shrinking():
    last = Look.at(holdings(memory("worker0", variable("x", nbytes=9 * MB), usage=Usage(60 * MB, 0))), None)
    lines = repr(MemoryTable(holdings(memory("worker0", variable("x"), usage=Usage(50 * MB, 0))), last)).splitlines()
    assert "-10.0 MB" in lines[1]
    assert "-8.0 MB" in lines[4]


def test_a_restarted_worker_starts_anew_and_says_so():
    last = Look.at(holdings(memory("worker0", variable("x")), memory("worker1", variable("x"))), None)
    now = holdings(memory("worker0", variable("x")), memory("worker1", variable("x"), life=2))
    table = MemoryTable(now, last)
    lines = repr(table).splitlines()
    assert "started anew" in lines[2]
    assert "started anew" not in lines[1]
    assert not [row for row in compare(rows_of(now), last) if row.new or row.grown]
    assert not re.search(r" new |\+", repr(table))
    again = repr(MemoryTable(now, table.look))
    assert "started anew" not in again


def test_a_worker_that_was_silent_is_compared_with_the_look_before():
    first = Look.at(holdings(memory("worker0"), memory("worker1", variable("x"))), None)
    silent = MemoryTable(holdings(memory("worker0"), silent=["worker1"]), first)
    assert "worker1 did not answer" in repr(silent)
    then = holdings(memory("worker0"), memory("worker1", variable("x", nbytes=3 * MB)))
    (row,) = compare(rows_of(then), silent.look)
    assert (row.grown, row.new) == (2 * MB, 0)


def test_a_look_keeps_amounts_only():
    look = Look.at(holdings(memory("worker0", variable("x")), items=[holding(1)]), None)
    assert {type(value) for value in look.amounts.values()} == {int}
    assert {type(key) for key in look.amounts} == {int}


# -- folding --------------------------------------------------------------------------------------


def told(found, workers=None):
    return [(row.workers, row.kind, row.what, row.nbytes) for row in fold(rows_of(found, workers))]


def test_equal_rows_of_several_workers():
    workers = [memory(f"worker{rank}", variable("model", nbytes=25 * MB + rank)) for rank in range(4)]
    table = MemoryTable(holdings(*workers, memory("notebook", variable("model", nbytes=25 * MB))))
    lines = [" ".join(line.split()) for line in repr(table).splitlines()]
    assert "notebook, worker0-3 variable Net 25.0 MB each model" in lines
    other = MemoryTable(holdings(*workers, memory("worker4", variable("modal", nbytes=25 * MB))))
    lines = [" ".join(line.split()) for line in repr(other).splitlines()]
    assert "worker0-3 variable Net 25.0 MB each model" in lines
    assert "worker4 variable Net 25.0 MB modal" in lines


def test_values_held_by_their_own_workers():
    items = [holding(7, f"worker{rank}", holder=f"worker{rank}") for rank in range(2)]
    table = MemoryTable(holdings(memory("worker0"), memory("worker1"), items=items))
    lines = [" ".join(line.split()) for line in repr(table).splitlines()]
    assert "worker0,1 reference Tensor float32(7,) 1.0 MB each each: x" in lines


def test_the_largest_values_have_rows_and_the_others_are_put_together():
    items = [holding(number, nbytes=number * MB, names=["x"]) for number in range(1, 46)]
    items += [holding(100, nbytes=5, state=State("m", "Net")), holding(101, nbytes=6, state=State("m", "Other"))]
    rows = told(holdings(memory(), items=items))
    assert [row[3] for row in rows[:8]] == [number * MB for number in range(45, 37, -1)]
    assert rows[8:] == [
        (("worker0",), "reference", "37 more Tensors", sum(range(1, 38)) * MB),
        (("worker0",), "reference", "2 other more values", 11),
    ]


def test_equal_values_are_one_row():
    items = [holding(number, state=tensor(3)) for number in range(50)]
    rows = told(holdings(memory(), items=items))
    assert rows == [(("worker0",), "reference", "50 x Tensor float32(3,)", 50 * MB)]


def test_small_variables_are_put_together():
    small = [variable(f"t{number}", nbytes=number, state=tensor(number)) for number in range(1, 13)]
    found = memory("worker0", variable("big", nbytes=5 * MB), *small, variable("n", nbytes=28, state=State("", "int")))
    assert told(holdings(found)) == [
        (("worker0",), "variable", "Net", 5 * MB),
        (("worker0",), "variable", "12 small Tensors", 78),
        (("worker0",), "variable", "int", 28),
    ]
    (row,) = [row for row in fold(rows_of(holdings(found))) if "12" in row.what]
    assert row.held == (("", tuple(f"t{number}" for number in range(12, 0, -1))),)
    assert "t12, t11, t10, t9, t8, t7, …" in repr(MemoryTable(holdings(found)))


def test_small_variables_that_differ_between_workers_are_apart():
    def of(rank, extra):
        small = [variable("lr", nbytes=24, state=State("", "float"), contents=" 0.1", digest=5)]
        small += [variable("steps", nbytes=80, state=State("", "list"), contents=" of 3 ints", digest=6)]
        small += [variable("rank", nbytes=28, state=State("", "int"), contents=f" {rank}", digest=rank)]
        small += [variable("config", nbytes=99, state=State("", "dict"), contents=" of 1 int", digest=10 + rank)]
        return memory(f"worker{rank}", *small, variable(extra, nbytes=28, state=State("", "int")))

    rows = fold(rows_of(holdings(of(0, "a"), of(1, "b"))))
    assert [(row.workers, row.what, row.held) for row in rows] == [
        (("worker0",), "2 small ints", (("", ("rank", "a")),)),
        (("worker0",), "dict of 1 int", (("", ("config",)),)),
        (("worker0", "worker1"), "2 other small values", (("", ("steps", "lr")),)),
        (("worker1",), "2 small ints", (("", ("rank", "b")),)),
        (("worker1",), "dict of 1 int", (("", ("config",)),)),
    ]


def test_rows_of_several_workers_with_other_names_behind_the_dots_are_apart():
    """The dots hide that the seventh name differs."""

    def of(rank):
        names = [*"abcdefghijklmno", f"of_{rank}"]
        return memory(f"worker{rank}", *(variable(name, nbytes=MB, state=tensor(ord(name[0]))) for name in names))

    rows = [row for row in fold(rows_of(holdings(of(0), of(1)))) if "more" in row.what]
    assert [(row.workers, row.what) for row in rows] == [
        (("worker0",), "8 more Tensors"),
        (("worker1",), "8 more Tensors"),
    ]


def test_references_made_by_one_line_are_one_row():
    made = {"state": tensor(3), "contents": ", made at In[3]:2"}
    items = [holding(number, names=[f"x{number}"], **made) for number in range(50)]
    items += [holding(60, names=["y"], state=tensor(3), contents=", made at In[4]:1")]
    lines = [" ".join(line.split()) for line in repr(MemoryTable(holdings(memory(), items=items))).splitlines()]
    assert (
        "worker0 reference 50 x Tensor float32(3,), made at In[3]:2 50.0 MB notebook: x0, x1, x2, x3, x4, x5, …"
        in lines
    )
    assert "worker0 reference Tensor float32(3,), made at In[4]:1 1.0 MB notebook: y" in lines


def test_elements_of_one_list_are_one_row():
    def element(number):
        pin = Pin("variable", "held", within=True, path=f"element {number} of list held (50 elements)")
        return Holding("worker0", MB, [("notebook", [pin])], GlobalId(1, 1, number), tensor(3))

    table = MemoryTable(holdings(memory(), items=[element(number) for number in range(50)]))
    lines = [" ".join(line.split()) for line in repr(table).splitlines()]
    assert "worker0 reference 50 x Tensor float32(3,) 50.0 MB notebook: elements of list held (50 elements)" in lines
    assert "notebook: element 7 of list held (50 elements)" in repr(MemoryTable(table.found, unfolded=True))


def test_where_in_a_variable_most_bytes_are():
    cached = variable("t", main_part="attribute cache of Trainer t: dict of 8 Tensors float32")
    table = MemoryTable(
        holdings(memory("worker0", cached), memory("worker1", cached), memory("worker2", variable("t")))
    )
    lines = [" ".join(line.split()) for line in repr(table).splitlines()]
    assert (
        "worker0,1 variable Net 1.0 MB each t; mostly attribute cache of Trainer t: dict of 8 Tensors float32" in lines
    )
    assert "worker2 variable Net 1.0 MB t" in lines
    assert "mostly attribute cache of Trainer t" in table._repr_html_()
    many = [variable(f"t{number}", nbytes=number * MB, main_part="the cache") for number in range(1, 12)]
    (row,) = [row for row in fold(rows_of(holdings(memory("worker0", *many)))) if "more" in row.what]
    assert row.main_part == "", "the part of one says nothing of several"


def test_what_is_new_among_what_is_put_together():
    small = [variable(f"t{number}", nbytes=10, state=tensor(number)) for number in range(1, 4)]
    last = Look.at(holdings(memory("worker0", *small[:1])), None)
    table = MemoryTable(holdings(memory("worker0", *small)), last)
    assert "+20 B, 2 new" in repr(table)


def test_folding_can_be_undone():
    items = [holding(number, state=tensor(3)) for number in range(50)]
    found = holdings(memory("worker0"), memory("worker1", variable("x")), items=items)
    assert "rows are put together" in repr(MemoryTable(found))
    lines = repr(MemoryTable(found, unfolded=True)).splitlines()
    assert len([line for line in lines if "float32(3,)" in line]) == 50
    assert "rows are put together" not in "\n".join(lines)
    only = repr(MemoryTable(found, workers={"worker1"}, unfolded=True))
    assert "worker0" not in only.replace("%dist_memory worker1", "")
    assert "worker1" in only


# -- as text and HTML -----------------------------------------------------------------------------


def test_columns_of_gpus_only_where_there_are_any():
    without = repr(MemoryTable(holdings(memory("worker0", variable("x")))))
    assert "GPU" not in without
    amounts = {"variables": Amount(gpu=2 * MB)}
    found = holdings(memory("worker0", variable("x", gpu=2 * MB, nbytes=0), amounts=amounts, gpu_taken=20 * MB))
    lines = [" ".join(line.split()) for line in repr(MemoryTable(found)).splitlines()]
    assert lines[0].endswith("not accounted for GPU")
    assert lines[1].endswith("2.0 MB of 20.0 MB")
    assert lines[3] == "worker counted as what bytes on GPU held by"
    assert lines[4] == "worker0 variable Net 0 B 2.0 MB x"


def test_at_least():
    table = MemoryTable(holdings(memory("worker0", variable("objects", is_partial=True, contents=" of 10,000,000"))))
    assert "Net of 10,000,000" in repr(table)
    assert "at least 1.0 MB" in repr(table)
    assert "at least: there were more objects than a look visits" in repr(table)


def test_html_says_the_same_and_is_escaped():
    found = holdings(memory("worker0", variable("<x>")), items=[holding(1, state=State("m", "<b>"))])
    html = MemoryTable(found)._repr_html_()
    assert "&lt;x&gt;" in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_very_many_rows():
    found = holdings(memory("worker0"), items=[holding(number) for number in range(1200)])
    table = MemoryTable(found, unfolded=True)
    assert "… and 200 more" in repr(table)
    assert len(repr(table).splitlines()) < 1020
