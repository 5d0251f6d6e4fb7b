"""Puts the boxes of a diagram into columns, the forward pass from left to right, with few crossings of lines.

A box is one column to the right of the last box from which a line leads to it. A box to which no line leads is one
column to the left of its first user. Boxes that are folded by distance are in the columns of `Diagram.ranks`. A line
across several columns has a narrow place of its own in each of them, so it passes boxes and does not cross them. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nbdist.autograd.graph.events import Key
from nbdist.cluster.output.arranger import grouped
from nbdist.views.drawing.folding import Box, Diagram

BOX = 22  # the height of a box
ROW = BOX + 6  # the height of a box with the gap below it
_PASSING_LINE_HEIGHT = 9  # of the place of a line that passes a column

# Operations that only prepare a parameter for its use; they hang below the operation that uses it.
_VIEWS = ("T", "Transpose", "Permute", "View", "Unsqueeze", "ToCopy")


@dataclass(eq=False)
class Item:
    """An item in a column of a lane: a box with the boxes that hang below it, or the place of a line that passes."""

    lane: str
    column: int
    order: float  # the rank among the items of its column and lane, from top to bottom
    boxes: list[tuple[Box, int]]  # top down, each with its depth of indentation; none for a line that passes
    before: list[Item] = field(default_factory=list)
    after: list[Item] = field(default_factory=list)
    y: float = 0.0  # the distance from the top of the lane

    @property
    def height(self) -> float:
        """The height of the item."""
        return ROW * len(self.boxes) if self.boxes else _PASSING_LINE_HEIGHT

    @property
    def port(self) -> float:
        """The distance from the top of the item to the point where lines come in."""
        return BOX / 2 if self.boxes else _PASSING_LINE_HEIGHT / 2


class Columns:
    """The boxes of a diagram in columns, and the lines that pass them."""

    def __init__(self, diagram: Diagram) -> None:
        self._diagram = diagram
        self.workers = list(diagram.boxes)  # their lanes are from top to bottom in this order
        self._boxes = {box.key: box for boxes in diagram.boxes.values() for box in boxes}
        self._sources: dict[Key, list[Key]] = {key: [] for key in self._boxes}
        self._targets: dict[Key, list[Key]] = {key: [] for key in self._boxes}
        for line in diagram.lines:
            self._sources[line.target].append(line.source)
            self._targets[line.source].append(line.target)
        self._hosts = self._find_hosts()
        # By their topmost box. The column of each is set later.
        self.items = {key: Item(key[0], 0, 0.0, list(self._pile(key))) for key in self._boxes if key not in self._hosts}
        self._passing: dict[Key, list[Item]] = {}
        self._set_columns()
        self._join()

    # -- boxes that hang below others ---------------------------------------------------------

    def _find_hosts(self) -> dict[Key, Key]:
        """Return, for each box that is drawn below another one, that other box."""
        # A leaf hangs below the operation that uses it first, and so do some operations on one leaf alone.
        rank = {key: number for number, key in enumerate(self._sorted())}
        sent = {line.source for line in self._diagram.lines if line.edges}
        leaves = {key: None for key, box in self._boxes.items() if box.kind == "leaf" and key not in sent}
        of_leaf = {
            key
            for key, box in self._boxes.items()
            if box.kind == "operation" and key not in sent and len(self._targets[key]) == 1 == len(self._sources[key])
            if self._sources[key][0] in leaves
        }
        aside = {*leaves, *of_leaf}
        hosts: dict[Key, Key] = {}
        for key in of_leaf:
            (user,) = self._targets[key]
            if self._boxes[key].name in _VIEWS or not aside.issuperset(self._sources[user]):
                hosts[key] = user
        for leaf in leaves:
            if users := [key for key in self._targets[leaf] if key[0] == leaf[0]]:
                # A user that hangs itself stands where its host stands.
                hosts[leaf] = min(users, key=lambda user: rank[hosts.get(user) or user])
        return hosts

    def _sorted(self) -> list[Key]:
        """Return the boxes, each after the boxes from which lines lead to it, as far as that is possible."""
        missing = {key: len(sources) for key, sources in self._sources.items()}
        ready = [key for key, count in missing.items() if not count][::-1]
        found: list[Key] = []
        while ready:
            key = ready.pop()
            found.append(key)
            for target in self._targets[key]:
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)
        return found + [key for key, count in missing.items() if count]  # the latter in circles

    def root(self, key: Key) -> Key:
        """Return the topmost box of the pile in which a box hangs; the box itself if it hangs below none."""
        while key in self._hosts:
            key = self._hosts[key]
        return key

    def _pile(self, key: Key, depth: int = 0) -> Iterator[tuple[Box, int]]:
        """Yield a box and all boxes that hang below it, top down, each with its depth of indentation."""
        yield self._boxes[key], depth
        for source in dict.fromkeys(self._sources[key]):
            if self._hosts.get(source) == key:
                yield from self._pile(source, depth + 1)

    # -- columns and the order in them --------------------------------------------------------

    def _links(self) -> dict[Key, set[Key]]:
        """Return, for each box that does not hang below another one, the boxes that must be in an earlier column."""
        found: dict[Key, set[Key]] = {key: set() for key in self.items}
        for line in self._diagram.lines:
            source, target = self.root(line.source), self.root(line.target)
            if source != target:
                found[target].add(source)
        for boxes in self._diagram.boxes.values() if self._diagram.in_order else ():
            for one, other in itertools.pairwise(boxes):
                found[other.key].add(one.key)
        return found

    def _set_columns(self) -> None:
        """Set the column of each item: by `Diagram.ranks`, or without ranks by the longest path to it, in boxes."""
        before = self._links()
        if (ranks := self._diagram.ranks) is not None:
            # Ranks that no item has get no column.
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
        """Make the items by which lines pass columns, and connect the items of neighbouring columns."""
        # All lines from one box share such an item in each column that they pass, up to the farthest target.
        far: dict[Key, int] = {}
        for line in self._diagram.lines:
            target = self.items[self.root(line.target)]
            far[line.source] = max(far.get(line.source, 0), target.column)
        for key, column in far.items():
            item = self.items[self.root(key)]
            self._passing[key] = [Item(item.lane, number, item.order, []) for number in range(item.column + 1, column)]
        for line in self._diagram.lines:
            source, target = self.items[self.root(line.source)], self.items[self.root(line.target)]
            if source is target:
                continue
            way = [source, *self.places_between(line.source, target), target]
            for one, other in itertools.pairwise(way):
                if other not in one.after:
                    one.after.append(other)
                    other.before.append(one)

    def places_between(self, source: Key, target: Item) -> list[Item]:
        """Return the items by which a line from ``source`` passes the columns before ``target``, from left to right."""
        return [each for each in self._passing[source] if each.column < target.column]

    def cells(self) -> dict[tuple[int, str], list[Item]]:
        """Return the items of each column and lane from top to bottom, ordered so that few lines cross."""
        # Each sweep over the columns, forth and back, sorts each item beside the items that it is connected with.
        everything = [*self.items.values(), *(each for row in self._passing.values() for each in row)]
        in_order = sorted(everything, key=lambda item: item.order)
        cells = grouped(in_order, lambda item: (item.column, item.lane))
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


def _set_order(cell: Sequence[Item]) -> None:
    for number, item in enumerate(cell):
        item.order = float(number)


def _pull(item: Item, others: Sequence[Item], lane: dict[str, int]) -> float:
    """Return the `order` at which an item would be beside ``others``: the items connected with it at one side."""
    if own := [other.order for other in others if other.lane == item.lane]:
        return sum(own) / len(own)
    if others:
        # Connected with other lanes only: to the top if that lane is above, else where the item is.
        return -0.5 if lane[others[0].lane] < lane[item.lane] else item.order + 0.25
    return item.order
