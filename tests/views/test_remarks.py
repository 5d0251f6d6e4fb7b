"""What is told of a backward pass, from events alone: remarks with links, pauses that are no waits."""

import json

import msgspec
import pytest

from nbdist.autograd.graph.events import Event
from nbdist.autograd.graph.traces import Edge, NodeInfo, Trace, planned
from nbdist.views.drawing.graph import as_svg
from nbdist.views.passes import page, remarks, report
from nbdist.views.passes.backward import Backward


def operation(number, name, *inputs, kind="operation"):
    return NodeInfo(number, name, kind, (2,), "float32", inputs)


def receive(number, message):
    return NodeInfo(number, "ReceiveBackward", "receive", (2,), "float32", (), message, (0,))


def made():
    """A pass from notebook's Sum to worker1's Exp, and beside it notebook's Sin."""
    trace = Trace(
        1,
        {
            "notebook": [
                operation(0, "SumBackward0", 1, 2),
                receive(1, 7),
                operation(2, "SinBackward0", 3),
                operation(3, "Tensor", kind="leaf"),
            ],
            "worker1": [operation(0, "ExpBackward0", 1), operation(1, "Parameter", kind="leaf")],
        },
        [Edge(7, "worker1", "notebook", "f", (((2,), "float32", 8),), (0,))],
    )
    return Backward(planned(trace, [("notebook", 0)]))


def ran(worker, node, end, seconds, **more):
    return [Event(end - seconds, worker, "running", node, **more), Event(end, worker, "done", node, seconds=seconds)]


def halted(worker, node, at):
    return Event(at, worker, "halted", node)


SUM, RECEIVE, SIN, LEAF = (("notebook", number) for number in range(4))
EXP, PARAMETER = ("worker1", 0), ("worker1", 1)
UNPAUSED = [
    *ran(*SUM, 1.0, 1.0, norm=1.5),
    *ran(*RECEIVE, 1.5, 0.5, norm=float("nan")),
    Event(1.6, "worker1", "arrived", message=7),
    *ran(*SIN, 2.5, 1.0, norm=4.0),
    *ran(*EXP, 4.0, 2.0, norm=0.5),
    *ran(*PARAMETER, 4.5, 0.25),
    *ran(*LEAF, 5.0, 0.5),
    Event(4.1, "worker1", "nan", 0),
]


def paused(events):
    """The same, but nothing runs before somebody has looked at it for ten seconds."""
    found = []
    for number, event in enumerate(sorted(events, key=lambda event: event.time)):
        began = event.what == "running"
        number = sum(each.what == "running" for each in events if each.time < event.time) + began
        more = 10.0 * number
        if began:
            found.append(halted(event.worker, event.node, event.time + more - 10.0))
        found.append(msgspec.structs.replace(event, time=event.time + more))
    return found


def told(found):
    return [remarks.text_of(remark) for remark in remarks.remarks(found)]


def test_each_remark_names_its_nodes():
    found = made().after(UNPAUSED)
    assert told(found) == [
        "critical path, 4 nodes: Sum@notebook → receive@notebook → Sin@notebook → Tensor@notebook",
        "most time, 2.00 s, went into Exp on worker1 (node 0)",
        "the first NaN or Inf came up at Exp@worker1 (node 0)",
        "the largest norm, 4, was given to Sin@notebook (node 2)",
    ]
    linked = [[part.node for part in remark if part.node is not None] for remark in remarks.remarks(found)]
    assert linked == [[SUM, RECEIVE, SIN, LEAF], [EXP], [EXP], [SIN]]


def test_the_text_the_picture_and_the_page_say_the_same():
    found = made().after(UNPAUSED)
    outline, snapshot = page.outline(found), page.snapshot(found)
    index = {(outline["workers"][node["w"]], node["n"]): at for at, node in enumerate(outline["nodes"])}
    shown = ["".join(part if isinstance(part, str) else part[0] for part in remark) for remark in snapshot["remarks"]]
    assert shown == told(found)
    assert snapshot["remarks"][2][1] == ["Exp@worker1", index[EXP]]
    assert all(f"  {line}" in report.as_text(found) for line in shown)
    html = report.as_html(found, "told")
    assert "the first NaN or Inf came up at Exp@worker1" in html


def test_of_nothing_there_is_nothing_to_say():
    assert told(made().after([])) == []


def test_a_parameter_is_called_by_its_name():
    found = made().after(UNPAUSED)
    msgspec.structs.force_setattr(found.nodes[LEAF], "label", "fc1.weight")
    assert told(found)[0].endswith("→ fc1.weight@notebook")
    assert [node["label"] for node in page.outline(found)["nodes"]] == ["", "", "", "fc1.weight", "", ""]


def test_waits_are_told_where_nobody_paused():
    shares = {share.worker: share for share in made().after(UNPAUSED).shares()}
    assert shares["notebook"].busy == pytest.approx(3.0)
    assert shares["notebook"].idle == pytest.approx(5.0 - 3.0)
    assert shares["worker1"].idle == pytest.approx(0.25)  # between its two nodes


def test_a_pause_is_no_wait():
    plain, found = made().after(UNPAUSED), made().after(paused(UNPAUSED))
    for before, share in zip(plain.shares(), found.shares(), strict=True):
        assert share.busy == pytest.approx(before.busy)
        assert share.idle < 5.0  # no pause is in it: each takes ten seconds
    assert found.slowest() == plain.slowest()


def test_a_halt_that_goes_on_is_no_wait_either():
    events = [*UNPAUSED[:4], halted(*SIN, 1.5), halted("worker1", 0, 1.7), *ran(*EXP, 1005.0, 2.0)]
    found = made().after(events, [halted(*SIN, 1.5)])
    shares = {share.worker: share for share in found.shares()}
    assert shares["notebook"].idle == pytest.approx(0.0)
    assert found.state_of(SIN) == "halted"
    again = made().after([*events, *ran(*SIN, 2000.0, 1.0)])
    assert {share.worker: share.idle for share in again.shares()}["notebook"] < 0.01


def test_the_critical_path_of_a_paused_pass_is_that_of_its_nodes_times():
    """Whoever steps decides what runs last: here the leaf, which takes a tenth of what worker1 does."""
    slow_first = [event for event in UNPAUSED if event.key != LEAF]
    events = [*slow_first, halted(*LEAF, 2.6), *ran(*LEAF, 600.0, 0.1)]
    found = made().after(events)
    assert found.critical_path() == [SUM, RECEIVE, EXP, PARAMETER]
    assert made().after([*slow_first, *ran(*LEAF, 600.0, 0.1)]).critical_path() == [SUM, RECEIVE, SIN, LEAF]


@pytest.mark.parametrize("stepped", [False, True])
def test_the_critical_path_includes_nodes_that_end_before_the_node_that_sends_to_them(stepped):
    """The notebook's receive node ends only when worker1 has run the nodes that waited for its gradient."""
    late = [
        *ran(*SUM, 1.0, 1.0),
        *ran(*SIN, 1.5, 0.5),
        *ran(*EXP, 4.0, 2.0),
        *ran(*PARAMETER, 4.5, 0.25),
        *ran(*RECEIVE, 4.6, 3.0),
    ]
    if stepped:
        late.append(halted(*SUM, 0.0))
    kept_waiting = [] if stepped else [SIN]  # the notebook ran this node before it could run the receive node
    assert made().after(late).critical_path() == [SUM, *kept_waiting, RECEIVE, EXP, PARAMETER]


def test_a_busy_worker_is_part_of_the_critical_path():
    """The gradient of Exp arrives at once, but worker1 runs the other branch, Cos, until 9.0."""
    nodes = {
        "notebook": [operation(0, "SumBackward0", 1, 2), receive(1, 7), receive(2, 8)],
        "worker1": [operation(0, "ExpBackward0"), operation(1, "CosBackward0")],
    }
    edges = [Edge(7 + n, "worker1", "notebook", "f", (((2,), "float32", 8),), (n,)) for n in (0, 1)]
    ran_before = [
        *ran(*SUM, 1.0, 1.0),
        *ran("notebook", 2, 1.5, 0.5),
        Event(1.2, "worker1", "arrived", message=8),
        *ran(*RECEIVE, 2.0, 0.5),
        Event(1.8, "worker1", "arrived", message=7),
        *ran("worker1", 1, 9.0, 7.5),
    ]
    found = Backward(planned(Trace(1, nodes, edges), [SUM]))
    busy = found.after([*ran_before, *ran(*EXP, 10.0, 1.0)])
    assert busy.critical_path() == [SUM, ("notebook", 2), ("worker1", 1), EXP]
    free = found.after([event for event in [*ran_before, *ran(*EXP, 10.0, 1.0)] if event.key != ("worker1", 1)])
    assert free.critical_path() == [SUM, ("notebook", 2), RECEIVE, EXP]
    at_once = found.after([event for event in ran_before if event.key != ("worker1", 1)] + ran(*EXP, 2.0, 0.0))
    assert at_once.critical_path()[-1] == EXP


def test_times_on_a_gpu_are_shown_beside_those_of_the_processor():
    timed = [Event(2.5, "notebook", "timed", 2, seconds=0.0031), Event(1.0, "notebook", "timed", 0, seconds=0.001)]
    found = made().after([*UNPAUSED, *timed])
    assert "  notebook: 4 of 4 nodes, busy 3.00 s, waited 2.00 s, GPU 4.1 ms" in report.as_text(found)
    assert any(line.startswith("  worker1: 2 of 2 nodes") and "GPU" not in line for line in report.as_text(found))
    assert "  the longest on a GPU, 3.1 ms, was Sin@notebook (node 2)" in report.as_text(found)
    assert ">GPU<" in report.as_html(found, "told")
    drawn = page.snapshot(found)
    assert drawn["gpu"] == [1.0, None, 3.1, None, None, None]
    assert [share.get("gpu") for share in drawn["shares"]] == [4.1, None]


def test_without_a_gpu_nothing_is_said_of_one():
    found = made().after(UNPAUSED)
    assert "GPU" not in "\n".join(report.as_text(found))
    assert "GPU" not in report.as_html(found, "told")
    assert "gpu" not in json.dumps(page.snapshot(found))


def replicas(dtype="float32"):
    """Two workers with equal graphs: Sum to Exp to a parameter; worker1 in another dtype, if one is given."""

    def graph(dtype):
        return [
            NodeInfo(0, "ExpBackward0", "operation", (2,), dtype, (1,)),
            NodeInfo(1, "Parameter", "leaf", (2,), dtype, ()),
            NodeInfo(2, "SumBackward0", "operation", (), dtype, (0,)),
        ]

    return Backward(
        planned(Trace(1, {"worker0": graph("float32"), "worker1": graph(dtype)}), [("worker0", 2), ("worker1", 2)])
    )


def norms(worker, *values):
    """Events of a worker on which Sum, Exp and the parameter got gradients with these norms."""
    return [
        event
        for time, (node, norm) in enumerate(zip((2, 0, 1), values, strict=True), 1)
        for event in ran(worker, node, float(time), 0.5, norm=norm)
    ]


def test_gradients_that_grow_and_vanish_are_told():
    found = told(replicas().after([*norms("worker0", 1.0, 2.0, 4000.0), *norms("worker1", 1.0, 2.0, 0.0)]))
    assert "gradients grew most, 2000 times, in Exp@worker0 (node 0)" in found
    assert "gradients vanished in Exp@worker1 (node 0), from norm 2 to 0" in found


def test_gradients_that_change_little_are_not_told():
    found = told(replicas().after([*norms("worker0", 1.0, 2.0, 4.0), *norms("worker1", 1.0, 2.0, 0.5)]))
    assert not any("grew" in each or "vanished" in each or "equal norms" in each for each in found)


def test_replicas_with_equal_gradients_are_told():
    found = told(replicas().after([*norms("worker0", 1.0, 2.0, 4.0), *norms("worker1", 1.0, 2.0, 4.0)]))
    assert any(each.startswith("the gradients of worker0,1 have equal norms to the bit") for each in found)


def test_a_replica_in_another_dtype_is_told():
    found = told(replicas("float16").after(norms("worker0", 1.0, 2.0, 4.0)))
    said = "workers compute in other dtypes (float32 on worker0; float16 on worker1), first in Exp@worker0 (node 0)"
    assert said in found


def test_a_node_that_fails_is_told_and_marked():
    found = replicas().after([Event(1.0, "worker1", "running", 0), Event(1.1, "worker1", "failed", 0)])
    assert told(found)[0] == "the pass failed at Exp@worker1 (node 0)"
    assert ">failed<" in as_svg(found.plan.trace, report.marks_of(found))
    assert page.snapshot(found)["bad"] == list(found.nodes).index(("worker1", 0))


def test_parameters_in_no_optimizer_are_told_if_they_got_a_gradient():
    found = replicas()
    for worker in ("worker0", "worker1"):
        node = found.nodes[worker, 1]
        msgspec.structs.force_setattr(node, "notes", (remarks.UNOWNED,))
        msgspec.structs.force_setattr(node, "label", "head.weight" if worker == "worker0" else "body.weight")
    done = found.after([*norms("worker0", 1.0, 2.0, 4.0), *norms("worker1", 1.0, 2.0, 0.5)])
    said = "{}: 1 parameter got a gradient and belongs to no optimizer: {}"
    assert told(done)[-2:] == [said.format("worker0", "head.weight"), said.format("worker1", "body.weight")]
    assert remarks.remarks(done)[-2][1].node == ("worker0", 1)
    assert ">unowned<" in as_svg(done.plan.trace, report.marks_of(done))
    assert not any("optimizer" in each for each in told(found.after(norms("worker0", 1.0, 2.0, 4.0)[:2])))
