"""The functions that users call: the ones of torch.distributed.autograd, and nbdist's own `open` and `watch`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch

from nbdist.autograd.graph.messages import Mode
from nbdist.autograd.handle import Handle
from nbdist.autograd.passes.context import Context
from nbdist.autograd.recorder import Recorder
from nbdist.autograd.watching.watcher import Watch
from nbdist.errors import UsageError
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Future
from nbdist.rpc.references.rref import RRef

Checked = Literal["nan"] | None


def recorder() -> Recorder:
    """Return the `Recorder` of the calling thread's agent; raises NotInitialized if RPC has not begun."""
    return cast(Recorder, current_agent().recorder)


class ContextId(int):
    """The id of a context: an int with methods, which raise UsageError once the context or RPC has ended.

    `context` and `open` return one. It may be sent to other workers, as the int that it is in torch. The methods raise
    UsageError also on a worker that the context has not reached; without RPC, it is NotInitialized.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
        ...     context_id.backward(loss)
        ...     context_id.gradients()[w]
        tensor([3., 3.])
    """

    def backward(self, *arguments: Any, **options: Any) -> None:
        """Run a backward pass in this context; the arguments are those of `nbdist.autograd.backward`.

        Returns when the gradients are in the context on every worker, or with ``accumulate`` in the leaves' ``.grad``.
        Raises UsageError or TypeError for wrong arguments or after the end of the context, and else the error of the
        pass, such as WorkerLost.
        """
        backward(int(self), *arguments, **options)

    def backward_async(self, *arguments: Any, **options: Any) -> Handle:
        """Begin a backward pass in this context, as `nbdist.autograd.backward_async` does, and return its handle.

        The arguments are those of `nbdist.autograd.backward`; wrong ones raise UsageError or TypeError here, as does a
        context that has ended. The handle's `wait` raises the error of the pass.
        """
        return backward_async(int(self), *arguments, **options)

    def watch(self, *, paused: bool = False, norms: bool = False) -> Watch:
        """Watch the backward passes of this context; the arguments are those of `nbdist.autograd.watch`.

        Raises UsageError if this worker watches the context already, the context has ended, or it has never reached
        this worker.
        """
        return watch(int(self), paused=paused, norms=norms)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of this context on this worker, as `nbdist.autograd.get_gradients` does.

        Other workers have the gradients of their own leaves. The dict is empty if no pass has reached a leaf here.
        Raises UsageError after the end of the context.
        """
        return get_gradients(int(self))

    def close(self) -> None:
        """End a context that was begun by `open`, on all workers, and free its record.

        Call it on the worker that opened the context, in any thread: another worker ends it only on the workers that it
        knows. Backward passes that still run in the context fail with UsageError. A second call raises UsageError. In
        the block of `context` it ends the context early; the end of the block then does nothing.
        """
        own = recorder()
        own.close(own.contexts.get(self))

    def __reduce__(self) -> Any:
        return ContextId, (int(self),)


class context:
    """Record the tensors that are sent between workers inside a ``with`` block, for backward passes in that block.

    The block's value is the context's id, a `ContextId`. Every call that is made in the block carries the context to
    its worker, and so do the calls that this worker then makes. At the end of the block, also by an error, the context
    ends on all workers, its record and its gradients are freed, and passes that still run fail. Workers that were lost
    are no error there. The object may begin another block afterwards, with a new id.

    Each argument switches on a record or a check, on every worker that the context reaches. A record or check that is
    off costs nothing.

    Args:
        lines: Note which module and which line of code made each node of the graph; `nbdist.autograd.trace` shows them.
            This takes about 50 microseconds for each operation.
        check: With ``"nan"``, raise `nbdist.ForwardNaN` at the first operation that returns a NaN, whether it made the
            NaN or was given one. The error names the worker, the module, the line and the operation. An Inf is no
            error. This takes 10 to 20 microseconds for each operation, and 0.1 ms to read a million of its results.
            The forward pass of a small network takes three times as long; one of large matrix products takes hardly
            longer. On a GPU, the check waits for every operation.

    Raises:
        UsageError: ``check`` is neither ``"nan"`` nor None; or, when the block begins, the thread is in a context
            already: contexts do not nest.
        NotInitialized: When the block begins, RPC does not run here.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
        ...     dist_autograd.backward(context_id, [loss])
        ...     dist_autograd.get_gradients(context_id)[w]
        tensor([3., 3.])
        >>> with dist_autograd.context(check="nan"):
        ...     torch.tensor([1.0, -1.0]).log()
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

    def __exit__(self, *_: object) -> None:
        self._recorder.close(self._context)


def open(*, lines: bool = False, check: Checked = None) -> ContextId:
    """Begin a context that may span several cells of a notebook, and return its id; ``close()`` of the id ends it.

    The calling thread stays in the context until then. In a notebook, later cells stay in it, too.

    Args:
        lines: Note the line of code of each node, as in `context`.
        check: Look for NaN in the forward pass, as in `context`.

    Returns:
        The id, with `ContextId.backward` and the other functions as methods.

    Raises:
        UsageError: The thread is in a context already, or ``check`` is neither ``"nan"`` nor None.
        NotInitialized: RPC does not run here.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> context_id = dist_autograd.open()
        >>> loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
        >>> context_id.backward(loss)
        >>> context_id.gradients()[w]
        tensor([3., 3.])
        >>> context_id.close()
    """
    return ContextId(recorder().open(lines=lines, check=_is_checked(check)).id)


def _is_checked(check: Any) -> bool:
    if check not in ("nan", None):
        raise UsageError(f'check must be "nan", or None to check nothing, not {check!r}')
    return check is not None


def current_id() -> int:
    """Return the id of the calling thread's context; raises UsageError if the thread is in none."""
    found = recorder().contexts.current
    if found is None:
        raise UsageError(
            "this thread is in no autograd context: call this inside of `with dist_autograd.context() as context_id:`"
            f"{recorder().contexts.of_others}"
        )
    return found.id


def backward(*arguments: Any, **options: Any) -> None:
    """Run a backward pass from the roots, over all workers on which they depend, and wait for its end.

    ``backward(context_id, roots, retain_graph=False, mode="smart", *, grad_tensors=None, accumulate=False)``. Inside of
    a context the id may be left out: ``backward(loss)``. The gradients are added up in the context, each on the worker
    where its leaf is; `get_gradients` returns them there. Several passes may run in one context, and at the same time.

    - ``context_id``: the id of the context in which the roots were computed.
    - ``roots``: one tensor, or a list of them, that depend on leaves here or on other workers.
    - ``retain_graph``: keep the tensors that the graph has saved, so that another pass can use it.
    - ``mode``: ``"smart"`` first finds out which of the tensors that were sent take part. ``"fast"`` skips this, but
      fails with `UnusedOutputs` if a tensor that was sent in the context does not contribute to the roots.
    - ``grad_tensors``: a gradient for each root; None for a root of one element. Other roots must have one.
    - ``accumulate``: add the gradients to the leaves' ``.grad``, as a local pass does, instead of to the context.

    If the pass fails, or Ctrl-C ends the wait, all workers give the pass up and drop its gradients. With
    ``accumulate``, gradients that are in ``.grad`` already stay there. Nodes that have run have freed their tensors:
    before another pass, run the forward pass again, unless ``retain_graph`` was True.

    Raises:
        UsageError: The context has ended or never reached this worker, the thread is in none, ``mode`` is unknown,
            there is no root, a root does not require grad or is a leaf, or roots and ``grad_tensors`` do not match.
        NotInitialized: RPC does not run here.
        TypeError: The roots are not tensors, or there is no argument of that name.
        UnusedOutputs: A pass in FAST mode waits for gradients that cannot come.
        WorkerLost: A worker that the pass needs is lost.
        RuntimeError: An earlier pass has freed the graph.
        RemoteError: A node or a hook failed on another worker with an error that cannot be pickled, or whose class is
            missing here. All other errors of nodes and hooks are raised here as they are.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     doubled = rpc.rpc_sync("worker1", torch.mul, args=(w, 2))
        ...     dist_autograd.backward(context_id, [doubled.sum()], retain_graph=True)
        ...     dist_autograd.backward(context_id, doubled, grad_tensors=torch.tensor([1.0, 10.0]))
        ...     dist_autograd.get_gradients(context_id)[w]
        tensor([ 4., 22.])
    """
    own, context, roots, gradients, chosen = _prepare(*_with_id(arguments, options), **options)
    own.finish(own.begin(context, roots, gradients, **chosen))


def backward_async(*arguments: Any, **options: Any) -> Handle:
    """Begin a backward pass in another thread, and return a `Handle` at once; the arguments are those of `backward`.

    Wrong arguments raise here, as in `backward`; ``handle.wait()`` raises the errors of the pass, each time. Let the
    pass end before its context does, as by ``handle.wait()``: the end of the context fails the pass with UsageError.
    Ctrl-C in ``wait()`` does not end the pass; ``handle.cancel()`` does.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
        ...     handle = dist_autograd.backward_async(context_id, [loss])
        ...     handle.wait()
        ...     dist_autograd.get_gradients(context_id)[w]
        tensor([3., 3.])
    """
    own, context, roots, gradients, chosen = _prepare(*_with_id(arguments, options), **options)
    ended: Future[None] = Future()
    handle = Handle(own, own.begin(context, roots, gradients, ended, **chosen), ended)
    own.transport.submit(handle.go)
    return handle


def _with_id(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
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
    """Check the arguments of `backward`; return the recorder, and the arguments and options of its method `begin`."""
    check_mode(mode)
    tensors, gradients = _check_roots(roots, grad_tensors)
    own = recorder()
    options = {"smart": mode == "smart", "retain_graph": retain_graph, "accumulate": accumulate}
    return own, own.contexts.get(context_id), tensors, gradients, options


_signature = inspect.signature(_prepare).replace(return_annotation=None)
for _function in (backward, backward_async, ContextId.backward, ContextId.backward_async):
    setattr(_function, "__signature__", _signature)  # noqa: B010 - what Shift-Tab shows; mypy knows no such attribute


def check_mode(mode: str) -> None:
    """Raise UsageError unless ``mode`` is one of the modes of a pass."""
    if mode not in ("smart", "fast"):
        raise UsageError(f"mode must be 'smart' or 'fast', not {mode!r}")


def check_tensors(roots: Any) -> list[torch.Tensor]:
    """Return the roots of a pass as a list, which is not empty; raises UsageError or TypeError for anything else."""
    # The messages have torch's words for the same mistakes, which its own tests of autograd match, and programs may.
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
    return list(roots)


def _check_roots(roots: Any, grad_tensors: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the roots as a list, and a gradient for each: the given one, or ones for a root of one element."""
    roots = check_tensors(roots)
    given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(roots))
    if len(given) != len(roots):
        raise UsageError(
            f"backward() was given {len(given)} grad_tensors for {len(roots)} roots: give one for each, or None"
        )
    for number, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not root.requires_grad:
            raise UsageError(f"requires_grad not set on root {number}: nothing that it depends on requires grad")
        if gradient is None and root.numel() != 1:
            raise UsageError(
                f"root {number} is not a scalar, all roots need to be scalar: call its sum(), or give grad_tensors"
            )
        if gradient is not None and gradient.shape != root.shape:
            raise UsageError(
                f"the gradient of root {number} has shape {tuple(gradient.shape)}, but the root has shape "
                f"{tuple(root.shape)}"
            )
        if root.grad_fn is None:
            raise UsageError(
                f"root {number} is a leaf: it does not have a valid gradient function. Give a tensor computed from it"
            )
    return roots, [
        gradient if gradient is not None else torch.ones_like(root) for root, gradient in zip(roots, given, strict=True)
    ]


def get_gradients(context_id: int | None = None) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that a context has on this worker, by leaf tensor.

    Each gradient is the sum over all passes of the context so far. Leaves that no pass has reached are missing, and so
    are leaves on other workers: call this function there, by RPC. A pass that still runs may add to the gradients; one
    that failed adds nothing.

    Args:
        context_id: The context; None for the one in which the calling thread is.

    Returns:
        A new dict, from leaf to gradient. The gradients are the context's own tensors: do not change them in place.

    Raises:
        UsageError: The context has ended or has never reached this worker, or the thread is in none.
        NotInitialized: RPC does not run here.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [(w * 2).sum()])
        ...     dist_autograd.get_gradients(context_id)
        {tensor([1., 1.], requires_grad=True): tensor([2., 2.])}
    """
    return recorder().contexts.get(current_id() if context_id is None else context_id).gradients()


def watch(context_id: int | None = None, *, paused: bool = False, norms: bool = False) -> Watch:
    """Return a `Watch` of the backward passes that begin in a context from now on, on any worker.

    The watch shows what every worker does in these passes, and can pause, resume and step them. It acts on the passes
    themselves, not on a record. It ends with its ``close()`` or with the context. While a pass is paused, no call of
    any worker times out.

    Args:
        context_id: The context; None for the one in which the calling thread is.
        paused: Halt each pass before its first node. A paused `backward` does not return: to step it from the same
            thread, begin it with `backward_async`.
        norms: Measure the gradients that each node is given (norm and histogram), and report the first NaN or Inf.

    Raises:
        UsageError: This worker watches the context already (close the other watch), the context has ended or has never
            reached this worker, or the thread is in none.
        NotInitialized: RPC does not run here.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     watch = dist_autograd.watch(paused=True)
        ...     handle = context_id.backward_async((w * 2).sum())
        ...     first = [event.name for event in watch.step()]
        ...     watch.run()
        ...     handle.wait()
        >>> first
        ['SumBackward0']

        The notebook ``03_watch_backward`` shows more.
    """
    own = recorder()
    context = own.contexts.get(current_id() if context_id is None else int(context_id))
    return own.passes.observing.watch(context, paused=paused, norms=norms)
