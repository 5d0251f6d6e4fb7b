"""The functions that users call: torch.distributed.autograd's, and what they ask for beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, cast

import torch

from nbdist.autograd.contexts import Context
from nbdist.autograd.recorder import Recorder
from nbdist.errors import UsageError
from nbdist.rpc.api import current_agent
from nbdist.rpc.rref import RRef

__all__ = ["ContextId", "Mode", "backward", "context", "current_id", "get_gradients", "recorder"]

Mode = Literal["smart", "fast"]


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

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """As `nbdist.autograd.get_gradients`."""
        return get_gradients(int(self))

    def __reduce__(self) -> Any:
        return ContextId, (int(self),)


class context:
    """``with context() as context_id:`` records what is sent to other workers, for passes inside of the block."""

    def __enter__(self) -> ContextId:
        self._recorder = recorder()
        self._context: Context = self._recorder.open()
        return ContextId(self._context.id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.close(self._context)


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
    ``accumulate`` adds the gradients to ``.grad`` as well.

    ``mode="smart"`` runs what the roots depend on. ``mode="fast"`` saves finding that out, and needs all that was
    sent in the context to contribute; where it does not, `UnusedOutputs` names what does not.
    """
    if arguments and not (isinstance(arguments[0], int) or arguments[0] is None):
        arguments = (current_id(), *arguments)
    elif not arguments and "context_id" not in options:
        arguments = (current_id(),)
    _backward(*arguments, **options)


def _backward(
    context_id: int,
    roots: torch.Tensor | Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: Mode = "smart",
    *,
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    accumulate: bool = False,
) -> None:
    if mode not in ("smart", "fast"):
        raise UsageError(f"mode must be 'smart' or 'fast', not {mode!r}")
    tensors, gradients = _check_roots(roots, grad_tensors)
    here = recorder()
    here.run(here.contexts.get(context_id), tensors, gradients, retain_graph=retain_graph, smart=mode == "smart")


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
