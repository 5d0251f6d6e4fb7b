"""The functions that users call: torch.distributed.autograd's, and what they ask for beyond it."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Literal, cast

import torch

from nbdist.autograd.contexts import Context
from nbdist.autograd.recorder import Recorder
from nbdist.autograd.run import Run
from nbdist.autograd.watching import Watch
from nbdist.errors import Interrupted, UsageError
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Future
from nbdist.rpc.rref import RRef

__all__ = [
    "ContextId",
    "Handle",
    "Mode",
    "backward",
    "backward_async",
    "context",
    "current_id",
    "get_gradients",
    "open",
    "recorder",
    "watch",
]

Mode = Literal["smart", "fast"]
Checked = Literal["nan"] | None


def recorder() -> Recorder:
    """The recorder of the calling thread's agent."""
    return cast(Recorder, current_agent().recorder)


class ContextId(int):
    """A context's id, as torch has it, with the functions that take it as methods."""

    def backward(
        self,
        roots: torch.Tensor | Sequence[torch.Tensor],
        retain_graph: bool = False,
        mode: Mode = "smart",
        *,
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        accumulate: bool = False,
    ) -> None:
        """As `nbdist.autograd.backward`."""
        backward(int(self), roots, retain_graph, mode, grad_tensors=grad_tensors, accumulate=accumulate)

    def backward_async(self, *arguments: Any, **options: Any) -> Handle:
        """As `nbdist.autograd.backward_async`."""
        return backward_async(int(self), *arguments, **options)

    def watch(self, *, paused: bool = False, norms: bool = False) -> Watch:
        """As `nbdist.autograd.watch`."""
        return watch(int(self), paused=paused, norms=norms)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """As `nbdist.autograd.get_gradients`."""
        return get_gradients(int(self))

    def close(self) -> None:
        """End a context that was begun by `open`."""
        here = recorder()
        here.close(here.contexts.get(self))

    def __reduce__(self) -> Any:
        return ContextId, (int(self),)


class context:
    """``with context() as context_id:`` records what is sent to other workers, for passes inside of the block.

    Nothing more is done in a block that asks for nothing more; both of these hold on all workers that it comes to:

    Args:
        lines: Note which module and which line of code made each node of the graph: `trace` shows it. That costs some
            50 microseconds for each operation.
        check: With ``"nan"``, raise `nbdist.ForwardNaN` at the first operation that makes a NaN, or is given one and
            hands it on; the error names the worker, the module, the line and the operation. Inf is no error. That
            costs 10 to 20 microseconds for each operation, and a reading of what it returns: a tenth of a millisecond
            for a million numbers. So the forward pass of a small network takes three times as long, and one of large
            multiplications hardly longer. On a GPU, each operation is waited for.

    >>> from nbdist import autograd as dist_autograd
    >>> from nbdist.testing import World
    >>> with World(1) as world, world[0].activate():
    ...     with dist_autograd.context(check="nan"):
    ...         torch.tensor([1.0, -1.0]).log()
    Traceback (most recent call last):
    nbdist.errors.ForwardNaN: log made 1 NaN of 2 values ...; no input holds one. That was on worker0, at ...
    """

    def __init__(self, *, lines: bool = False, check: Checked = None) -> None:
        self._lines = lines
        self._check = _is_checked(check)

    def __enter__(self) -> ContextId:
        self._recorder = recorder()
        self._context: Context = self._recorder.open(lines=self._lines, check=self._check)
        return ContextId(self._context.id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.close(self._context)


def open(*, lines: bool = False, check: Checked = None) -> ContextId:
    """Begin a context that spans several cells of a notebook; it ends with its ``close()``.

    ``lines`` and ``check`` are as for `context`.
    """
    return ContextId(recorder().open(lines=lines, check=_is_checked(check)).id)


def _is_checked(check: Any) -> bool:
    if check not in ("nan", None):
        raise UsageError(f'check must be "nan", or None to check nothing, not {check!r}')
    return check is not None


def current_id() -> int:
    """The id of the calling thread's context."""
    found = recorder().contexts.current
    if found is None:
        raise UsageError("no context: call this inside of `with dist_autograd.context() as context_id:`")
    return found.id


def backward(*arguments: Any, **options: Any) -> None:
    """Run a backward pass over all workers that the roots depend on.

    ``backward(context_id, roots, retain_graph=False, mode="smart")``, as in torch; inside of a context the id may
    be left out: ``backward(loss)``. Gradients are summed up in the context, on the workers where the leaves
    are; `get_gradients` returns them. ``grad_tensors`` are the gradients of roots that have more than one element.
    With ``accumulate`` they go into ``.grad`` instead, as those of a local pass do.

    ``mode="smart"`` runs what the roots depend on. ``mode="fast"`` saves finding that out, and needs all that was
    sent in the context to contribute; where it does not, `UnusedOutputs` names what does not.
    """
    here, context, roots, gradients, chosen = _prepare(*_with_id(arguments, options), **options)
    run = here.begin(context, roots, gradients, **chosen)
    here.passes.go(run)
    here.wait(run)


def backward_async(*arguments: Any, **options: Any) -> Handle:
    """As `backward`, but return a handle at once: ``wait()``, ``await``, ``done()``, ``cancel()``."""
    here, context, roots, gradients, chosen = _prepare(*_with_id(arguments, options), **options)
    ended: Future[None] = Future()
    handle = Handle(here, here.begin(context, roots, gradients, ended, **chosen), ended)
    here.submit(handle.go)
    return handle


def _with_id(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, with the current context's id where it was left out."""
    if "context_id" in options or (arguments and (isinstance(arguments[0], int) or arguments[0] is None)):
        return arguments
    return (current_id(), *arguments)


def _prepare(
    context_id: int,
    roots: torch.Tensor | Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: Mode = "smart",
    *,
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    accumulate: bool = False,
) -> tuple[Recorder, Context, list[torch.Tensor], list[torch.Tensor], dict[str, bool]]:
    if mode not in ("smart", "fast"):
        raise UsageError(f"mode must be 'smart' or 'fast', not {mode!r}")
    tensors, gradients = _check_roots(roots, grad_tensors)
    here = recorder()
    options = {"smart": mode == "smart", "retain_graph": retain_graph, "accumulate": accumulate}
    return here, here.contexts.get(context_id), tensors, gradients, options


_signature = inspect.signature(_prepare).replace(return_annotation=None)
for _function in (backward, backward_async):
    setattr(_function, "__signature__", _signature)  # noqa: B010 - what Shift-Tab shows; mypy knows no such attribute


class Handle:
    """A pass that runs in the background."""

    def __init__(self, here: Recorder, run: Run, ended: Future[None]) -> None:
        self._passes = here.passes
        self._run = run
        self._outcome: Future[None] = Future()
        self._ended = ended
        ended.add_done_callback(self._end)

    def go(self) -> None:
        """Run it, on the calling thread."""
        try:
            self._passes.go(self._run)
        except BaseException as error:
            self._outcome.try_settle(None, error)

    def _end(self, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._passes.commit(self._run)
        else:
            self._passes.give_up(self._run)
        self._outcome.try_settle(None, error)

    def wait(self) -> None:
        """Wait for the end; its error is raised."""
        self._outcome.wait()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._outcome.done()

    def cancel(self) -> None:
        """Give it up, on all workers; `wait` then raises Interrupted."""
        self._ended.try_settle(None, Interrupted("the backward pass was cancelled"))

    def __await__(self) -> Generator[Any, None, None]:
        return self._outcome.__await__()


def _check_roots(
    roots: Any, grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if isinstance(roots, torch.Tensor):
        roots = [roots]
    if isinstance(roots, RRef):
        raise UsageError(f"{roots!r} is not a tensor: write rref.backward(context_id), or fetch it with to_here()")
    if not isinstance(roots, list | tuple) or any(not isinstance(root, torch.Tensor) for root in roots):
        raise TypeError(
            f"backward(): incompatible function arguments: roots must be tensors, not {type(roots).__name__}"
        )
    if not roots:
        raise UsageError("No tensors provided for gradient computation.")
    given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(roots))
    if len(given) != len(roots):
        raise UsageError(f"{len(given)} grad_tensors for {len(roots)} roots")
    gradients: list[torch.Tensor] = []
    for number, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not root.requires_grad:
            raise UsageError(f"requires_grad not set on root {number}: nothing that it depends on requires grad")
        if gradient is not None:
            if gradient.shape != root.shape:
                raise UsageError(
                    f"the gradient of root {number} has shape {tuple(gradient.shape)}, the root {tuple(root.shape)}"
                )
            gradients.append(gradient)
        elif root.numel() != 1:
            raise UsageError(
                f"root {number} is not a scalar, all roots need to be scalar: sum it up, or give grad_tensors"
            )
        else:
            gradients.append(torch.ones_like(root))
        if root.grad_fn is None:
            raise UsageError(f"root {number} is a leaf: it does not have a valid gradient function")
    return list(roots), gradients


def get_gradients(context_id: int | None = None) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context has gathered on this worker: a leaf, and its gradient."""
    return recorder().contexts.get(current_id() if context_id is None else context_id).gradients()


def watch(context_id: int | None = None, *, paused: bool = False, norms: bool = False) -> Watch:
    """See the passes of a context that begin from now on, on any worker, and have a hand on them.

    What is paused and stepped is the pass itself, not a record of it; with ``paused`` each halts before its first node.
    A paused `backward` does not return, so one that is to be stepped from the same thread is begun by `backward_async`.
    ``norms`` has the norm of the gradients computed that each node is given, and has the first NaN or Inf told of.
    """
    here = recorder()
    context = here.contexts.get(current_id() if context_id is None else int(context_id))
    return here.passes.observing.watch(context, paused=paused, norms=norms)
