"""The names of torch's RPC that only torch's own test suites use, on top of `nbdist.compat`.

`install` adds them to this process. Programs do not use these names, so `nbdist.compat` does not have them.

==================  ==================================================================================
`message_names`     torch's types of nbdist's messages, by which the suites say which messages fail
`faulty_agent`      the backend ``FAULTY_TENSORPIPE`` and ``torch.distributed.rpc._testing``
`contexts`          the private functions of ``torch.distributed.autograd``, and its contexts
`counters`          the functions that count references, calls and contexts
`creations`         the private futures of an RRef
`pickling`          the pickler of ``torch.distributed.rpc.internal``, and the names of calls in profiles
==================  ==================================================================================
"""

from conformance.private_names import contexts, counters, creations, faulty_agent, pickling


def install():
    """Add the names to torch's modules in this process, in which `nbdist.compat` is installed.

    Call this once, before the suites are imported: they import some of the names when they are imported themselves.
    Processes forked from this one have the names, too; a process that starts anew must call this itself.
    """
    for part in (faulty_agent, contexts, counters, creations, pickling):
        part.install()
