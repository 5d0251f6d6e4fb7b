"""Places the boxes and lines of a diagram: a lane for each worker, the forward pass from left to right.

::

    worker0   [x]---\\                 /--[receive]--[Mul]       a parameter hangs below the operation that uses it;
    ----------------- \\ ------------ / --------- [ w ]          a wider diagram continues in another row of lanes
    worker1            [receive]--[Exp]

`Columns` puts the boxes into columns, with few crossings. Here the columns are put into rows that are not too wide, the
boxes of a column on top of each other, and the lines between them; a line that continues in another row has a letter
at both ends. All lengths are in pixels. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nbdist.autograd.graph.events import Key
from nbdist.cluster.output.arranger import grouped
from nbdist.views.drawing.columns import BOX, ROW, Columns, Item
from nbdist.views.drawing.folding import Box, Diagram

_GAP = 22  # between two columns, in which lines have their curves
_INDENT = 12  # of a box that hangs below another one
_MARGIN = 7  # above and below the boxes of a lane
_BETWEEN = 12  # two rows of lanes
_RIGHT = 16  # of the last column; a line that continues in the next row of lanes has its letter there

Point = tuple[float, float]


@dataclass(frozen=True)
class NodePlace:
    """The place of a box."""

    x: float
    y: float
    width: float
    height: float = BOX

    @property
    def right(self) -> float:
        """The x coordinate of the right edge."""
        return self.x + self.width

    @property
    def middle(self) -> float:
        """The y coordinate of the middle."""
        return self.y + self.height / 2


@dataclass(frozen=True)
class Lane:
    """A worker's part of a row of lanes."""

    worker: str
    top: float
    bottom: float


@dataclass(frozen=True)
class BreakMark:
    """Letters at the right end of a row, where lines break off, and again where they continue."""

    x: float
    y: float
    letters: str  # one for each line


@dataclass
class Layout:
    """The places of everything in a diagram."""

    width: float = 0.0
    height: float = 0.0
    places: dict[Key, NodePlace] = field(default_factory=dict)
    columns: dict[Key, int] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    routes: list[list[list[Point]]] = field(default_factory=list)
    """For each line of the diagram, its strokes: points to join, by a curve where they differ in height."""
    elbows: set[int] = field(default_factory=set)
    """The numbers of lines from a box to the box that it hangs below; their strokes have corners, not curves."""
    marks: list[BreakMark] = field(default_factory=list)


def lay_out(diagram: Diagram, width_of: Callable[[Box], float], left: float, widest: float) -> Layout:
    """Return the places of a diagram's boxes and lines, in pixels, from ``left`` on."""
    # At most ``widest`` wide, unless a single column is wider: it continues in another row of lanes below.
    columns = Columns(diagram)
    cells = columns.cells()
    found = Layout()
    count = max((column for column, _ in cells), default=-1) + 1
    widths = [6.0] * count  # of a column that only lines pass
    for item in columns.items.values():
        widths[item.column] = max(widths[item.column], *(depth * _INDENT + width_of(box) for box, depth in item.boxes))
    rows = _rows(widths, widest - left - _RIGHT)
    starts: list[float] = []
    row_of: list[int] = []
    tops: dict[tuple[int, str], float] = {}
    y = 0.0
    for number, row in enumerate(rows):
        x = left
        for column in row:
            starts.append(x)
            row_of.append(number)
            x += widths[column] + _GAP
        found.width = max(found.width, x - _GAP + _RIGHT)
        for worker in columns.workers:
            stacks = [cells.get((column, worker), []) for column in row]
            room = max(sum(item.height for item in stack) for stack in stacks)
            if not room:
                continue
            for stack in stacks:  # from left to right: each is placed beside those to its left
                _stack(stack, room)
            tops[number, worker] = y + _MARGIN
            bottom = y + room + 2 * _MARGIN - (ROW - BOX)
            found.lanes.append(Lane(worker, y, bottom))
            y = bottom
        y += _BETWEEN
    found.height = max(0.0, y - _BETWEEN)
    for item in columns.items.values():
        top = tops[row_of[item.column], item.lane] + item.y
        for line, (box, depth) in enumerate(item.boxes):
            x = starts[item.column] + depth * _INDENT
            found.places[box.key] = NodePlace(x, top + line * ROW, width_of(box))
            found.columns[box.key] = item.column
    _route(diagram, columns, found, _Grid(left, starts, widths, row_of, tops))
    return found


def _route(diagram: Diagram, columns: Columns, found: Layout, grid: _Grid) -> None:
    """Add to ``found`` the points of every line, and the letters where lines continue in another row."""
    # Letters by the column in which a line continues and by its box: lines from one box share a place, and so a letter.
    letters: dict[tuple[int, Key], str] = {}
    for number, line in enumerate(diagram.lines):
        source, target = columns.items[columns.root(line.source)], columns.items[columns.root(line.target)]
        start, end = found.places[line.source], found.places[line.target]
        if source is target:  # a box to the box that it hangs below
            found.elbows.add(number)
            found.routes.append([[(end.x + 6, end.y + end.height), (end.x + 6, start.middle), (start.x, start.middle)]])
            continue
        points = [(start.right, start.middle)]
        strokes = [points]
        column, y = source.column, start.middle
        for item in [*columns.places_between(line.source, target), target]:
            points.append((max(points[-1][0], grid.starts[column] + grid.widths[column]), y))
            new = end.middle if item is target else grid.tops[grid.row_of[item.column], item.lane] + item.y + item.port
            if grid.row_of[item.column] != grid.row_of[column]:
                letter = letters.setdefault((item.column, line.source), _letter(item.column, letters))
                points.append((found.width - 4, y))
                found.marks.append(BreakMark(found.width - 5, y - 3, letter))
                found.marks.append(BreakMark(grid.left - 3, new - 3, letter))
                points = [(grid.left - 8, new)]
                strokes.append(points)
            points.append((grid.starts[item.column], new))
            column, y = item.column, new
        points.append((end.x, y))
        found.routes.append(strokes)
    # Lines that break off or continue at one place have one mark with all their letters there.
    at = grouped(found.marks, lambda mark: (mark.x, mark.y))
    found.marks = [BreakMark(*place, "".join(sorted({mark.letters for mark in marks}))) for place, marks in at.items()]


@dataclass(frozen=True)
class _Grid:
    """The coordinates at which columns and lanes begin."""

    left: float
    starts: list[float]
    widths: list[float]
    row_of: list[int]
    tops: dict[tuple[int, str], float]


def _stack(cell: Sequence[Item], room: float) -> None:
    """Place each item of a column in one lane beside the items to its left, if there is room; the order stays."""
    rest = sum(item.height for item in cell)
    free = 0.0
    for item in cell:
        near = [other.y + other.port for other in item.before if other.lane == item.lane]
        wanted = sum(near) / len(near) - item.port if near else free
        item.y = min(max(free, wanted), room - rest)  # the items below need `rest`
        free = item.y + item.height
        rest -= item.height


def _rows(widths: Sequence[float], room: float) -> list[list[int]]:
    """Return the columns' numbers in as few rows as possible, of about equal width."""
    for count in range(1, len(widths) + 1):
        share = (sum(widths) + _GAP * len(widths)) / count
        # 10 % over the average lets rows become equal; where they do not fit so, they may be as wide as the room.
        for limit in (min(room, share * 1.1), room):
            rows = _in_rows(widths, limit)
            if len(rows) <= count:
                return rows
    # No row is wider than ``room``, unless a single column is.
    return _in_rows(widths, room)


def _in_rows(widths: Sequence[float], room: float) -> list[list[int]]:
    """Return the numbers of the columns in rows, each with as many columns as ``room`` takes, and at least one."""
    rows: list[list[int]] = []
    used = 0.0
    for column, width in enumerate(widths):
        if not rows or used + _GAP + width > room:
            rows.append([])
            used = -_GAP  # no gap before the first column
        rows[-1].append(column)
        used += _GAP + width
    return rows


def _letter(column: int, letters: dict[tuple[int, Key], str]) -> str:
    """Return the next free letter, or a number after "z", for a line that first enters another row in ``column``."""
    number = sum(other == column for other, _ in letters)
    return "abcdefghijklmnopqrstuvwxyz"[number] if number < 26 else str(number + 1)
