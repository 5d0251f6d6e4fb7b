"""Replaces torch.distributed.autograd: its public names, and the private ones that torch's test suites use."""

from __future__ import annotations

from typing import Any

from nbdist.autograd.api import backward, context, get_gradients, recorder
from nbdist.autograd.graph.edges import Sent
from nbdist.autograd.passes.context import Context

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Return True, because nbdist has distributed autograd."""
    return True


class _Joint:
    """Looks like torch's send function: torch has one for all tensors of a message, nbdist has one for each tensor."""

    def __init__(self, sent: Sent) -> None:
        self.next_functions = tuple(slot.edge for slot in sent.slots)

    def name(self) -> str:
        """Return the name that torch gives a send node: ``torch::distributed::autograd::SendRpcBackward``."""
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """A context in the form in which torch's private functions return it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, Any]:
        """Return a send node in torch's form for each message that this worker sent in the context, by message id."""
        return {message: _Joint(sent) for message, sent in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        """Return a receive node for each message that this worker received in the context, by message id.

        nbdist has a node for each tensor. This is the first node of the message.
        """
        return {message: node for message, end in self._context.receives.items() for node in end.nodes[:1]}

    def _known_worker_ids(self) -> set[int]:
        """Return the ids of the workers to which this worker has sent a message of the context."""
        membership = recorder().membership
        return {membership.info_of(worker).id for worker in self._context.workers}


def _init(worker_id: int) -> None:
    """Do nothing, because `init_rpc` has prepared autograd. Programs that use torch's private functions call this."""


def _get_debug_info() -> dict[str, str]:
    """Return the numbers of this worker's contexts and of the backward passes in them, as text, by torch's names."""
    contexts = recorder().contexts.all()
    return {
        "num_autograd_contexts": str(len(contexts)),
        "num_current_backward_passes": str(sum(len(context.runs) for context in contexts)),
    }


def _is_valid_context(context_id: int) -> None:
    """Raise UsageError if this worker has no context with this id; else do nothing."""
    recorder().contexts.get(context_id)


def _new_context() -> DistAutogradContext:
    """Make a context and enter it in the calling thread, which must be in no context. `_release_context` ends it.

    Raises UsageError if the thread is in a context.
    """
    return DistAutogradContext(recorder().open())


def _current_context() -> DistAutogradContext:
    """Return the context of the calling thread. Raises RuntimeError if the thread is in no context.

    The error has torch's text, because programs compare it.
    """
    found = recorder().contexts.current
    if found is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: `with "
            "torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return DistAutogradContext(found)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return the context with this id. Raises UsageError if this worker has none."""
    return DistAutogradContext(recorder().contexts.get(context_id))


def _release_context(context_id: int) -> None:
    """End a context, here and on all workers.

    Call this on the worker that made the context. Raises UsageError if the context has ended already.
    """
    here = recorder()
    here.close(here.contexts.get(context_id))


def _get_max_id() -> int:
    """Return the highest id that a context made by this worker can have, as in torch; not the last id given."""
    return recorder().contexts.last_id
