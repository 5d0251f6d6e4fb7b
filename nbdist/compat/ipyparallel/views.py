"""Some workers as one object, as ipyparallel has it: push, pull, scatter and gather, calls, maps.

A thin shell: variables go by `Cluster.push` and `Cluster.pull`, code by `Cluster.execute`, functions by calls of
`nbdist.rpc`, one at a time to each worker.
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
from nbdist.compat.ipyparallel.closed import refuse
from nbdist.compat.ipyparallel.lanes import Lanes, Task
from nbdist.compat.ipyparallel.results import AsyncResult
from nbdist.errors import UsageError

__all__ = ["DirectView", "LoadBalancedView", "View", "ViewExecutor"]


class View:
    """What all views can do with functions. ``block`` says whether `apply` and `map` wait for their values."""

    def __init__(self, cluster: Cluster, engines: Sequence[int], *, single: bool = False, block: bool = False) -> None:
        if not engines:
            raise UsageError("a view needs at least one worker")
        self.cluster, self.targets, self.single, self.block = cluster, list(engines), single, block
        self._numbers = {worker.name: worker.rank for worker in cluster.workers}
        self._workers = [cluster.workers[number].name for number in self.targets]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._workers)}>"

    def __getattr__(self, name: str) -> Any:
        return refuse("view", name)

    def __len__(self) -> int:
        return len(self.targets)

    def _send(
        self, result: AsyncResult, calls: Sequence[tuple[Any, ...]], workers: Sequence[Sequence[str]]
    ) -> AsyncResult:
        Lanes.of(self.cluster).add(
            [
                Task(call, may, functools.partial(result.on_sent, part), functools.partial(result.on_ended, part))
                for part, (call, may) in enumerate(zip(calls, workers, strict=True))
            ]
        )
        return result

    def _map(self, function: Any, chunks: Sequence[Sequence[Any]], workers: Sequence[Sequence[str]]) -> AsyncResult:
        calls: list[tuple[Any, ...]] = [(function, list(zip(*chunk, strict=True)), {}, True) for chunk in chunks]
        return self._send(AsyncResult(len(chunks), self._numbers, chunks=True), calls, workers)

    def apply_async(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function; return the handle of what it returns."""
        raise NotImplementedError

    def map_async(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> AsyncResult:
        """Call a function with the items of sequences; return the handle of what that returns, in order."""
        raise NotImplementedError

    def apply(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function; return what it returns, or the handle, as ``block`` says."""
        return self._as_asked(self.apply_async(function, *args, **kwargs))

    def apply_sync(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and wait for what it returns."""
        return self.apply_async(function, *args, **kwargs).get()

    def map(self, function: Any, /, *sequences: Any, chunksize: int | None = None, block: bool | None = None) -> Any:
        """Call a function with the items of sequences; return what that returns, or the handle, as ``block`` says."""
        return self._as_asked(self.map_async(function, *sequences, chunksize=chunksize), block)

    def map_sync(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> list[Any]:
        """Call a function with the items of sequences, and wait for what that returns."""
        values: list[Any] = self.map_async(function, *sequences, chunksize=chunksize).get()
        return values

    def imap(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> Iterator[Any]:
        """Yield what a function returns for the items of sequences, in order, each as soon as it is there."""
        return iter(self.map_async(function, *sequences, chunksize=chunksize))

    def parallel(self, block: bool | None = None, chunksize: int | None = None) -> Callable[[Any], Any]:
        """Return a decorator: the function, and its ``map``, are applied to the items of sequences."""

        def decorate(function: Any) -> Any:
            mapped = functools.partial(self.map, function, chunksize=chunksize, block=block)
            mapped.map = mapped  # type: ignore[attr-defined]
            return mapped

        return decorate

    def remote(self, block: bool | None = None) -> Callable[[Any], Any]:
        """Return a decorator: the function runs on the view's workers when it is called."""
        return lambda function: (
            lambda *args, **kwargs: self._as_asked(self.apply_async(function, *args, **kwargs), block)
        )

    def _as_asked(self, result: AsyncResult, block: bool | None = None) -> Any:
        return result.get() if (self.block if block is None else block) else result

    def wait(self, results: AsyncResult | Sequence[AsyncResult], timeout: float | None = None) -> bool:
        """Wait until all of some handles have ended; return whether they have."""
        return all(each.wait(timeout) for each in ([results] if isinstance(results, AsyncResult) else results))

    @property
    def executor(self) -> ViewExecutor:
        """The view as an executor of `concurrent.futures`."""
        return ViewExecutor(self)


class DirectView(View):
    """Workers that all do the same; of a view of one worker, values are no lists."""

    def apply_async(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function on each worker; return the handle of the list of what they return."""
        calls, workers = [(function, args, kwargs, False)] * len(self), [[worker] for worker in self._workers]
        return self._send(AsyncResult(len(self), self._numbers, single=self.single), calls, workers)

    def map_async(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> AsyncResult:
        """Give each worker one part of the items; ``chunksize`` is for load balanced views."""
        items = list(zip(*sequences, strict=False))
        chunks = [chunk for chunk in _parts(items, len(self)) if chunk]
        return self._map(function, chunks, [[worker] for worker in self._workers[: len(chunks)]])

    # -- code and variables ---------------------------------------------------------------------

    def execute(self, code: str, *, silent: bool = False, block: bool | None = None) -> Any:
        """Run code as a cell; the handle's value is None. ``silent`` shows no value of a last expression."""
        wait = self.block if block is None else block
        cell = self.cluster.execute(code, self.targets, block=wait, quiet=silent)
        if wait:
            return AsyncResult.of(None)
        result = AsyncResult(1, self._numbers, single=True)
        cell.when_done(lambda: result.on_ended(0, (None, 0.0, 0.0), cell.error()))
        return result

    def run(self, filename: str, *, block: bool | None = None) -> Any:
        """Run a file of the notebook's folder as a cell."""
        return self.execute(Path(filename).read_text(), block=block)

    def push(self, variables: Mapping[str, Any], *, block: bool | None = None) -> Any:
        """Set variables, once the cells that were sent before have run. It always waits for that."""
        self.cluster.push(variables, self.targets)
        return self._as_asked(AsyncResult.of(None), block)

    def pull(self, names: str | Sequence[str], *, block: bool | None = None) -> Any:
        """Fetch the values of variables: of one name a value, of several a list; from each worker. It always waits."""
        several = not isinstance(names, str)
        found = self.cluster.pull(names, self._as_targets())
        if several:
            found = [list(each.values()) for each in found] if isinstance(found, list) else list(found.values())
        return self._as_asked(AsyncResult.of(found), block)

    def _as_targets(self) -> int | list[int]:
        return self.targets[0] if self.single else self.targets

    def __setitem__(self, name: str, value: Any) -> None:
        self.push({name: value}, block=True)

    def __getitem__(self, name: str) -> Any:
        return self.pull(name, block=True)

    def scatter(self, name: str, values: Any, *, flatten: bool = False, block: bool | None = None) -> Any:
        """Cut a sequence in as many parts as there are workers, and set a variable to one part on each.

        With ``flatten`` a part of one value is that value, and no sequence.
        """
        for number, part in zip(self.targets, _parts(values, len(self)), strict=True):
            self.cluster.push({name: part[0] if flatten and len(part) == 1 else part}, number)
        return self._as_asked(AsyncResult.of(None), block)

    def gather(self, name: str, *, block: bool | None = None) -> Any:
        """Fetch a variable's parts and put them together; the counterpart of `scatter`."""
        found = self.cluster.pull(name, self._as_targets())
        return self._as_asked(AsyncResult.of(found if self.single else _joined(found)), block)

    def activate(self, suffix: str = "") -> None:
        """Have ``%px`` mean this view; with a suffix, ``%px`` followed by that."""
        from nbdist.compat.ipyparallel.magics import activate

        activate(self, suffix)

    def use_dill(self) -> None:
        """Do nothing: functions travel with what they close over, as cloudpickle has it."""

    use_cloudpickle = use_dill


class LoadBalancedView(View):
    """Workers of which each task takes the first that is free."""

    def apply_async(self, function: Any, /, *args: Any, **kwargs: Any) -> AsyncResult:
        """Call a function on whichever worker is free; return the handle of what it returns."""
        return self._send(
            AsyncResult(1, self._numbers, single=True), [(function, args, kwargs, False)], [self._workers]
        )

    def map_async(self, function: Any, /, *sequences: Any, chunksize: int | None = None) -> AsyncResult:
        """Call a function for each item, wherever somebody is free; ``chunksize`` items (1) make a task."""
        items, size = list(zip(*sequences, strict=False)), chunksize or 1
        if size < 1:
            raise UsageError(f"chunksize must be at least 1, not {chunksize}")
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        return self._map(function, chunks, [self._workers] * len(chunks))


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
        if timeout is not None:
            result.get(timeout)
        return iter(result)


def _parts(values: Any, count: int) -> list[Any]:
    """Cut a sequence, array or tensor into ``count`` parts; the first ones have one value more where it must be."""
    size, more = divmod(len(values), count)
    ends = [size * part + min(part, more) for part in range(count + 1)]
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _joined(parts: Sequence[Any]) -> Any:
    """Put the parts of a sequence, array or tensor together again."""
    if not hasattr(parts[0], "__len__") or (isinstance(parts[0], torch.Tensor) and not parts[0].ndim):
        return list(parts)
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))
    if type(parts[0]).__module__ == "numpy":
        import numpy

        return numpy.concatenate(parts)
    return [value for part in parts for value in part]
