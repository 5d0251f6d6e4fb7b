"""Where the boxes of a picture stand: nothing is cut, nothing lies on another, and the counts are the plan's."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from helpers.simulated.handmade_traces import HandmadeTrace, branches, chain, residual, step, tangle

from nbdist.autograd.graph.traces import planned
from nbdist.views.drawing.folding import crossings, diagram_of
from nbdist.views.drawing.graph import WIDEST, Marks, as_svg, plan_as_svg
from nbdist.views.drawing.layout import lay_out
from nbdist.views.drawing.mirrored import mirrored
from nbdist.views.drawing.pictures import as_image

SVG = "{http://www.w3.org/2000/svg}"


GRAPHS = {
    "nothing across": chain(3),
    "branches": branches(),
    "a long chain": chain(120),
    "a chain to fold": chain(1000),
    "residual": residual(3),
    "residual, folded": residual(16),
    "residual, no modules": residual(16, modules=False),
    "tangle": tangle(20),
    "tangle, folded": tangle(300),
    "step": (step(3, 6).trace, None),
    "step, folded": (step(8, 64).trace, None),
}


def boxes_of(trace):
    return [box for boxes in diagram_of(trace).boxes.values() for box in boxes]


def laid_out(trace):
    return lay_out(diagram_of(trace), lambda box: 12 + 7 * len(box.name), 80, WIDEST)


@pytest.mark.parametrize("turn", [lambda layout, left: layout, mirrored])
@pytest.mark.parametrize("name", GRAPHS)
def test_no_box_is_cut_and_none_lies_on_another(name, turn):
    trace, _ = GRAPHS[name]
    layout = turn(laid_out(trace), 80)
    assert layout.width <= WIDEST
    places = list(layout.places.values())
    assert len(places) == len(boxes_of(trace))
    for place in places:
        assert place.x >= 80
        assert place.right <= layout.width
        assert place.y + place.height <= layout.height
    for one, other in itertools.combinations(places, 2):
        apart = one.right <= other.x or other.right <= one.x or one.y + one.height <= other.y
        assert apart or other.y + other.height <= one.y, (one, other)
    for key, place in layout.places.items():
        assert any(lane.worker == key[0] and lane.top < place.y < lane.bottom for lane in layout.lanes), key


@pytest.mark.parametrize("name", GRAPHS)
def test_each_node_is_in_one_box_and_each_connection_in_one_line(name):
    trace, _ = GRAPHS[name]
    diagram = diagram_of(trace)
    keys = sorted(key for box in boxes_of(trace) for key in box.keys)
    assert keys == sorted((worker, node.number) for worker, nodes in trace.nodes.items() for node in nodes)
    assert len(boxes_of(trace)) <= 300
    of = {key: box.key for box in boxes_of(trace) for key in box.keys}
    ways = [way for line in diagram.lines for way in line.ways]
    assert len(ways) == len(set(ways))
    own = {
        ((w, source), (w, node.number)) for w, nodes in trace.nodes.items() for node in nodes for source in node.inputs
    }
    across = {(source, target) for _, source, target in crossings(trace)}
    assert set(ways) == {(one, other) for one, other in own | across if of[one] != of[other]}
    assert len(laid_out(trace).routes) == len(diagram.lines)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in ("tangle, folded", "step, folded")])
def test_lines_go_from_left_to_right(name):
    trace, _ = GRAPHS[name]
    columns = laid_out(trace).columns
    for line in diagram_of(trace).lines:
        hangs = columns[line.source] == columns[line.target] and line.source[0] == line.target[0]
        assert hangs or columns[line.source] < columns[line.target], line


def test_lines_pass_boxes_and_do_not_cross_them():
    for name in ("branches", "residual", "tangle"):
        trace, _ = GRAPHS[name]
        layout, lines = laid_out(trace), diagram_of(trace).lines
        for number, (line, strokes) in enumerate(zip(lines, layout.routes, strict=True)):
            if number in layout.elbows:
                continue
            for points in strokes:
                for (x, y), (to, down) in itertools.pairwise(points):
                    if y != down:  # a curve, in the gap between two columns, where no box stands
                        continue
                    for key, place in layout.places.items():
                        inside = place.y < y < place.y + place.height and x < place.right - 1 and place.x + 1 < to
                        assert not inside or key in (line.source, line.target), (name, line, key)


def test_parameters_hang_below_the_operation_that_uses_them():
    trace, _ = residual(1)
    layout = laid_out(trace)
    by_label = {node.label: node.number for node in trace.nodes["worker1"]}
    for layer in range(5):
        weight = layout.places["worker1", by_label[f"blocks.0.fc{layer}.weight"]]
        bias = layout.places["worker1", by_label[f"blocks.0.fc{layer}.bias"]]
        (user,) = [n for n in trace.nodes["worker1"] if by_label[f"blocks.0.fc{layer}.bias"] in n.inputs]
        place = layout.places["worker1", user.number]
        assert place.y < bias.y
        assert place.y < weight.y
        assert place.x < bias.x < place.x + 40
        assert (
            layout.columns["worker1", user.number] == layout.columns["worker1", by_label[f"blocks.0.fc{layer}.weight"]]
        )


def test_seventeen_nodes_are_no_wider_than_a_page_at_full_size():
    found = HandmadeTrace("worker0")
    x = found.leaf("worker0", "x")
    for layer in range(4):
        x = found.linear("worker0", x, f"fc{layer}")
    assert len(found.trace.nodes["worker0"]) == 17
    svg = ET.fromstring(as_svg(found.trace))
    assert float(svg.get("width")) <= 600, "it was 2,500 once"


def test_folded_residual_blocks_read_from_left_to_right():
    trace, _ = residual(16)
    boxes = {box.name.partition(" ")[0]: box for box in boxes_of(trace)}
    columns = laid_out(trace).columns
    blocks = [columns[boxes[f"blocks.{number}"].key] for number in range(16)]
    assert blocks == sorted(set(blocks)), "each in a column of its own, in their order"
    assert {len(boxes[f"blocks.{number}"].keys) for number in range(16)} == {22}
    assert boxes["blocks.3"].kind == "group"


def test_without_modules_a_chain_is_folded_by_runs():
    trace, _ = chain(1000)
    boxes = [box for box in boxes_of(trace) if box.kind == "group"]
    assert 10 < len(boxes) <= 60
    assert {name.partition(" ")[0] for name in (box.name for box in boxes)} == {"Add"}
    assert sum(len(box.keys) for box in boxes) == 1001


def counts_in(svg):
    """What the fields of each box say, by its title."""
    root = ET.fromstring(svg)
    return {
        group.findtext(f"{SVG}title"): [text.text for text in group.findall(f"{SVG}text")][1:]
        for group in root.iter(f"{SVG}g")
        if group.findtext(f"{SVG}title")
    }


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_the_counts_are_the_plans(mode):
    trace, root = branches()
    plan = planned(trace, [root], mode)
    fields = [field for fields in counts_in(plan_as_svg(plan)).values() for field in fields]
    numbers = sorted(int(field) for field in fields if field.isdigit())
    assert numbers == sorted(count for key, count in plan.waits_for.items() if key != root)
    assert fields.count("root") == 1


def x_of(svg, number):
    """Where the box of a node of worker0 begins."""
    told = f"node {number} of worker0"
    (group,) = [g for g in ET.fromstring(svg).iter(f"{SVG}g") if told in g.findtext(f"{SVG}title", "")]
    return float(group.find(f"{SVG}rect").get("x"))


def test_gradients_go_from_left_to_right_in_a_plan_and_a_forward_pass_in_a_graph():
    trace, root = chain(3)
    graph, plan = as_svg(trace), plan_as_svg(planned(trace, [root]))
    first, last = trace.nodes["worker0"][1].number, trace.nodes["worker0"][-1].number
    assert x_of(graph, first) < x_of(graph, last)
    assert x_of(plan, first) > x_of(plan, last)
    assert "forward →, gradients ←</text>" in graph
    assert "gradients →, forward ←</text>" in plan


def row_ends(layout):
    """Each row of lanes from top to bottom, with the letters at its beginning and at its end."""
    bottoms = [lane.bottom for lane in layout.lanes if lane.worker == layout.lanes[-1].worker]
    rows = [(set(), set()) for _ in bottoms]
    for mark in layout.marks:
        row = next(number for number, bottom in enumerate(bottoms) if mark.y < bottom)
        rows[row][mark.x > 80].add(mark.letters)
    return rows


def test_what_breaks_off_goes_on_in_the_next_row_in_a_turned_picture_too():
    layout = laid_out(GRAPHS["residual"][0])
    rows, turned = row_ends(layout), row_ends(mirrored(layout, 80))
    assert len(rows) > 1
    assert not rows[0][0]
    assert rows[0][1] == rows[1][0] != set()
    assert turned == [(ends, begins) for begins, ends in rows[::-1]]


def test_each_box_of_an_image_has_its_tooltip_over_all_of_it():
    trace, root = branches()
    picture = plan_as_svg(planned(trace, [root]))
    shares = re.findall(r'<span title="[^"]+" style="[^"]*;width:([\d.]+)%', as_image(picture))
    width = float(ET.fromstring(picture).get("width"))
    assert len(shares) == len(boxes_of(trace))
    assert min(float(share) * width / 100 for share in shares) > 20


def test_what_takes_no_part_is_pale_and_has_no_count():
    trace, root = branches()
    told = counts_in(plan_as_svg(planned(trace, [root])))
    assert [fields for title, fields in told.items() if title.startswith("CosBackward0")] == [[]]
    (title,) = [title for title in told if title.startswith("CosBackward0")]
    assert title.endswith("takes no part")
    assert "takes no part</text>" in plan_as_svg(planned(trace, [root])), "in the legend"
    assert "takes no part" not in as_svg(trace)


def test_a_pass_that_was_left_midway():
    trace, root = branches()
    plan = planned(trace, [root])
    receive = next(node.number for node in trace.nodes["notebook"] if node.kind == "receive")
    waits = plan.waits_for["notebook", receive]
    assert waits == 2
    states = dict.fromkeys(plan.waits_for, "waiting") | {root: "done", ("worker1", 0): "halted"}
    marks = Marks(plan.waits_for, [root], {("notebook", receive): 1}, states, bad=("worker1", 0), path=[root])
    svg = as_svg(trace, marks)
    fields = [fields for fields in counts_in(svg).values() if "1/2" in fields]
    assert fields == [["1/2"]]
    assert any(fields[-2:] == ["halted", "NaN"] for fields in counts_in(svg).values())
    for told in ("has got k of n gradients", "has not run", "critical path", "the first NaN or Inf"):
        assert f"{told}</text>" in svg
    over = as_svg(trace, Marks(plan.waits_for, [root], None, dict.fromkeys(plan.waits_for, "done")))
    assert "has not run" not in over
    assert "1/2" not in over


def test_a_box_of_which_a_part_is_done_is_neither_done_nor_ready():
    trace, root = residual(16)
    plan = planned(trace, [root])
    states = dict.fromkeys(plan.waits_for, "waiting")
    picture = as_svg(trace, Marks(plan.waits_for, [root], {}, {**states, root: "running"}))
    assert "partly done</text>" not in picture
    for key in list(states)[::2]:
        states[key] = "done"
    assert "partly done</text>" in as_svg(trace, Marks(plan.waits_for, [root], {}, states))


def test_a_line_of_the_legend_says_what_there_is_to_see_and_nothing_else():
    trace, root = branches()
    for told in ("operation", "leaf (parameter)", "receive", "message between workers"):
        assert f"{told}</text>" in as_svg(trace)
    assert "gradients</text>" not in as_svg(trace), "a trace has no roots; so nothing waits for anything"
    assert "waits for n gradients</text>" in plan_as_svg(planned(trace, [root]))
    alone, root = chain(3)
    assert "message between workers" not in plan_as_svg(planned(alone, [root]))
    assert "nodes</text>" not in as_svg(alone)


def test_a_picture_is_the_same_each_time():
    trace, root = residual(16)
    assert plan_as_svg(planned(trace, [root])) == plan_as_svg(planned(trace, [root]))
    assert re.search(r'viewBox="0 0 [\d.]+ [\d.]+"', as_svg(trace))
