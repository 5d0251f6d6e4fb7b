"""Draws the graph of a context, with the plan or progress of a pass over it, as SVG without scripts and as text.

The picture has a lane for each worker. From left to right it shows the forward pass, or time in a pipeline's step; with
a plan or a pass it shows the gradients from left to right, in the shapes and colours of the live view. `folding`
decides what the boxes stand for, and `layout` where they are. Pure: data in, text out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from nbdist.amounts import counted
from nbdist.autograd.graph.events import Key
from nbdist.autograd.graph.traces import Edge, Plan, Trace
from nbdist.views.drawing import pictures
from nbdist.views.drawing.columns import BOX
from nbdist.views.drawing.folding import TIMES, Box, Diagram, DrawnLine, diagram_of, name_of, nodes_of
from nbdist.views.drawing.layout import Layout, NodePlace, Point, lay_out
from nbdist.views.drawing.mirrored import mirrored

WIDEST = 880  # the largest width of a picture, in pixels; a wider graph continues in another row of lanes below
_NARROWEST = 420  # the smallest one, which leaves room for the legend
_NARROW, _BROAD = "iljtfrI.,:;'|()[]/ ", f"mwMW@%…→←{TIMES}"
_NAME_LENGTH = 18  # characters of a name that are drawn
_NAME_COLUMN_WIDEST = 130  # pixels, for the names of the workers
_LEGEND_LINE = 15  # pixels
_NAMES_A_LINE = 12  # in one line of text

_INK, _FAINT, _RULE, _GREY = "#1f2328", "#6b7280", "#d0d7de", "#8b95a1"
# By the kind of a box: its colour, and its words in the legend.
_FILL = {"operation": "#eef0f3", "leaf": "#d6e8fc", "receive": "#fde6c3", "group": "#e8e3f6"}
_WORDS = {"operation": "operation", "leaf": "leaf (parameter)", "receive": "receive", "group": f"{TIMES}n: n nodes"}
# Once a pass has begun, by the state of a box: its words in the legend, its colour and that of its frame.
_STATES = {
    "waiting": ("has not run", "#fff", _GREY),
    "ready": ("ready", "#fff", "#3b82c4"),
    "running": ("runs", "#f6c66b", _GREY),
    "halted": ("halted", "#f2a29b", "#c53030"),
    "done": ("done", "#a9d8b8", "#2f855a"),
    "partly": ("partly done", "#fff", "#2f855a"),
}
_MESSAGE, _PATH, _ROOT, _BAD, _HALTED, _NOTE = "#d97706", "#8b5cf6", "#15803d", "#c53030", "#c53030", "#475569"
# By the word of a note on a node: its words in the legend.
_NOTES = {"hook": "calls a hook of yours", "again": "a checkpoint runs it again", "unowned": "is in no optimizer"}

Tag = tuple[str, str, str]
"""A small field at the right end of a box: its text, the colour of its background, the colour of its letters."""


@dataclass(frozen=True)
class Marks:
    """The marks that a picture has for a pass, on top of the graph."""

    waits_for: Mapping[Key, int]
    """The nodes that take part, and the number of gradients that each waits for."""
    roots: Collection[Key] = ()
    got: Mapping[Key, int] | None = None
    """The number of these gradients that have arrived, for a pass that is not over; else None."""
    states: Mapping[Key, str] = field(default_factory=dict)
    """The state of nodes: ``waiting``, ``ready``, ``running``, ``halted`` or ``done``; empty if no pass has begun."""
    bad: Key | None = None
    """The node at which the first NaN or Inf was found."""
    failed: Key | None = None
    """The node that has raised an error."""
    path: Sequence[Key] = ()
    """The nodes of the critical path."""
    in_vain: Collection[int] = ()
    """The messages for whose gradients a FAST pass waits although they will never come."""


# -- as text --------------------------------------------------------------------------------------


def as_text(trace: Trace) -> str:
    """Return a trace as lines: for each worker the number of its nodes of each kind, and the tensors that it sent."""
    lines = [f"context {trace.context_id}: {counted(len(trace.nodes), 'worker')}, {counted(len(trace.edges), 'edge')}"]
    for worker, nodes in trace.nodes.items():
        kinds = [sum(node.kind == kind for node in nodes) for kind in ("operation", "leaf", "receive")]
        lines.append(
            f"  {worker}: {counted(kinds[0], 'operation')}, {counted(kinds[1], 'leaf', 'leaves')}, "
            f"{counted(kinds[2], 'receive')}"
        )
        sent = [edge for edge in trace.edges if edge.sender == worker]
        lines += [f"    -> {edge.receiver}: {_tensors(edge)} ({edge.function})" for edge in sent]
    lines += [f"  {name} could not be asked" for name in trace.unreachable]
    lines += [f"  {each!r}" for each in trace.passes]
    return "\n".join(lines)


def plan_as_text(plan: Plan) -> str:
    """Return a plan as lines: for each worker the nodes with the gradients that each waits for, and the messages."""
    trace = plan.trace
    total = sum(map(len, trace.nodes.values()))
    inputs = "operations" if trace.of_step else "gradients"
    kind = "pipeline step" if trace.of_step else f"{plan.mode.upper()} pass"
    by_key = nodes_of(trace)
    roots = _listed([f"{name_of(by_key[key])}@{key[0]}" for key in plan.roots])
    lines = [
        f"plan of a {kind} in context {trace.context_id}, from {roots or 'nowhere'}: "
        f"{len(plan.waits_for)} of {counted(total, 'node')} take part; for how many {inputs} each waits:"
    ]
    unused = {edge.autograd_message_id for edge in plan.unused}
    for worker, nodes in trace.nodes.items():
        if not trace.of_step:  # node numbers depend on which thread served a call, names do not
            nodes = sorted(nodes, key=lambda node: (_KINDS.index(node.kind), name_of(node)))
        told = [
            f"{name_of(node)} {plan.waits_for[worker, node.number]}"
            + (" (root)" if (worker, node.number) in plan.roots and not trace.of_step else "")
            for node in nodes
            if (worker, node.number) in plan.waits_for
        ]
        rest = [name_of(node) for node in nodes if (worker, node.number) not in plan.waits_for]
        line = f"  {worker}: {_listed(told) or 'nothing'}"
        lines.append(line + (f"; no part: {_listed(rest)}" if rest else ""))
        for edge in trace.edges:
            if edge.receiver == worker and not trace.of_step:
                is_unused = edge.autograd_message_id in unused
                what = "no gradient" if is_unused else "gradients"
                waits = ", and FAST waits for one" if is_unused and plan.mode == "fast" else ""
                lines.append(f"    -> {edge.sender}: {what} of {_tensors(edge)} ({edge.function}){waits}")
    lines += [f"  {name} could not be asked" for name in trace.unreachable]
    return "\n".join(lines)


_KINDS = ("operation", "receive", "leaf")  # their order in a line of text


def _listed(names: Iterable[str]) -> str:
    """Return the first `_NAMES_A_LINE` different names, with counts, and the number of the others."""
    told = [name if count == 1 else f"{name} {TIMES}{count}" for name, count in Counter(names).items()]
    more = [f"{len(told) - _NAMES_A_LINE} more"] if len(told) > _NAMES_A_LINE else []
    return ", ".join(told[:_NAMES_A_LINE] + more)


def _tensors(edge: Edge) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in edge.tensors)


# -- as a picture ---------------------------------------------------------------------------------


def plan_as_svg(plan: Plan) -> str:
    """Return the picture of a plan as SVG: the graph, and the number of gradients that each node waits for."""
    return as_svg(plan.trace, marks_of_plan(plan))


def marks_of_plan(plan: Plan) -> Marks:
    """Return the marks that a picture has for a plan, before a pass begins."""
    # Only a FAST pass waits for messages that never come.
    in_vain = {edge.autograd_message_id for edge in plan.unused} if plan.mode == "fast" else ()
    return Marks(plan.waits_for, () if plan.trace.of_step else plan.roots, in_vain=in_vain)


def as_svg(trace: Trace, marks: Marks | None = None) -> str:
    """Return the picture of a recorded graph as SVG; ``marks`` add a pass, in which other nodes are pale."""
    if not any(trace.nodes.values()):
        told = "nothing has been recorded"
        return pictures.svg(_NARROWEST, 36, told, [f'<text x="8" y="22" class="ink">{told}</text>'])
    return _Drawing(trace, marks).svg()


class _Drawing:
    """One picture while it is drawn."""

    def __init__(self, trace: Trace, marks: Marks | None) -> None:
        self.trace = trace
        self.has_pass = marks is not None
        self.marks = marks = marks or Marks({})
        self.nodes = nodes_of(trace)
        self.edges = {edge.autograd_message_id: edge for edge in trace.edges}
        self.diagram: Diagram = diagram_of(trace)
        self.left = min(_NAME_COLUMN_WIDEST, 26 + 7.2 * max(map(len, trace.nodes), default=0))
        self.layout: Layout = lay_out(self.diagram, self.width_of, self.left, WIDEST)
        self.way = "time →" if trace.of_step else "forward →, gradients ←"
        if self.has_pass and not trace.of_step:
            self.layout, self.way = mirrored(self.layout, self.left), "gradients →, forward ←"
        self.steps = set(itertools.pairwise(marks.path))
        self.path = set(marks.path)

    def svg(self) -> str:
        layout = self.layout
        width = max(layout.width, _NARROWEST)
        legend, foot = self._legend(layout.height + 6, width)
        height = layout.height + 6 + foot
        told = as_text(self.trace).partition("\n")[0]
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="max-width:100%;height:auto" '
            f'font-family="system-ui, sans-serif" font-size="11" fill="{_INK}"><title>{escape(told)}</title>'
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>'
        ]
        number = {worker: n for n, worker in enumerate(self.trace.nodes)}
        for lane in layout.lanes:
            shade = "#f9fafb" if number[lane.worker] % 2 else "#fff"
            parts.append(
                f'<rect x=".5" y="{lane.top + 0.5:g}" width="{width - 1:g}" height="{lane.bottom - lane.top - 1:g}" '
                f'fill="{shade}" stroke="{_RULE}"/>'
                f'<text x="8" y="{(lane.top + lane.bottom) / 2 + 4:g}" font-weight="bold">'
                f"{escape(_short(lane.worker, (self.left - 26) / 7.2))}</text>"
            )
        parts += [self._line(*each) for each in enumerate(self.diagram.lines)]
        # Boxes last: they lie over the lines.
        for mark in layout.marks:
            parts.append(
                f'<text x="{mark.x:g}" y="{mark.y:g}" font-size="9" text-anchor="end" fill="{_FAINT}">'
                f"{mark.letters}</text>"
            )
        parts += [self._box(box) for boxes in self.diagram.boxes.values() for box in boxes]
        return "".join([*parts, legend, "</svg>"])

    # -- boxes --------------------------------------------------------------------------------

    def width_of(self, box: Box) -> float:
        """Return the width of a box in pixels: its name, and the small fields at its right end (`_tags`)."""
        return _width(_short(box.name)) + 12 + sum(_width(text) + 7 for text, _, _ in self._tags(box))

    def state_of(self, key: Key) -> str:
        """Return the state of a node in the pass, "waiting" if it is not known; "" if no pass is drawn."""
        return self.marks.states.get(key, "waiting") if self.has_pass else ""

    def state_of_box(self, box: Box) -> str:
        """Return the state of a box in the pass, as of its nodes that take part; "" if there are none, or no pass."""
        if not self.marks.states:
            return ""
        states = {self.state_of(key) for key in box.keys if key in self.marks.waits_for}
        # A box with only some nodes done is neither done nor ready; a halted or running node comes first.
        if len(states) > 1 and "done" in states:
            states = (states & {"halted", "running"}) or {"partly"}
        return next((state for state in ("halted", "running", "ready", "waiting", *states) if state in states), "")

    def takes_part(self, box: Box) -> bool:
        """Return whether some node of a box takes part in the pass; True if no pass is drawn."""
        return not self.has_pass or any(key in self.marks.waits_for for key in box.keys)

    def _tags(self, box: Box) -> list[Tag]:
        """Return the small fields at the right end of a box; none if no pass is drawn."""
        marks, found = self.marks, []
        if any(key in marks.roots for key in box.keys):
            found.append(("root", _ROOT, "#fff"))
        if len(box.keys) == 1 and box.key in marks.waits_for:
            count = marks.waits_for[box.key]
            if marks.got is not None and self.state_of(box.key) in ("waiting", "ready", "halted") and count:
                found.append((f"{marks.got.get(box.key, 0)}/{count}", "#fff", _INK))
            elif count or not found:  # a root that waits for nothing is only "root"
                found.append((str(count), "#fff", _INK))
        if any(self.state_of(key) == "halted" for key in box.keys):
            found.append(("halted", _HALTED, "#fff"))
        if marks.bad in box.keys:
            found.append(("NaN", _BAD, "#fff"))
        if marks.failed in box.keys:
            found.append(("failed", _BAD, "#fff"))
        if self.has_pass:
            found += dict.fromkeys((word, _NOTE, "#fff") for key in box.keys for word, _ in self.nodes[key].notes)
        return found

    def _box(self, box: Box) -> str:
        state = self.state_of_box(box)
        _, fill, colour = _STATES.get(state, ("", None, _GREY))
        edge = (colour, 1.0) if self.path.isdisjoint(box.keys) else (_PATH, 2.0)
        pale, dashed = not self.takes_part(box), state == "waiting"
        made = _boxed(self.layout.places[box.key], box, self._tags(box), fill, edge, pale=pale, dashed=dashed)
        return f"<g><title>{escape(self._title(box))}</title>{made}</g>"

    def _title(self, box: Box) -> str:
        """Return the tooltip of a box as lines of text, not escaped: its node, or the number of its nodes by name."""
        marks = self.marks
        if len(box.keys) > 1:
            count = Counter(name_of(self.nodes[key]) for key in box.keys)
            names = ", ".join(f"{number} {name}" for name, number in count.most_common(8))
            lines = [f"{box.name.rpartition(' ')[0]}: {len(box.keys)} nodes: {names}"]
            if self.has_pass:
                part = sum(key in marks.waits_for for key in box.keys)
                lines += [f"{part} take part"] if part < len(box.keys) else []
                done = sum(self.state_of(key) == "done" for key in box.keys)
                lines += [f"{done} have run"] if marks.states and done < part else []
            return "\n".join(lines)
        node = self.nodes[box.key]
        shape = f" {node.dtype}{list(node.shape)}" if node.shape is not None else ""
        lines = [f"{'receive' if node.kind == 'receive' else node.name}{shape}"]
        if node.label is not None:
            full = f"{node.parameter_of}.{node.label.rpartition('.')[2]}" if node.parameter_of else node.label
            lines = [f"{full}: {node.name}{shape}"]
        if node.message is not None:
            edge = self.edges.get(node.message)
            lines[0] += f", from {edge.sender}, with a call of {edge.function}" if edge is not None else ""
        lines += [more for more in (node.module, node.line, *(told for _, told in node.notes)) if more]
        told = f"; {self._words_on_part(box.key)}" if self.has_pass else ""
        lines.append(f"node {node.number} of {box.worker}{told}")
        return "\n".join(lines)

    def _words_on_part(self, key: Key) -> str:
        marks = self.marks
        if (count := marks.waits_for.get(key)) is None:
            return "takes no part"
        what = "operation" if self.trace.of_step else "gradient"
        told = "root: the pass begins here; " if key in marks.roots else ""
        if marks.got is not None and self.state_of(key) != "done":
            told += f"has got {marks.got.get(key, 0)} of {counted(count, what)}"
        else:
            told += f"waits for {counted(count, what)}"
        told += "; it has failed" if key == marks.failed else ""
        return told + ("; the first NaN or Inf" if key == marks.bad else "")

    # -- lines --------------------------------------------------------------------------------

    def _line(self, number: int, line: DrawnLine) -> str:
        """Return a line between two boxes as SVG; ``number`` is its index in the diagram's lines."""
        # Colours show messages, gradients that will not come, and the critical path. Other lines, and lines that the
        # pass does not use, are grey.
        marks = self.marks
        colour, thick, dashes = (_MESSAGE, 1.8, "") if line.edges else ("#9aa3ad", 1.2, "")
        messages = {edge.autograd_message_id for edge in line.edges}
        if self.has_pass:
            if messages and messages <= set(marks.in_vain):
                colour, dashes = _BAD, ' stroke-dasharray="5 3"'
            elif not any(source in marks.waits_for and target in marks.waits_for for source, target in line.ways):
                colour, dashes = "#b6bdc6", ' stroke-dasharray="2 3"'
            if any((target, source) in self.steps or (source, target) in self.steps for source, target in line.ways):
                colour, thick = _PATH, 2.4
        strokes = self.layout.routes[number]
        path = "".join(_stroke(points, corners=number in self.layout.elbows) for points in strokes)
        title = "\n".join(
            f"{edge.sender} to {edge.receiver}, with a call of {edge.function}: {_tensors(edge)}" for edge in line.edges
        )
        told = f"<title>{escape(title)}</title>" if title else ""
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick:g}"{dashes}>{told}</path>'

    # -- the legend ---------------------------------------------------------------------------

    def _legend(self, top: float, width: float) -> tuple[str, float]:
        """Return the legend as SVG, from the height ``top`` on and at most ``width`` wide, and the legend's height."""
        x, y = 8.0, top
        parts = []
        for text, sample, length in self._samples():
            need = length + 5 + _width(text) * 0.93
            if x + need > width - 6 and x > 8:
                x, y = 8.0, y + _LEGEND_LINE
            parts.append(f'<g transform="translate({x:.1f} {y:g})">{sample}')
            parts.append(f'<text x="{length + 4:.1f}" y="10" font-size="10" fill="#4b5563">{escape(text)}</text></g>')
            x += need + 12
        return "".join(parts), y - top + _LEGEND_LINE + 2

    def _samples(self) -> list[tuple[str, str, float]]:
        """Return the legend's entries, for what this picture shows: a text, a sample as SVG or "", its width."""
        marks, trace = self.marks, self.trace
        boxes = [box for each in self.diagram.boxes.values() for box in each]
        kinds = {box.kind for box in boxes}
        tags = {text for box in boxes for text, _, _ in self._tags(box)}
        messages = {edge.autograd_message_id for line in self.diagram.lines for edge in line.edges}
        what = "operations" if trace.of_step else "gradients"
        states = {self.state_of_box(box) for box in boxes}
        fill = "#fff" if marks.states else None
        found = [(words, _sample(kind, fill), 16.0) for kind, words in _WORDS.items() if kind in kinds]
        for state, (meaning, *colours) in _STATES.items():
            if state in states:
                found.append((meaning, _sample("operation", *colours, dashed=state == "waiting"), 16.0))
        in_vain = messages.intersection(marks.in_vain)
        notes = (
            (word in tags, told, _sample_tag(word, _NOTE, "#fff"), _width(word) + 6) for word, told in _NOTES.items()
        )
        further = (
            (messages, "message between workers", _sample_line(_MESSAGE), 18.0),
            (any(text.isdigit() for text in tags), f"waits for n {what}", _sample_tag("n", "#fff", _INK), 12.0),
            (any("/" in text for text in tags), f"has got k of n {what}", _sample_tag("k/n", "#fff", _INK), 24.0),
            ("root" in tags, "the pass begins here", _sample_tag("root", _ROOT, "#fff"), 28.0),
            (not all(map(self.takes_part, boxes)), "takes no part", _sample("operation", pale=True), 16.0),
            (in_vain, "is waited for, and does not come", _sample_line(_BAD, ' stroke-dasharray="5 3"'), 18.0),
            (marks.path, "critical path", _sample_line(_PATH), 18.0),
            ("NaN" in tags, "the first NaN or Inf", _sample_tag("NaN", _BAD, "#fff"), 28.0),
            ("failed" in tags, "has failed", _sample_tag("failed", _BAD, "#fff"), 36.0),
            *notes,
            (True, self.way, "", 0.0),
        )
        return found + [(text, sample, width) for is_shown, text, sample, width in further if is_shown]


def _width(text: str) -> float:
    """Return the approximate width in pixels of a text 11 pixels high, in the broadest of the usual fonts."""
    return sum(4.3 if c in _NARROW else 10.2 if c in _BROAD else 8.0 if c.isupper() else 6.9 for c in text)


def _short(name: str, most: float = _NAME_LENGTH) -> str:
    """Return a name cut to at most ``most`` characters: a dotted name loses its beginning, any other its end."""
    if len(name) <= most:
        return name
    if "." in name:
        return f"…{name[-int(most) + 1 :]}"
    return f"{name[: int(most) - 1]}…"


def _stroke(points: Sequence[Point], *, corners: bool) -> str:
    """Return the ``d`` of an SVG path through points, joined by curves, or by ``corners``."""
    (x, y), *rest = points
    told = f"M{x:.1f} {y:.1f}"
    for to, down in rest:
        middle = (x + to) / 2
        if abs(down - y) < 0.05:
            told += f"H{to:.1f}"
        elif corners:
            told += f"L{to:.1f} {down:.1f}"
        else:
            told += f"C{middle:.1f} {y:.1f} {middle:.1f} {down:.1f} {to:.1f} {down:.1f}"
        x, y = to, down
    return told


def _boxed(
    place: NodePlace, box: Box, tags: list[Tag], fill: str | None, edge: tuple[str, float], *, pale: bool, dashed: bool
) -> str:
    """Return a box as SVG: its frame, its name, and small fields at the right end. All texts are escaped here."""
    # The box's kind chooses form and colour; ``fill`` replaces the colour, and a pale box has colours of its own.
    x, y, width, height, kind = place.x, place.y, place.width, place.height, box.kind
    round = height / 2 if kind == "leaf" else 3
    fill, ink, stroke = (fill or _FILL[kind], _INK, edge[0]) if not pale else ("#fff", _FAINT, "#c3c9d1")
    dashes = ' stroke-dasharray="3 2"' if dashed or pale else ""
    outline = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="{round:g}"'
    if kind == "receive":
        neck, point = x + width - 5, f"{x + width:.1f} {y + height / 2:.1f}"
        # The rectangle is not seen: the tooltip of an image lies over it, see `nbdist.views.drawing.pictures.as_image`.
        outline += (
            f' fill="none"/><path d="M{x:.1f} {y:.1f} H{neck:.1f} L{point} L{neck:.1f} {y + height:.1f} H{x:.1f} Z"'
        )
    parts = [f'{outline} fill="{fill}" stroke="{stroke}" stroke-width="{edge[1]:g}"{dashes}/>']
    if kind == "group":
        parts.append(f'<path d="M{x + 3:.1f} {y + height + 2.5:.1f}H{x + width - 3:.1f}" stroke="{stroke}"/>')
    if box.name:
        name = escape(_short(box.name))
        parts.append(f'<text x="{x + 6:.1f}" y="{y + height / 2 + 4:.1f}" fill="{ink}">{name}</text>')
    at = x + width - 2 - sum(_width(text) + 7 for text, _, _ in tags)
    for text, back, letters in tags:
        parts.append(_tag(at, y + 4, _width(text) + 5, height - 8, text, back, letters))
        at += _width(text) + 7
    return "".join(parts)


def _tag(x: float, y: float, width: float, height: float, text: str, fill: str, ink: str) -> str:
    """Return a small field with a text, which is escaped here, as SVG. ``ink`` is the colour of its letters."""
    stroke = _GREY if fill == "#fff" else fill
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="2" fill="{fill}" '
        f'stroke="{stroke}" stroke-width=".7"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 3.6:.1f}" text-anchor="middle" font-size="10" '
        f'font-weight="bold" fill="{ink}">{escape(text)}</text>'
    )


def _sample(kind: str, fill: str | None = None, edge: str = _GREY, *, pale: bool = False, dashed: bool = False) -> str:
    """Return the small empty box before a text of the legend; arguments are as for `_boxed`."""
    return _boxed(NodePlace(0, 1, 16, 10), Box("", (), kind, ""), [], fill, (edge, 1.0), pale=pale, dashed=dashed)


def _sample_tag(text: str, fill: str, ink: str) -> str:
    return _tag(0, 0, _width(text) + 5, BOX - 9, text, fill, ink)


def _sample_line(colour: str, more: str = "") -> str:
    """Return the short line before a text of the legend. ``more`` are further attributes of the path."""
    return f'<path d="M0 6H18" stroke="{colour}" stroke-width="1.8" fill="none"{more}/>'
