"""The private functions of torch that count references, calls and contexts. The suites wait until nothing is left."""

import torch.distributed.autograd
import torch.distributed.rpc

from nbdist.autograd.api import recorder
from nbdist.compat.agents import agent_of_torch
from nbdist.rpc.api import current_agent


def count_references():
    """Return the numbers of owned values, forks, pending references and unanswered creations, by torch's names."""
    agent = current_agent()
    forks = agent.references.forks
    creations = sum(1 for call in agent.awaited() if call.result is not None)
    return {
        "num_owner_rrefs": str(forks.owners),
        "num_pending_futures": str(creations),
        "num_pending_users": str(forks.pending),
        "num_forks": str(forks.forks),
    }


def count_contexts():
    """Return the numbers of this worker's contexts and of the backward passes in them, by torch's names."""
    contexts = recorder().contexts.all()
    return {
        "num_autograd_contexts": str(len(contexts)),
        "num_current_backward_passes": str(sum(len(context.runs) for context in contexts)),
    }


def count_all():
    return {**count_references(), **agent_of_torch().get_debug_info(), **count_contexts()}


def install():
    torch.distributed.rpc._rref_context_get_debug_info = count_references
    torch.distributed.autograd._get_debug_info = count_contexts
    torch.distributed.rpc._get_debug_info = count_all
