"""Defines ipyparallel's views, which present some workers as one object: push, pull, scatter, gather, calls and maps.

The views contain little code: variables go through `Cluster.push` and `Cluster.pull`, code through `Cluster.execute`,
and functions through `Cluster.executor`, which calls one function at a time on each worker.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.executor import Task, WorkerExecutor
from nbdist.compat.ipyparallel import tasks
from nbdist.compat.ipyparallel.closed import Closed
from nbdist.compat.ipyparallel.results import AsyncResult, wait_for


class View(Closed):
    """Calls functions on some workers. `Client` and ``cluster.view()`` make views.

    ``notebooks/10_from_ipyparallel.ipynb`` shows them.
    """

    _balanced = False  # True if each task goes to one worker, the first free one

    def __init__(
        self, cluster: Cluster, targets: Sequence[int] | None, *, single: bool = False, block: bool = False
    ) -> None:
        """Make a view of the workers with the ranks ``targets``; None for all workers, also those that join later.

        With ``single``, a call has one value instead of a list of one value. ``block`` says whether `apply` and `map`
        wait for their values.
        """
        self.cluster, self._targets, self.block, self._single = cluster, targets, block, single or self._balanced

    @property
    def targets(self) -> Sequence[int]:
        """The ranks of the view's workers. A view of all workers has more once others have joined."""
        return [worker.rank for worker in self.cluster.workers] if self._targets is None else self._targets

    @property
    def _executors(self) -> list[WorkerExecutor]:
        return [self.cluster.executor(each) for each in ([self._targets] if self._balanced else self.targets)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.targets}>"

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self.targets)

    def _submit(self, calls: Sequence[tuple[Any, ...]], **shape: bool) -> AsyncResult:
        """Submit calls, each a tuple of a function and its arguments; return one handle for all of them."""
        # A direct view has an executor for each worker, a load balanced view one for all, which picks a free worker.
        turns = zip(itertools.cycle(self._executors), calls, strict=False)
        return AsyncResult([executor.submit(*call) for executor, call in turns], **shape)

    def _unwrap(self, result: AsyncResult, block: bool | None = None) -> Any:
        return result.get() if (self.block if block is None else block) else result

    def apply_async(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function on each worker (of a load balanced view, on the first free one); return the handle.

        The function's error comes from the handle.
        """
        return self._submit([(tasks.call, function, args, kwargs)] * len(self._executors), single=self._single)

    def map_async(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> AsyncResult:
        """Call a function for each item of the sequences, like Python's `map`; return the handle of all values.

        A direct view gives each worker one part of the items. A load balanced view makes tasks of at most ``chunksize``
        items, or of 1 item without it.
        """
        rows = list(zip(*sequences, strict=False))
        count = -(-len(rows) // (chunksize or 1)) if self._balanced else len(self)  # -(-a // b) is a / b rounded up
        parts = [part for part in _parts(rows, max(1, count)) if part]
        return self._submit([(tasks.call_each, function, part) for part in parts], chunks=True)

    def apply(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function as `apply_async` does; return the value if the view's `block` is True, else the handle.

        If it waits, it raises the function's error.
        """
        return self._unwrap(self.apply_async(function, *args, **kwargs))

    def apply_sync(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function as `apply_async` does, wait, and return the value. Raises the function's error."""
        return self.apply_async(function, *args, **kwargs).get()

    def map(self, function: Any, /, *sequences: Any, chunksize: int | None = None, block: bool | None = None) -> Any:
        """Map a function as `map_async` does; return the values if ``block``, or the view's `block`, is True.

        Otherwise, return the handle.
        """
        return self._unwrap(self.map_async(function, *sequences, chunksize=chunksize), block)

    def map_sync(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> list[Any]:
        """Map a function as `map_async` does, wait, and return the list of values. Raises the function's error."""
        return list(self.map_async(function, *sequences, chunksize=chunksize))

    def imap(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> Iterator[Any]:
        """Map a function as `map_async` does, and yield the values in order, each as soon as it has arrived.

        Raises the function's error instead of the value.
        """
        return iter(self.map_async(function, *sequences, chunksize=chunksize))

    def parallel(self, block: bool | None = None, chunksize: int | None = None) -> Callable[[Any], Any]:
        """Return a decorator: calling the new function with sequences calls the old one for each item, as `map` does.

        The new function has an attribute ``map``, which is itself. ``block`` and ``chunksize`` are as for `map`.
        """

        def decorate(function: Any) -> Any:
            mapped = functools.partial(self.map, function, chunksize=chunksize, block=block)
            mapped.map = mapped  # type: ignore[attr-defined]
            return mapped

        return decorate

    def remote(self, block: bool | None = None) -> Callable[[Any], Any]:
        """Return a decorator: calling the new function calls the old one on the view's workers, as `apply` does.

        ``block`` says whether such a call waits and returns the value; by default, the view's `block` says so.
        """
        return lambda function: lambda *args, **kwargs: self._unwrap(self.apply_async(function, *args, **kwargs), block)

    wait = staticmethod(wait_for)

    @property
    def executor(self) -> ViewExecutor:
        """This view as an executor, in the sense of `concurrent.futures`."""
        return ViewExecutor(self)


class DirectView(View):
    """Gives each task to all of its workers. The value of a call is the list of the workers' values, by rank.

    `push`, `pull`, `scatter` and `gather` always wait. They return the value if ``block``, or else the view's `block`,
    is True; otherwise a handle that is done. `pull` and `gather` raise NameError for a variable that a worker lacks.

    ``notebooks/10_from_ipyparallel.ipynb`` shows it.
    """

    def execute(self, code: str, *, silent: bool = False, block: bool | None = None) -> AsyncResult:
        """Run code as a cell; return a handle, whose value is None. ``silent`` hides the value of the last expression.

        If ``block``, or else the view's `block`, is True, this waits, and raises CellError if the cell fails.
        Otherwise, the handle raises the error.
        """
        cell = self.cluster.execute(code, self.targets, block=self.block if block is None else block, quiet=silent)
        task = Task()
        cell.when_done(lambda: task.settle(error=cell.error()))
        return AsyncResult([task], single=True)

    def run(self, filename: str, *, block: bool | None = None) -> AsyncResult:
        """Run a Python file of the notebook's machine as a cell; return its handle, as `execute` does.

        Raises OSError if the file cannot be read.
        """
        return self.execute(Path(filename).read_text(), block=block)

    def _wrap(self, value: Any, block: bool | None) -> Any:
        task = Task()
        task.settle(value)
        return self._unwrap(AsyncResult([task], single=True), block)

    def push(self, variables: Mapping[str, Any], *, block: bool | None = None) -> Any:
        """Set variables on each worker, after the cells that were sent before.

        Raises UsageError for a name that is no identifier, EncodeError for a value that cannot be sent, WorkerLost
        if a worker is dead.
        """
        self.cluster.push(variables, self.targets)
        return self._wrap(None, block)

    def pull(self, names: str | Sequence[str], *, block: bool | None = None) -> Any:
        """Fetch variables from each worker: a name gives its value, several names give a list.

        The value is a list by worker; of a view of one rank, the one value.
        """
        found = self.cluster.pull(names, self.targets[0] if self._single else self.targets)
        if not isinstance(names, str):
            found = [list(each.values()) for each in found] if isinstance(found, list) else list(found.values())
        return self._wrap(found, block)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable on each worker, and wait, as `push` does: ``view["x"] = 1``."""
        self.push({name: value}, block=True)

    def __getitem__(self, name: str) -> Any:
        """Fetch a variable from each worker: ``view["x"]``. Return their list; of a view of one rank, the one value."""
        return self.pull(name, block=True)

    def scatter(self, name: str, values: Any, *, flatten: bool = False, block: bool | None = None) -> Any:
        """Cut a sequence into one part for each worker, and set the variable ``name`` to the worker's part.

        With ``flatten``, a part with only one item is replaced by the item. A worker gets an empty part if there are
        fewer items than workers. Raises the errors of `push`.
        """
        for number, part in zip(targets := self.targets, _parts(values, len(targets)), strict=True):
            self.cluster.push({name: part[0] if flatten and len(part) == 1 else part}, number)
        return self._wrap(None, block)

    def gather(self, name: str, *, block: bool | None = None) -> Any:
        """Fetch a variable from each worker and join the parts, as the opposite of `scatter`."""
        return self._wrap(self[name] if self._single else _joined(self[name]), block)

    def activate(self, suffix: str = "") -> DirectView:
        """Make ``%px`` run code on this view's workers; with a suffix "0", the magic is ``%px0``. Returns the view."""
        from nbdist.compat.ipyparallel.px import activate

        activate("all" if self._targets is None else ",".join(map(str, self._targets)), suffix)
        return self

    def use_dill(self) -> None:
        """Do nothing, because cloudpickle sends functions with the variables that they close over anyway."""

    use_cloudpickle = use_dill


class LoadBalancedView(View):
    """Gives each task to one worker: the first of its workers that is free."""

    _balanced = True


class ViewExecutor(Executor):
    """Makes a view usable by programs that take an executor of `concurrent.futures`."""

    def __init__(self, view: View) -> None:
        self.view = view

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function on the view's workers; return at once the handle, a future, which raises its error.

        On a direct view, its result is the list of the workers' values; on a load balanced one, the one value.
        """
        return self.view.apply_async(function, *args, **kwargs)

    def map(self, function: Any, /, *sequences: Any, timeout: float | None = None, chunksize: int = 1) -> Iterator[Any]:
        """Submit a function for each item of the sequences at once; return an iterator of the values, in order.

        The iterator raises the function's error. With ``timeout``, this waits for all values first, and raises
        TimeoutError after so many seconds. ``chunksize`` is as for `View.map_async`.
        """
        result = self.view.map_async(function, *sequences, chunksize=chunksize)
        return iter(result if timeout is None else result.get(timeout))


def _parts(values: Any, count: int) -> list[Any]:
    """Cut a sequence, array or tensor into ``count`` slices, in order, whose lengths differ by at most one."""
    size, more = divmod(len(values), count)
    ends = [size * part + min(part, more) for part in range(count + 1)]
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _joined(parts: Sequence[Any]) -> Any:
    """Join the parts of a sequence, array or tensor; if the parts are single values, return the list of them."""
    first = parts[0]
    if isinstance(first, Sequence):
        return [value for part in parts for value in part]
    if not getattr(first, "ndim", 0):
        return list(parts)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    import numpy

    return numpy.concatenate(parts)
