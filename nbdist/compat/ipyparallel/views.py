"""Shows some workers as one object, as ipyparallel has it: push, pull, scatter and gather, calls, maps.

A thin shell: variables go by `Cluster.push` and `Cluster.pull`, code by `Cluster.execute`, functions by
`Cluster.executor`, which calls one at a time on each worker.
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
from nbdist.cluster.executor import Task
from nbdist.compat.ipyparallel import tasks
from nbdist.compat.ipyparallel.closed import Closed
from nbdist.compat.ipyparallel.results import AsyncResult, wait_for

__all__ = ["DirectView", "LoadBalancedView", "View", "ViewExecutor"]


class View(Closed):
    """Calls functions on some workers.

    ``targets`` are the workers' ranks. With ``single``, the value of a call is one value, and no list of one.
    ``block`` says whether `apply` and `map` wait for their values.
    """

    _balanced = False

    def __init__(self, cluster: Cluster, targets: Sequence[int], *, single: bool = False, block: bool = False) -> None:
        self.cluster, self.targets, self.block, self._single = cluster, targets, block, single or self._balanced
        self._executors = [cluster.executor(each) for each in ([targets] if self._balanced else targets)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.targets}>"

    def __len__(self) -> int:
        return len(self.targets)

    def _submit(self, calls: Sequence[tuple[Any, ...]], **shape: bool) -> AsyncResult:
        """Submit calls, to each executor in turn; return the handle, made as ``shape`` says."""
        turns = zip(itertools.cycle(self._executors), calls, strict=False)
        return AsyncResult([executor.submit(*call) for executor, call in turns], **shape)

    def _unwrap(self, result: AsyncResult, block: bool | None = None) -> Any:
        """Return a handle's value, or the handle, as ``block`` or else the view's `block` says."""
        return result.get() if (self.block if block is None else block) else result

    def apply_async(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function on each worker, or on the first free one of a load balanced view; return the handle."""
        return self._submit([(tasks.call, function, args, kwargs)] * len(self._executors), single=self._single)

    def map_async(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> AsyncResult:
        """Call a function with the items of sequences; return the handle of the values, in order.

        A direct view gives each worker one part of the items. A load balanced view makes a task of at most
        ``chunksize`` items, of 1 without it.
        """
        rows = list(zip(*sequences, strict=False))
        count = -(-len(rows) // (chunksize or 1)) if self._balanced else len(self)  # -(-a // b) is a / b rounded up
        parts = [part for part in _parts(rows, max(1, count)) if part]
        return self._submit([(tasks.call_each, function, part) for part in parts], chunks=True)

    def apply(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function; return what it returns, or the handle, as ``block`` says."""
        return self._unwrap(self.apply_async(function, *args, **kwargs))

    def apply_sync(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and wait for what it returns."""
        return self.apply_async(function, *args, **kwargs).get()

    def map(self, function: Any, /, *sequences: Any, chunksize: int | None = None, block: bool | None = None) -> Any:
        """Call a function with the items of sequences; return what that returns, or the handle, as ``block`` says."""
        return self._unwrap(self.map_async(function, *sequences, chunksize=chunksize), block)

    def map_sync(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> list[Any]:
        """Call a function with the items of sequences, and wait for what that returns."""
        return list(self.map_async(function, *sequences, chunksize=chunksize))

    def imap(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> Iterator[Any]:
        """Yield what a function returns for the items of sequences, in order, each as soon as it is there."""
        return iter(self.map_async(function, *sequences, chunksize=chunksize))

    def parallel(self, block: bool | None = None, chunksize: int | None = None) -> Callable[[Any], Any]:
        """Return a decorator. The new function, and its ``map``, call the old one with the items of sequences."""

        def decorate(function: Any) -> Any:
            mapped = functools.partial(self.map, function, chunksize=chunksize, block=block)
            mapped.map = mapped  # type: ignore[attr-defined]
            return mapped

        return decorate

    def remote(self, block: bool | None = None) -> Callable[[Any], Any]:
        """Return a decorator: the function runs on the view's workers when it is called."""
        return lambda function: lambda *args, **kwargs: self._unwrap(self.apply_async(function, *args, **kwargs), block)

    wait = staticmethod(wait_for)

    @property
    def executor(self) -> ViewExecutor:
        """The view as an executor of `concurrent.futures`."""
        return ViewExecutor(self)


class DirectView(View):
    """Has all its workers do the same. The value of a call is the list of the workers' values, by rank."""

    def execute(self, code: str, *, silent: bool = False, block: bool | None = None) -> AsyncResult:
        """Run code as a cell; return its handle, whose value is None. ``silent`` hides the last expression's value."""
        cell = self.cluster.execute(code, self.targets, block=self.block if block is None else block, quiet=silent)
        task = Task()
        cell.when_done(lambda: task.settle(error=cell.error()))
        return AsyncResult([task], single=True)

    def run(self, filename: str, *, block: bool | None = None) -> AsyncResult:
        """Run a file of the notebook's folder as a cell; return its handle."""
        return self.execute(Path(filename).read_text(), block=block)

    def _wrap(self, value: Any, block: bool | None) -> Any:
        """Return a value that is there already, or its handle, as ``block`` says."""
        task = Task()
        task.settle(value)
        return self._unwrap(AsyncResult([task], single=True), block)

    def push(self, variables: Mapping[str, Any], *, block: bool | None = None) -> Any:
        """Set variables on each worker, after the cells that were sent before. Waits for that in any case."""
        self.cluster.push(variables, self.targets)
        return self._wrap(None, block)

    def pull(self, names: str | Sequence[str], *, block: bool | None = None) -> Any:
        """Fetch variables from each worker: one name gives its value, several give a list. Waits in any case."""
        found = self.cluster.pull(names, self.targets[0] if self._single else self.targets)
        if not isinstance(names, str):
            found = [list(each.values()) for each in found] if isinstance(found, list) else list(found.values())
        return self._wrap(found, block)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push({name: value}, block=True)

    def __getitem__(self, name: str) -> Any:
        return self.pull(name, block=True)

    def scatter(self, name: str, values: Any, *, flatten: bool = False, block: bool | None = None) -> Any:
        """Cut a sequence into as many parts as there are workers, and set a variable to one part on each.

        With ``flatten``, a part of one item becomes that item.
        """
        for number, part in zip(self.targets, _parts(values, len(self)), strict=True):
            self.cluster.push({name: part[0] if flatten and len(part) == 1 else part}, number)
        return self._wrap(None, block)

    def gather(self, name: str, *, block: bool | None = None) -> Any:
        """Fetch a variable's parts and put them together: the opposite of `scatter`."""
        return self._wrap(self[name] if self._single else _joined(self[name]), block)

    def activate(self, suffix: str = "") -> DirectView:
        """Run what ``%px`` is given on this view; with a suffix ``0``, what ``%px0`` is given. Return the view."""
        from nbdist.compat.ipyparallel.magics import activate

        activate(",".join(map(str, self.targets)), suffix)
        return self

    def use_dill(self) -> None:
        """Do nothing: cloudpickle sends functions, with the variables that they close over."""

    use_cloudpickle = use_dill


class LoadBalancedView(View):
    """Gives each task to the first of its workers that is free."""

    _balanced = True


class ViewExecutor(Executor):
    """A view for programs that take an executor of `concurrent.futures`."""

    def __init__(self, view: View) -> None:
        self.view = view

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function on the view's workers; return the handle."""
        return self.view.apply_async(function, *args, **kwargs)

    def map(self, function: Any, /, *sequences: Any, timeout: float | None = None, chunksize: int = 1) -> Iterator[Any]:
        """Yield what the function returns for the items of sequences, in order."""
        result = self.view.map_async(function, *sequences, chunksize=chunksize)
        return iter(result if timeout is None else result.get(timeout))


def _parts(values: Any, count: int) -> list[Any]:
    """Cut a sequence, array or tensor into ``count`` parts, whose lengths differ by at most one."""
    size, more = divmod(len(values), count)
    ends = [size * part + min(part, more) for part in range(count + 1)]
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _joined(parts: Sequence[Any]) -> Any:
    """Put the parts of a sequence, array or tensor together again; of parts that are single values, return the list."""
    first = parts[0]
    if isinstance(first, Sequence):
        return [value for part in parts for value in part]
    if not getattr(first, "ndim", 0):
        return list(parts)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    import numpy

    return numpy.concatenate(parts)
