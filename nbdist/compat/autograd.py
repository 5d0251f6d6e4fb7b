"""Stands for torch.distributed.autograd: its public names, and the private ones that torch's suites use."""

from __future__ import annotations

from typing import Any

from nbdist.autograd.api import backward, context, get_gradients, recorder
from nbdist.autograd.contexts import Context
from nbdist.autograd.edges import Sent

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether there is distributed autograd: there is."""
    return True


class _Joint:
    """What looks like torch's one send function for a message of several tensors."""

    def __init__(self, sent: Sent) -> None:
        self.next_functions = tuple(slot.edge for slot in sent.slots)

    def name(self) -> str:
        """The node's name."""
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """A context, as torch's private functions return it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, Any]:
        return {message: _Joint(sent) for message, sent in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        return {message: node for message, end in self._context.receives.items() for node in end.nodes[:1]}

    def _known_worker_ids(self) -> set[int]:
        membership = recorder().membership
        return {membership.info_of(worker).id for worker in self._context.workers}


def _init(worker_id: int) -> None:
    """Nothing has to be prepared."""


def _get_debug_info() -> dict[str, str]:
    contexts = recorder().contexts.all()
    return {
        "num_autograd_contexts": str(len(contexts)),
        "num_current_backward_passes": str(sum(len(context.runs) for context in contexts)),
    }


def _is_valid_context(context_id: int) -> None:
    recorder().contexts.get(context_id)


def _new_context() -> DistAutogradContext:
    return DistAutogradContext(recorder().open())


def _current_context() -> DistAutogradContext:
    found = recorder().contexts.current
    if found is None:
        raise RuntimeError("Current thread doesn't have a valid autograd context")
    return DistAutogradContext(found)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(recorder().contexts.get(context_id))


def _release_context(context_id: int) -> None:
    here = recorder()
    here.close(here.contexts.get(context_id))


def _get_max_id() -> int:
    return recorder().contexts.last_id
