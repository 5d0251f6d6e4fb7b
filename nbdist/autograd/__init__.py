"""Distributed autograd: backward passes that cross workers, and give what one process gives.

>>> from nbdist import autograd as dist_autograd
>>> with dist_autograd.context() as context_id:                         # doctest: +SKIP
...     loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
...     dist_autograd.backward(context_id, [loss])
...     dist_autograd.get_gradients(context_id)

The map: `edges` are the nodes that stand in the graphs for what was sent and received; `contexts` keep them;
`recorder` makes them, as calls go out and come in. A backward pass: `graph` walks, `part` decides what a worker can
run and has torch's engine run it, `leaves` keeps the result out of ``.grad``, `passes` speaks with the other workers
(in `messages`), and `ledger` tells the worker that began it when all is done. `inspection` collects what a context has
recorded, with the names that `parameters` finds; `drawing` draws it, as boxes that `folding` makes and `layout` places.
`watching` is where a pass is seen and paused from, `observer` what sees and halts it on each worker, and `inherited`
tells a NaN of the forward pass from one of the backward pass. What the operations of a forward pass are seen by is
`origins`, which notes their lines, and `nans`, which looks for the first NaN.
"""

from __future__ import annotations

from nbdist.autograd.api import ContextId, backward, backward_async, context, get_gradients, open, watch
from nbdist.autograd.inherited import Carried, Inherited
from nbdist.autograd.inspection import Plan, Trace, plan, trace
from nbdist.autograd.passes import UnusedOutputs
from nbdist.autograd.seen import Event, Pass
from nbdist.autograd.watching import Watch

__all__ = [
    "Carried",
    "ContextId",
    "Event",
    "Inherited",
    "Pass",
    "Plan",
    "Trace",
    "UnusedOutputs",
    "Watch",
    "backward",
    "backward_async",
    "context",
    "get_gradients",
    "open",
    "plan",
    "trace",
    "watch",
]
