"""The private functions of ``torch.distributed.autograd``, and the contexts that they return."""

import torch.distributed.autograd

from nbdist.autograd.api import recorder
from nbdist.rpc.api import current_agent


class SendNode:
    """Looks like torch's send node: torch has one for all tensors of a message, nbdist has one for each tensor."""

    def __init__(self, sent):
        self.next_functions = tuple(slot.edge for slot in sent.slots)

    def name(self):
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """A context in the form in which torch's private functions return it."""

    def __init__(self, context):
        self.context = context

    def _context_id(self):
        return self.context.id

    def _send_functions(self):
        """Return a send node in torch's form for each message that this worker sent in the context, by message id."""
        return {message: SendNode(sent) for message, sent in self.context.sends.items()}

    def _recv_functions(self):
        """Return the receive node of each message that this worker received in the context, by message id."""
        return {message: node for message, end in self.context.receives.items() for node in end.nodes[:1]}

    def _known_worker_ids(self):
        """Return the ids of the workers to which this worker has sent a message of the context."""
        membership = recorder().membership
        return {membership.info_of(worker).id for worker in self.context.workers}


def _init(worker_id):
    """Do nothing, because `init_rpc` has prepared autograd. A suite replaces this by a mock."""


def _new_context():
    """Make a context and enter it in the calling thread. `_release_context` ends it."""
    return DistAutogradContext(recorder().open())


def _current_context():
    """Return the context of the calling thread. Raises RuntimeError, with torch's text, if the thread is in none."""
    found = recorder().contexts.current
    if found is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: `with "
            "torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return DistAutogradContext(found)


def _retrieve_context(context_id):
    """Return the context with this id. Raises UsageError if this worker has none."""
    return DistAutogradContext(recorder().contexts.get(context_id))


def _release_context(context_id):
    """End a context that this worker has made, here and on all workers."""
    here = recorder()
    here.close(here.contexts.get(context_id))


def _get_max_id():
    """Return the highest id that a context made by this worker can have, as in torch; not the last id given."""
    return (current_agent().me.id + 1 << 48) - 1  # an id is the worker's, and a counter of 48 bits


def install():
    names = (_init, _new_context, _current_context, _retrieve_context, _release_context, _get_max_id)
    for name in (DistAutogradContext, *names):
        setattr(torch.distributed.autograd, name.__name__, name)
