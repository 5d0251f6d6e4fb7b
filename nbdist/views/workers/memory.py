"""Shows the results of `%dist_memory` and `%dist_free`: each worker's memory, its uses, and the names that hold it."""

from __future__ import annotations

from collections.abc import Container
from html import escape

from nbdist.amounts import counted, size
from nbdist.cluster.inspection.holdings import Holdings, WorkerMemory
from nbdist.cluster.output.arranger import say_members
from nbdist.views import tables
from nbdist.views.drawing.pictures import themed
from nbdist.views.workers.memory_rows import Look, Row, compare, first_names, fold, rows_of, split

_ROWS_SHOWN = 1000  # of a table
_SINCE = "since last look"
# Explanations of two columns, printed below the tables.
_REST = (
    "not accounted for: the interpreter, torch, and what allocators keep; in brackets, what the worker used when it "
    "had started"
)
_SHARED = (
    "shared memory: blocks in which values went to other workers, which count them too, and blocks that are kept for "
    "the next messages"
)


class MemoryTable:
    """The result of `%dist_memory`: a table of the workers, and a table of the objects that take the memory."""

    def __init__(
        self,
        found: Holdings,
        last: Look | None = None,
        workers: Container[str] | None = None,
        *,
        unfolded: bool = False,
    ) -> None:
        """Make the table of the report ``found`` for the named ``workers`` (None for all).

        With ``last``, the amounts of an earlier report, the table shows the growth since then. Unless ``unfolded``,
        equal objects share a row, and so do small ones.
        """
        self.found = found
        self.look = Look.at(found, last)  # with which the next look is compared
        self._last = last
        self._workers = [memory for memory in found.workers if workers is None or memory.name in workers]
        self._splits = [split(memory) for memory in self._workers]
        every = compare(rows_of(found, workers), last)
        self._idle = [row for row in every if row.idle]
        self._items = every if unfolded else fold(every)

    # -- the workers ------------------------------------------------------------------------------

    def _totals(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of the table of workers. Columns that would be empty are left out."""
        contexts = "contexts" if any(each.parts["contexts"] for each in self._splits) else ""
        parts = {"references": "by reference", "contexts": contexts, "variables": "variables"}
        head = ["worker", "memory", _SINCE if self._last is not None else ""]
        head += [*parts.values(), "shared memory" if any(each.shared for each in self._splits) else ""]
        has_gpus = any(memory.gpu_taken for memory in self._workers) or any(each.gpu for each in self._splits)
        head += ["not accounted for", "GPU" if has_gpus else ""]
        rows = []
        for memory, each in zip(self._workers, self._splits, strict=True):
            known = [_bytes(each.total), self._growth_text(memory, each.total)]
            known += [size(each.parts[kind]) for kind in parts]
            # In brackets, the whole process at its start; and of the GPU, the bytes that torch has reserved there.
            start = f" ({size(memory.started_with)} at start)" if memory.started_with is not None else ""
            known += [_bytes(each.shared), f"{size(each.rest)}{start}" if each.rest is not None else ""]
            known += [size(each.gpu) + (f" of {size(memory.gpu_taken)}" if memory.gpu_taken is not None else "")]
            rows.append([memory.name, *known])
        used = [number for number, name in enumerate(head) if name]
        return [head[number] for number in used], [[row[number] for number in used] for row in rows]

    def _growth_text(self, memory: WorkerMemory, total: int | None) -> str:
        """Return as text by how many bytes a worker has grown to ``total`` since the last report, if that is known."""
        if self._last is None:
            return ""
        if self._last.is_restarted(memory):
            return "started anew"
        return _signed(self._last.growth(memory, total) or 0)

    # -- the objects --------------------------------------------------------------------------------

    def _objects(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of the table of objects."""
        has_gpus = any(row.gpu for row in self._items)
        amounts = ["bytes", *(["on GPU"] if has_gpus else []), *([_SINCE] if self._last is not None else [])]
        rows = []
        for row in self._items[:_ROWS_SHOWN]:
            cells = [say_members(row.workers), row.kind, row.what, _amount(row, row.nbytes)]
            cells += [_amount(row, row.gpu) if row.gpu else ""] if has_gpus else []
            cells += [_growth(row)] if self._last is not None else []
            rows.append([*cells, _names_that_hold(row)])
        return ["worker", "counted as", "what", *amounts, "held by"], rows

    def _foot(self) -> list[str]:
        """Return the lines below the tables: how much is left out, and which objects could be freed."""
        lines = []
        if len(self._items) > _ROWS_SHOWN:
            lines.append(f"… and {len(self._items) - _ROWS_SHOWN:,} more")
        if self._idle:
            nbytes = size(sum(row.amount for row in self._idle))
            lines.append(
                f"{len(self._idle)} of these, {nbytes}, are held only by Out, _ and tracebacks: %dist_free drops them"
            )
        lines += [
            f"{memory.name}: {size(each.absent)} of what was counted are not in its own memory: never written to, or "
            "shared with other processes"
            for memory, each in zip(self._workers, self._splits, strict=True)
            if each.absent > _ABSENT_BYTES_NOTED and each.total is not None
        ]
        if any(row.is_partial for row in self._items):
            lines.append("at least: there were more objects than a look visits, or they changed meanwhile")
        if any(row.count > 1 or len(row.workers) > 1 for row in self._items):
            lines.append("rows are put together: %dist_memory -v, or %dist_memory worker1, shows each")
        return lines + _line_of_silent(self.found)

    def _explained(self) -> list[str]:
        return [_REST, *([_SHARED] if any(each.shared for each in self._splits) else [])]

    def __repr__(self) -> str:
        lines = tables.as_lines(*self._totals())
        if self._items:
            lines += ["", *tables.as_lines(*self._objects())]
        return "\n".join([*lines, "", *self._foot(), *self._explained()])

    def _repr_html_(self) -> str:
        faint = [number for number, row in enumerate(self._items) if row.idle]
        parts = [tables.as_html(*self._totals())]
        if self._items:
            parts.append(tables.as_html(*self._objects(), faint))
        parts += [f'<div style="overflow-wrap:anywhere">{escape(line)}</div>' for line in self._foot()]
        parts += [f'<div style="opacity:.6">{escape(line)}</div>' for line in self._explained()]
        return themed(*parts)


class FreedTable:
    """The result of `%dist_free`: the references that it has dropped."""

    def __init__(self, found: Holdings) -> None:
        self.found = found

    def _head(self) -> str:
        if not self.found.items:
            return "Nothing was dropped: no reference is held only by Out, _ and tracebacks."
        totals: dict[str, int] = {}
        for item in self.found.items:
            totals[item.worker] = totals.get(item.worker, 0) + (item.nbytes or 0) + item.gpu
        told = ", ".join(f"{size(nbytes)} on {worker}" for worker, nbytes in totals.items())
        return f"Dropped {counted(len(self.found.items), 'reference')}: {told}."

    def _rows(self) -> list[list[str]]:
        rows = [row for row in rows_of(self.found) if row.kind == "reference"]
        return [
            [say_members(row.workers), row.what, _amount(row, row.nbytes), _names_that_hold(row)] for row in fold(rows)
        ]

    def __repr__(self) -> str:
        lines = tables.as_lines(_FREED, self._rows()) if self.found.items else []
        return "\n".join([self._head(), *lines, *_line_of_silent(self.found)])

    def _repr_html_(self) -> str:
        table = tables.as_html(_FREED, self._rows()) if self.found.items else ""
        foot = "".join(f"<div>{escape(line)}</div>" for line in _line_of_silent(self.found))
        return themed(f"<div>{escape(self._head())}</div>", table, foot)


_FREED = ("worker", "what", "bytes", "held by")
_ABSENT_BYTES_NOTED = 1_000_000  # of counted memory that is not the worker's own: a line mentions these or more


def _line_of_silent(found: Holdings) -> list[str]:
    return [f"{', '.join(found.silent)} did not answer"] if found.silent else []


def _bytes(nbytes: int | None) -> str:
    return size(nbytes) if nbytes is not None else ""


def _signed(grown: int) -> str:
    """Return a change of bytes with its sign; nothing for no change."""
    return f"{'+' if grown > 0 else '-'}{size(abs(grown))}" if grown else ""


def _amount(row: Row, nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    each = " each" if len(row.workers) > 1 else ""
    return f"{'at least ' if row.is_partial else ''}{size(nbytes)}{each}"


def _growth(row: Row) -> str:
    if row.new and row.count == 1:
        return "new"
    return _signed(row.grown) + (f", {row.new} new" if row.new else "")


def _names_that_hold(row: Row) -> str:
    """Return the names that keep a row's objects alive, and where in a variable most of the bytes are, as text."""
    if row.kind == "variable":
        told = ", ".join(name for _, names in row.held for name in first_names(names))
        return f"{told}; mostly {row.main_part}" if row.main_part else told
    own = row.workers[0] if len(row.workers) == 1 else "each"
    return "; ".join(f"{worker or own}: {', '.join(first_names(names))}" for worker, names in row.held)
