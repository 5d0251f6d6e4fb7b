"""Shows the result of `%dist_diff`: whether a value is equal on all workers, and where and by how much it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nbdist.amounts import plural
from nbdist.cluster.examination.code_facts import CodeFacts
from nbdist.cluster.examination.code_remarks import remarks_on
from nbdist.cluster.inspection.comparing import Difference
from nbdist.cluster.output.arranger import say_members, say_names
from nbdist.views import tables
from nbdist.views.drawing.pictures import themed


@dataclass(repr=False, eq=False)
class DiffTable:
    """The result of a comparison, as text and as a table. Its truth value: whether the value is equal everywhere."""

    name: str  # of the variable
    workers: Sequence[str]  # whose values were compared
    differences: Sequence[Difference]
    differing: int  # parts that are not equal everywhere; `differences` may name fewer
    parts: int  # that were compared, such as the tensors of a state dict
    sharded: int  # parts of which workers hold different shards

    def __bool__(self) -> bool:
        return not self.differing

    def _head(self) -> str:
        where = f"{len(self.workers)} workers" if len(self.workers) != 1 else self.workers[0]
        parts = f" ({self.parts} parts)" if self.parts > 1 else ""
        told = f"{self.name} is equal on {where}{parts}"
        if self.differing:
            told = f"{self.name} differs: {self.differing} of {self.parts} parts"
            odd = {each.workers for each in self.differences}
            if len(self.workers) == 2:
                told += f", from {self.workers[0]}'s"
            elif len(odd) == 1 and all(each.is_odd for each in self.differences):
                told += f"; {say_names(names := odd.pop())} {plural(len(names), 'differs', 'differ')} from the others"
        if self.sharded:
            told += f"; numbers of {self.sharded} sharded DTensors are compared only where workers hold the same shard"
        return told

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(each.path, say_names(each.workers), each.told) for each in self.differences if each.told]

    def __repr__(self) -> str:
        return "\n".join([self._head(), *(f"  {self.name}{path} on {who}: {told}" for path, who, told in self._rows())])

    def _repr_html_(self) -> str:
        if not self.differing:
            return themed(escape(self._head()))
        table = tables.as_html(("part", "worker", "difference"), self._rows())
        return themed(f"<div>{escape(self._head())}</div>", table)


def say_code(asked: Sequence[str], workers: Mapping[str, CodeFacts], notebook: Mapping[str, CodeFacts]) -> str:
    """Return the result of `%dist_diff --code` as text: a line for each remark on the facts about these members."""
    remarks = [f"  {told}" for told, _ in remarks_on(workers, notebook)]
    lines = [f"code of {say_members([*notebook, *workers])}{'' if remarks else ': nothing differs'}", *remarks]
    return "\n".join([*lines, *(f"  no answer from {name}" for name in asked if name not in workers)])
