"""What `%dist_diff` shows: whether a value is the same on all workers, or where it first differs and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbdist.cluster.comparing import Difference
from nbdist.pictures import themed
from nbdist.views import tables

__all__ = ["DiffTable"]


class DiffTable:
    """The answer, as text and as a table."""

    def __init__(
        self, name: str, workers: Sequence[str], found: Sequence[Difference], differing: int, parts: int
    ) -> None:
        self.name = name
        self.workers = list(workers)
        self.differences = list(found)
        self.differing = differing
        """How many parts are not the same everywhere,"""
        self.parts = parts
        """of so many."""

    @property
    def equal(self) -> bool:
        """Whether it is the same everywhere."""
        return not self.differing

    def __bool__(self) -> bool:
        return self.equal

    def _head(self) -> str:
        where = f"{len(self.workers)} workers" if len(self.workers) != 1 else self.workers[0]
        parts = f" ({self.parts} parts)" if self.parts > 1 else ""
        if self.equal:
            return f"{self.name} is equal on {where}{parts}"
        return f"{self.name} differs: {self.differing} of {self.parts} parts, from {self.workers[0]}'s"

    def __repr__(self) -> str:
        lines = [self._head()]
        lines += [f"  {self.name}{each.path} on {each.worker}: {each.told}" for each in self.differences]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if self.equal:
            return themed(escape(self._head()))
        rows = [(each.path, each.worker, each.told) for each in self.differences]
        return themed(f"<div>{escape(self._head())}</div>", tables.as_html(("part", "worker", "difference"), rows))
