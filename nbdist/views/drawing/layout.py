"""Places the boxes and lines of a diagram: a lane for each worker, the forward pass from left to right.

::

    worker0   [x]---\\                 /--[receive]--[Mul]       a parameter hangs below the operation that uses it;
    ----------------- \\ ------------ / --------- [ w ]          a wider diagram continues in another row of lanes
    worker1            [receive]--[Exp]

A box is one column to the right of the last box from which a line leads to it. A box to which no line leads is one
column to the left of its first user. Boxes that are folded by distance are in the columns of `Diagram.ranks`. A line
across several columns has a narrow place of its own in each of them, so it passes boxes and does not cross them. All
lengths are in pixels. Pure: numbers in, numbers out. The steps of `_Making`, in this order:

=============== =====================================================================================
_hosts          which boxes hang below others
_set_columns    the column of each box
_join           the places of lines in the columns that they pass
_cells          the order in each column of a lane, with few crossings
lay_out         coordinates of boxes and lanes, in rows that are not too wide
_route          the strokes of lines, with letters where a line continues in another row
=============== =====================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nbdist.autograd.graph.events import Key
from nbdist.views.drawing.folding import Box, Diagram

__all__ = ["BOX", "Lane", "Layout", "BreakMark", "NodePlace", "Point", "lay_out"]

BOX = 22
"""The height of a box."""
_ROW = BOX + 6
"""The height of a box with the gap below it."""
_PASSING_LINE_HEIGHT = 9
"""The height of the place of a line that passes a column."""
_GAP = 22
"""The gap between two columns, in which lines have their curves."""
_INDENT = 12
"""The indentation of a box that hangs below another one."""
_MARGIN = 7
"""The margin above and below the boxes of a lane."""
_BETWEEN = 12
"""The gap between two rows of lanes."""
_RIGHT = 16
"""The margin right of the last column; a line that continues in the next row of lanes has its letter there."""

_VIEWS = ("T", "Transpose", "Permute", "View", "Unsqueeze", "ToCopy")
"""Operations that only prepare a parameter for its use; they hang below the operation that uses it."""

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
    letters: str
    """One letter for each line."""


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


@dataclass(eq=False)
class _Item:
    """An item in a column of a lane: a box with the boxes that hang below it, or the place of a line that passes."""

    lane: str
    column: int
    order: float
    """The rank among the items of its column and lane, from top to bottom."""
    boxes: list[tuple[Box, int]]
    """The boxes from top to bottom, each with its depth of indentation; none for a line that passes."""
    before: list[_Item] = field(default_factory=list)
    after: list[_Item] = field(default_factory=list)
    y: float = 0.0
    """The distance from the top of the lane."""

    @property
    def height(self) -> float:
        """The height of the item."""
        return _ROW * len(self.boxes) if self.boxes else _PASSING_LINE_HEIGHT

    @property
    def port(self) -> float:
        """The distance from the top of the item to the point where lines come in."""
        return BOX / 2 if self.boxes else _PASSING_LINE_HEIGHT / 2


def lay_out(diagram: Diagram, width_of: Callable[[Box], float], left: float, widest: float) -> Layout:
    """Return the places of a diagram's boxes and lines, in pixels.

    The first column begins at ``left``. The diagram is at most ``widest`` wide, unless a single column is wider: it
    continues in another row of lanes below.
    """
    return _Making(diagram, width_of).lay_out(left, widest)


class _Making:
    """One layout while it is made."""

    def __init__(self, diagram: Diagram, width_of: Callable[[Box], float]) -> None:
        self.diagram = diagram
        self.width_of = width_of
        self.workers = list(diagram.boxes)
        self.boxes = {box.key: box for boxes in diagram.boxes.values() for box in boxes}
        self.sources: dict[Key, list[Key]] = {key: [] for key in self.boxes}
        self.targets: dict[Key, list[Key]] = {key: [] for key in self.boxes}
        for line in diagram.lines:
            self.sources[line.target].append(line.source)
            self.targets[line.source].append(line.target)
        self.hosts = self._hosts()
        self.items = {key: self._item(key) for key in self.boxes if key not in self.hosts}
        self.passing: dict[Key, list[_Item]] = {}
        self._set_columns()
        self._join()

    # -- boxes that hang below others ---------------------------------------------------------

    def _hosts(self) -> dict[Key, Key]:
        """Return, for each box that is drawn below another one, that other box.

        Leaves are drawn below the operation that uses them first, as are some operations on one leaf alone.
        """
        rank = {key: number for number, key in enumerate(self._sorted())}
        sent = {line.source for line in self.diagram.lines if line.edges}
        leaves = {key: None for key, box in self.boxes.items() if box.kind == "leaf" and key not in sent}
        of_leaf = {
            key
            for key, box in self.boxes.items()
            if box.kind == "operation" and key not in sent and len(self.targets[key]) == 1 == len(self.sources[key])
            if self.sources[key][0] in leaves
        }
        hosts: dict[Key, Key] = {}
        for key in of_leaf:
            (user,) = self.targets[key]
            if self.boxes[key].name in _VIEWS or any(
                other not in leaves and other not in of_leaf for other in self.sources[user]
            ):
                hosts[key] = user
        for leaf in leaves:
            users = [key for key in self.targets[leaf] if key[0] == leaf[0]]
            if users:
                hosts[leaf] = min(users, key=lambda user: rank[hosts.get(user) or user])
        return hosts

    def _sorted(self) -> list[Key]:
        """Return the boxes; each comes after the boxes from which lines lead to it, as far as that is possible."""
        missing = {key: len(sources) for key, sources in self.sources.items()}
        ready = [key for key, count in missing.items() if not count][::-1]
        found: list[Key] = []
        while ready:
            key = ready.pop()
            found.append(key)
            for target in self.targets[key]:
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)
        return found + [key for key, count in missing.items() if count]

    def _root(self, key: Key) -> Key:
        """Return the topmost box of the pile in which a box hangs; this may be the box itself."""
        while key in self.hosts:
            key = self.hosts[key]
        return key

    def _item(self, key: Key) -> _Item:
        """Return a new item for the column: a box, with all boxes that hang below it. Its column is not set yet."""
        boxes: list[tuple[Box, int]] = []

        def add(each: Key, depth: int) -> None:
            boxes.append((self.boxes[each], depth))
            for source in dict.fromkeys(self.sources[each]):
                if self.hosts.get(source) == each:
                    add(source, depth + 1)

        add(key, 0)
        return _Item(key[0], 0, 0.0, boxes)

    # -- columns and the order in them --------------------------------------------------------

    def _links(self) -> dict[Key, set[Key]]:
        """Return, for each box that is not drawn below another one, the boxes that must be in an earlier column."""
        found: dict[Key, set[Key]] = {key: set() for key in self.items}
        for line in self.diagram.lines:
            source, target = self._root(line.source), self._root(line.target)
            if source != target:
                found[target].add(source)
        for boxes in self.diagram.boxes.values() if self.diagram.in_order else ():
            for one, other in itertools.pairwise(boxes):
                found[other.key].add(one.key)
        return found

    def _set_columns(self) -> None:
        """Set the column of each item: by `Diagram.ranks`, or without ranks by the longest path to it, in boxes.

        Ranks that no item has get no column. Without ranks, a box to which no line leads is just before its first user.
        """
        before = self._links()
        ranks = self.diagram.ranks
        if ranks is not None:
            used = {rank: number for number, rank in enumerate(sorted({ranks[key] for key in self.items}))}
            columns = {key: used[ranks[key]] for key in self.items}
        else:
            columns = _longest_paths(before)
            for key in self.items:
                users = [columns[other] for other, sources in before.items() if key in sources]
                if users and not before[key]:  # a box to which no line leads is next to its first user
                    columns[key] = max(columns[key], min(users) - 1)
        for number, key in enumerate(self._sorted()):
            if key in self.items:
                self.items[key].column, self.items[key].order = columns[key], float(number)

    def _join(self) -> None:
        """Make the items by which lines pass columns, and connect the items of neighbouring columns.

        All lines from one box share such an item in each column that they pass.
        """
        far: dict[Key, int] = {}
        for line in self.diagram.lines:
            target = self.items[self._root(line.target)]
            far[line.source] = max(far.get(line.source, 0), target.column)
        for key, column in far.items():
            item = self.items[self._root(key)]
            self.passing[key] = [_Item(item.lane, number, item.order, []) for number in range(item.column + 1, column)]
        for line in self.diagram.lines:
            source, target = self.items[self._root(line.source)], self.items[self._root(line.target)]
            if source is target:
                continue
            way = [source, *self._places_between(line.source, target), target]
            for one, other in itertools.pairwise(way):
                if other not in one.after:
                    one.after.append(other)
                    other.before.append(one)

    def _places_between(self, source: Key, target: _Item) -> list[_Item]:
        """Return the items by which a line from ``source`` passes the columns before ``target``, from left to right."""
        return [each for each in self.passing[source] if each.column < target.column]

    def _cells(self) -> dict[tuple[int, str], list[_Item]]:
        """Return the items of each column and lane from top to bottom, ordered so that few lines cross.

        Each sweep over the columns, forth and back, sorts each item beside the items that it is connected with.
        """
        everything = [*self.items.values(), *(each for row in self.passing.values() for each in row)]
        cells: dict[tuple[int, str], list[_Item]] = {}
        for item in sorted(everything, key=lambda item: item.order):
            cells.setdefault((item.column, item.lane), []).append(item)
        lane = {worker: number for number, worker in enumerate(self.workers)}
        for cell in cells.values():
            _set_order(cell)
        for sweep in range(4):
            forth = sweep % 2 == 0
            for column in sorted({column for column, _ in cells}, reverse=not forth):
                for worker in self.workers:
                    cell = cells.get((column, worker), [])
                    cell.sort(key=lambda item: _pull(item, item.before if forth else item.after, lane))
                    _set_order(cell)
        return cells

    # -- places -------------------------------------------------------------------------------

    def lay_out(self, left: float, widest: float) -> Layout:
        """Return the coordinates of boxes, lanes and lines: put columns in rows, and stack items in their columns."""
        cells = self._cells()
        found = Layout()
        count = max((column for column, _ in cells), default=-1) + 1
        widths = [
            max(
                [6.0]
                + [
                    depth * _INDENT + self.width_of(box)
                    for worker in self.workers
                    for item in cells.get((column, worker), [])
                    for box, depth in item.boxes
                ]
            )
            for column in range(count)
        ]
        rows = _rows(widths, widest - left - _RIGHT)
        starts: list[float] = []
        row_of: list[int] = []
        tops: dict[tuple[int, str], float] = {}
        y = 0.0
        for number, columns in enumerate(rows):
            x = left
            for column in columns:
                starts.append(x)
                row_of.append(number)
                x += widths[column] + _GAP
            found.width = max(found.width, x - _GAP + _RIGHT)
            for worker in self.workers:
                stacks = [cells.get((column, worker), []) for column in columns]
                room = max(sum(item.height for item in stack) for stack in stacks)
                if not room:
                    continue
                for stack in stacks:
                    _stack(stack, room)
                tops[number, worker] = y + _MARGIN
                bottom = y + room + 2 * _MARGIN - (_ROW - BOX)
                found.lanes.append(Lane(worker, y, bottom))
                y = bottom
            y += _BETWEEN
        found.height = max(0.0, y - _BETWEEN)
        for item in self.items.values():
            top = tops[row_of[item.column], item.lane] + item.y
            for line, (box, depth) in enumerate(item.boxes):
                x = starts[item.column] + depth * _INDENT
                found.places[box.key] = NodePlace(x, top + line * _ROW, self.width_of(box))
                found.columns[box.key] = item.column
        self._route(found, _Grid(left, starts, widths, row_of, tops))
        return found

    def _route(self, found: Layout, grid: _Grid) -> None:
        """Add to ``found`` the points of every line, and the letters where lines continue in another row."""
        letters: dict[tuple[int, Key], str] = {}
        for number, line in enumerate(self.diagram.lines):
            source, target = self.items[self._root(line.source)], self.items[self._root(line.target)]
            start, end = found.places[line.source], found.places[line.target]
            if source is target:
                found.elbows.add(number)
                found.routes.append(
                    [[(end.x + 6, end.y + end.height), (end.x + 6, start.middle), (start.x, start.middle)]]
                )
                continue
            points = [(start.right, start.middle)]
            strokes = [points]
            column, y = source.column, start.middle
            for item in [*self._places_between(line.source, target), target]:
                points.append((max(points[-1][0], grid.right(column)), y))
                new = end.middle if item is target else grid.top(item) + item.y + item.port
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
        at: dict[Point, list[str]] = {}
        for mark in found.marks:
            at.setdefault((mark.x, mark.y), []).append(mark.letters)
        found.marks = [BreakMark(*place, "".join(sorted(set(letters)))) for place, letters in at.items()]


@dataclass(frozen=True)
class _Grid:
    """The coordinates at which columns and lanes begin."""

    left: float
    starts: list[float]
    widths: list[float]
    row_of: list[int]
    tops: dict[tuple[int, str], float]

    def right(self, column: int) -> float:
        """Return the right edge of a column."""
        return self.starts[column] + self.widths[column]

    def top(self, item: _Item) -> float:
        """Return the top of the lane in which an item is."""
        return self.tops[self.row_of[item.column], item.lane]


def _longest_paths(before: dict[Key, set[Key]]) -> dict[Key, int]:
    """Return for each box the number of boxes on the longest path to it; a cycle is broken where it is entered."""
    found: dict[Key, int] = {}
    entered = set[Key]()
    for start in before:
        stack = [start]
        while stack:
            key = stack[-1]
            missing = [other for other in before[key] if other not in found and other not in entered]
            if key not in found and missing:
                entered.add(key)
                stack += missing
                continue
            stack.pop()
            found.setdefault(key, max((found[other] + 1 for other in before[key] if other in found), default=0))
    return found


def _set_order(cell: Sequence[_Item]) -> None:
    """Set the order of the items of a column in one lane, from top to bottom, to their order in the list."""
    for number, item in enumerate(cell):
        item.order = float(number)


def _pull(item: _Item, others: Sequence[_Item], lane: dict[str, int]) -> float:
    """Return the position at which an item would be beside ``others``: the items connected with it at one side.

    The position is a number that can be compared with the `order` of the other items. ``lane`` has the number of each
    lane, from top to bottom. An item that is connected with other lanes only is put at the top, or where it is.
    """
    own = [other.order for other in others if other.lane == item.lane]
    if own:
        return sum(own) / len(own)
    if others:
        return -0.5 if lane[others[0].lane] < lane[item.lane] else item.order + 0.25
    return item.order


def _stack(cell: Sequence[_Item], room: float) -> None:
    """Set the vertical place of each item of a column in one lane, beside the items to its left if there is room.

    The items keep their order. ``room`` is the lane's height without its margins, in pixels.
    """
    rest = sum(item.height for item in cell)
    free = 0.0
    for item in cell:
        near = [other.y + other.port for other in item.before if other.lane == item.lane]
        wanted = sum(near) / len(near) - item.port if near else free
        item.y = min(max(free, wanted), room - rest)
        free = item.y + item.height
        rest -= item.height


def _rows(widths: Sequence[float], room: float) -> list[list[int]]:
    """Return the numbers of the columns in rows, in as few rows as possible and of about equal width.

    ``widths`` has the width of each column. No row is wider than ``room``, unless a single column is.
    """
    for count in range(1, len(widths) + 1):
        share = (sum(widths) + _GAP * len(widths)) / count
        for limit in (min(room, share * 1.1), room):
            rows = _in_rows(widths, limit)
            if len(rows) <= count:
                return rows
    return _in_rows(widths, room)


def _in_rows(widths: Sequence[float], room: float) -> list[list[int]]:
    """Return the numbers of the columns in rows, each with as many columns as ``room`` takes, and at least one."""
    rows: list[list[int]] = []
    used = 0.0
    for column, width in enumerate(widths):
        if not rows or used + _GAP + width > room:
            rows.append([])
            used = -_GAP
        rows[-1].append(column)
        used += _GAP + width
    return rows


def _letter(column: int, letters: dict[tuple[int, Key], str]) -> str:
    """Return the next free letter for a line that continues in another row, where it first enters ``column``.

    ``letters`` has the letters in use, by column and the box from which the line comes. After "z", numbers follow.
    """
    number = sum(other == column for other, _ in letters)
    return "abcdefghijklmnopqrstuvwxyz"[number] if number < 26 else str(number + 1)
