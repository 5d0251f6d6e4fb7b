"""Draws the graph of a context: a lane for each worker, time from left to right, as SVG without script and as text.

Pure: data in, text out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from html import escape
from typing import TYPE_CHECKING

from nbdist.autograd.seen import Key

if TYPE_CHECKING:
    from nbdist.autograd.inspection import Edge, NodeInfo, Trace

__all__ = ["as_svg", "as_text", "name_of"]

_BOX = (104, 26)
_STEP = (132, 38)
_LANE = 92
"""Where the boxes of a lane begin; its name stands before."""
_MOST = 400
_FILL = {"operation": "#f4f4f4", "leaf": "#dbeafe", "receive": "#fde8c8"}


def name_of(node: NodeInfo) -> str:
    """A node's name as it is drawn."""
    if node.kind == "receive":
        return "receive"
    return node.name.rsplit("::", 1)[-1].removesuffix("Backward0").removesuffix("Backward")


def as_text(trace: Trace) -> str:
    """The graph as lines: for each worker what it has, and what went to others."""
    lines = [f"context {trace.context_id}: {_count(len(trace.nodes), 'worker')}, {_count(len(trace.edges), 'edge')}"]
    for worker, nodes in trace.nodes.items():
        kinds = [sum(node.kind == kind for node in nodes) for kind in ("operation", "leaf", "receive")]
        lines.append(
            f"  {worker}: {_count(kinds[0], 'operation')}, {_count(kinds[1], 'leaf', 'leaves')}, "
            f"{_count(kinds[2], 'receive')}"
        )
        lines += [f"    -> {edge.receiver}: {_tensors(edge)} ({edge.function})" for edge in _sent_by(trace, worker)]
    lines += [f"  {name} could not be asked" for name in trace.unreachable]
    lines += [f"  {each!r}" for each in trace.passes]
    return "\n".join(lines)


def as_svg(trace: Trace, part: Collection[Key] | None = None) -> str:
    """The graph as a picture; what is not ``part`` of something, if that is given, is grey."""
    count = sum(len(nodes) for nodes in trace.nodes.values())
    if count > _MOST:
        return _text_picture(f"{count} nodes are too many to draw; repr() tells the edges between the workers")
    if not count:
        return _text_picture("nothing has been recorded")
    columns = _columns(trace)
    places, lanes, height = _places(trace, columns)
    width = _LANE + _STEP[0] * (max(columns.values()) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">'
    ]
    for number, (worker, (top, bottom)) in enumerate(lanes.items()):
        shade = "#fafafa" if number % 2 else "#ffffff"
        parts.append(f'<rect x="0" y="{top}" width="{width}" height="{bottom - top}" fill="{shade}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{(top + bottom) / 2 + 4}" font-weight="bold" fill="#333">{escape(worker)}</text>')
    for worker, nodes in trace.nodes.items():
        for node in nodes:
            for source in node.inputs:
                parts.append(_line(places[worker, source], places[worker, node.number], "#999"))
    for edge, sent, received in _crossings(trace):
        title = f"message {edge.autograd_message_id}: {_tensors(edge)} for {edge.function}"
        parts.append(_line(places[sent], places[received], "#d97706", title))
    for worker, nodes in trace.nodes.items():
        for node in nodes:
            faint = part is not None and (worker, node.number) not in part
            parts.append(_box(places[worker, node.number], node, faint=faint))
    return "".join([*parts, "</svg>"])


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _tensors(edge: Edge) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in edge.tensors)


def _sent_by(trace: Trace, worker: str) -> list[Edge]:
    return [edge for edge in trace.edges if edge.sender == worker]


def _crossings(trace: Trace) -> Iterable[tuple[Edge, Key, Key]]:
    """Each edge, from the nodes that made its tensors to those that received them."""
    received: dict[int, dict[int, list[Key]]] = {}
    for worker, nodes in trace.nodes.items():
        for node in nodes:
            if node.message is not None:
                for index in node.tensors:
                    received.setdefault(node.message, {}).setdefault(index, []).append((worker, node.number))
    for edge in trace.edges:
        targets = received.get(edge.autograd_message_id, {})
        for index, source in enumerate(edge.sources):
            yield from ((edge, (edge.sender, source), target) for target in targets.get(index, []))


def _columns(trace: Trace) -> dict[Key, int]:
    """How far to the right each node stands: one further than all that it was computed from."""
    before: dict[Key, list[Key]] = {
        (worker, node.number): [(worker, source) for source in node.inputs]
        for worker, nodes in trace.nodes.items()
        for node in nodes
    }
    for _, source, target in _crossings(trace):
        before[target].append(source)
    columns: dict[Key, int] = {}
    for start in before:
        stack = [start]
        while stack:
            key = stack[-1]
            missing = [other for other in before[key] if other not in columns]
            if key not in columns and missing:
                stack += missing
                continue
            stack.pop()
            columns.setdefault(key, max((columns[other] + 1 for other in before[key]), default=0))
    return columns


def _places(
    trace: Trace, columns: dict[Key, int]
) -> tuple[dict[Key, tuple[float, float]], dict[str, tuple[int, int]], int]:
    """The upper left corner of every box, and the lanes."""
    places: dict[Key, tuple[float, float]] = {}
    lanes: dict[str, tuple[int, int]] = {}
    top = 0
    for worker, nodes in trace.nodes.items():
        used: dict[int, int] = {}
        for node in nodes:
            column = columns[worker, node.number]
            row = used.get(column, 0)
            used[column] = row + 1
            places[worker, node.number] = (_LANE + column * _STEP[0], top + 8 + row * _STEP[1])
        bottom = top + 8 + _STEP[1] * max(used.values(), default=1)
        lanes[worker] = (top, bottom)
        top = bottom
    return places, lanes, top


def _line(source: tuple[float, float], target: tuple[float, float], colour: str, title: str = "") -> str:
    x1, y1 = source[0] + _BOX[0], source[1] + _BOX[1] / 2
    x2, y2 = target[0], target[1] + _BOX[1] / 2
    middle = (x1 + x2) / 2
    told = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<path d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}" fill="none" stroke="{colour}" '
        f'stroke-width="{2 if title else 1}">{told}</path>'
    )


def _box(place: tuple[float, float], node: NodeInfo, *, faint: bool) -> str:
    x, y = place
    name = name_of(node)
    shown = name if len(name) <= 15 else name[:14] + "…"
    shape = f"{node.dtype}{list(node.shape)}" if node.shape is not None else ""
    title = f"{node.name} {shape}" + (f", message {node.message}" if node.message is not None else "")
    title += "".join(f"\n{more}" for more in (node.module, node.line) if more)
    return (
        f'<g opacity="{0.3 if faint else 1}"><title>{escape(title)}</title>'
        f'<rect x="{x}" y="{y}" width="{_BOX[0]}" height="{_BOX[1]}" '
        f'rx="{12 if node.kind == "leaf" else 3}" fill="{_FILL[node.kind]}" stroke="#888"/>'
        f'<text x="{x + _BOX[0] / 2}" y="{y + 17}" text-anchor="middle" fill="#222">{escape(shown)}</text></g>'
    )


def _text_picture(text: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="40" font-family="sans-serif" font-size="12">'
        f'<text x="8" y="24" fill="#333">{escape(text)}</text></svg>'
    )
