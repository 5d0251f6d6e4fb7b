"""The private methods of torch's RRef that tell when the value has been made."""

from nbdist.rpc.futures import Future
from nbdist.rpc.references.rref import RRef


def future_of_creation(rref):
    """Return a Future that is done, with None, once the call that makes the value has been answered.

    If no call makes the value, it is done at once. If the call failed, it fails.
    """
    made = Future()
    if rref._creation is not None:
        rref._creation.add_done_callback(lambda created: made.try_settle(None, created.exception()))
    else:
        made.set_result(None)
    return made


def install():
    RRef._get_future = RRef._get_profiling_future = future_of_creation
