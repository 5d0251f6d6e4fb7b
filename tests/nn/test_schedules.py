"""The schedules, drawn; and what holds of every one of them."""

import re

import pytest

from nbdist.errors import UsageError
from nbdist.nn.schedules import (
    KINDS,
    SCHEDULES,
    Op,
    OpKind,
    draw,
    forward_only,
    goes_to,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    what_it_needs,
)

SIZES = [(workers, depth, micro) for workers in range(1, 6) for depth in range(1, 4) for micro in range(1, 11)]


@pytest.mark.parametrize(
    ("make", "arguments"), [(gpipe, (2, 2, 4)), (one_f_one_b, (3, 3, 4)), (interleaved, (2, 4, 2))]
)
def test_the_picture_in_the_docstring_is_the_schedule(make, arguments):
    drawn = [line.strip() for line in re.findall(r"^ +(worker\d .*)$", make.__doc__, re.MULTILINE)]
    assert drawn == draw(make(*arguments), arguments[1]).splitlines()


def test_a_drawing_of_many_workers_has_its_columns_in_line():
    lines = draw(gpipe(11, 11, 1), stages=11).splitlines()
    assert lines[0].startswith("worker0   F0 .")
    assert lines[10].startswith("worker10  .  .")
    assert len({line.find("B0") for line in lines}) == 11


def every():
    for name, make in SCHEDULES.items():
        for workers, depth, micro in SIZES:
            if name != "1f1b" or depth == 1:
                yield make, workers, workers * depth, micro


def test_everything_is_done_once_where_its_stage_is_and_in_the_order_of_micro_batches():
    for make, workers, stages, micro in every():
        table = make(workers, stages, micro)
        assert len(table) == workers
        for worker, row in enumerate(table):
            assert all(op.stage % workers == worker for op in row)
            for stage in range(worker, stages, workers):
                for kind in "FB":
                    seen = [op.micro_batch for op in row if op[:2] == (kind, stage)]
                    assert seen == list(range(micro)), (make, workers, stages, micro)


def test_nobody_waits_for_ever():
    for make, workers, stages, micro in every():
        simulate(make(workers, stages, micro), stages)
        simulate(forward_only(workers, stages, micro), stages)
    with pytest.raises(UsageError, match="for ever"):
        simulate([[Op("B", 0, 0), Op("F", 0, 0)]], 1)


def test_an_operation_is_needed_where_it_goes():
    for stages in range(1, 5):
        ops = [Op(kind, stage, 0) for kind in KINDS for stage in range(stages)]
        assert [op for op in ops if not what_it_needs(op, stages)] == [Op("F", 0, 0)]
        for op in ops:
            others = [after for after in ops if after.stage != op.stage and op in what_it_needs(after, stages)]
            assert others == [after for after in [goes_to(op, stages)] if after is not None]


def test_a_third_kind_of_operations_is_one_row(monkeypatch):
    # Zero bubble splits a backward: B computes the gradient of the input, W later those of the weights.
    monkeypatch.setitem(KINDS, "W", OpKind("weights", "", 0, (("B", 0),)))
    first, last = ["F0", "F1", "B0", "W0", "B1", "W1"], ["F0", "B0", "F1", "B1", "W0", "W1"]
    table = [[Op(name[0], worker, int(name[1])) for name in row] for worker, row in enumerate([first, last])]
    assert draw(table, 2).splitlines() == ["worker0  F0 F1 .  B0 W0 B1 W1", "worker1  .  F0 B0 F1 B1 W0 W1"]
    with pytest.raises(UsageError, match="for ever"):
        simulate([[Op("F", 0, 0), Op("W", 0, 0), Op("B", 0, 0)]], 1)


def cost(op):
    return 1.0 if op.kind == "F" else 2.0


def length(rows):
    return max(row[-1].end for row in rows)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_with_one_stage_each_the_bubble_is_that_of_the_papers(make):
    for workers, depth, micro in SIZES:
        if depth == 1:
            rows = simulate(make(workers, workers, micro), workers, cost)
            assert length(rows) == 3 * (micro + workers - 1)


def test_interleaved_is_shorter_where_the_groups_are_full():
    for workers, micro in ((2, 4), (4, 8), (3, 6)):
        plain = length(simulate(one_f_one_b(workers, workers, micro), workers, cost))
        half = length(simulate(interleaved(workers, 2 * workers, micro), 2 * workers, lambda op: cost(op) / 2))
        assert half < plain
        assert half == 3 * micro + 3 * (workers - 1) / 2


def kept(row):
    now = most = 0
    for op in row:
        now += 1 if op.kind == "F" else -1
        most = max(most, now)
    return most


def test_1f1b_keeps_no_more_than_there_are_workers_behind():
    for workers in range(1, 6):
        for micro in range(1, 11):
            table = one_f_one_b(workers, workers, micro)
            assert [kept(row) for row in table] == [min(micro, workers - worker) for worker in range(workers)]
            assert all(kept(row) == micro for row in gpipe(workers, workers, micro))


def test_one_stage_each_is_what_1f1b_is_for():
    with pytest.raises(UsageError, match="not 4 on 2"):
        one_f_one_b(2, 4, 1)
