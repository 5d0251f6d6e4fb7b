"""Distributed autograd: backward passes that cross workers and compute the gradients that one process would.

The words for a backward pass, one meaning each; the code uses them as names:

============== =================================================================================================
word           meaning
============== =================================================================================================
context        the record of one iteration, on each worker that it touches (`passes.context.Context`)
maker          the worker that made a context, and the only one that ends it
edge           the two ends of a message with tensors: `Sent` on the sender, `Received` on the
               receiver; the number ``message`` names both. A *graph edge* is torch's: a node of a graph, and
               the number of one of its outputs
slot, gate     one tensor of a `Sent`, and the node in front of its history, where its gradient enters
receive node   the node that made a tensor of a `Received`; it sends the tensor's gradient back when it runs
roots          the tensors on which `backward` is called
pass           one backward computation from its roots, on all workers that it reaches; a `PassId` names it.
               A *local pass* is torch's own ``backward()``, in one process
root           of a pass: the worker on which it began
run            what one worker keeps of one pass: its part, its threads, what it must report (`passes.context.Run`)
part           what one worker computes of one pass (`passes.worker_part.Part`)
entry          the roots, or the gradient of one slot, which the part has not given to torch's engine yet
step           one call of torch's engine (`_Step`). A step of a pipeline is something else (`nbdist.nn`)
segment        what a part runs without waiting for other workers, one step or several (`Part.run`)
region         the nodes that can be reached from given graph edges on one worker (`graph.walk.Region`)
pending        of a gate: its gradient has not arrived, and will or may arrive
held back      of a node: it lies behind a pending gate, so it cannot run yet. Other nodes are *free*
kept           of a gradient: computed for a held-back node by a node that has run, and stored until that node
               can run (`worker_part.Crossing`)
barrier        a pending gate, made a root of lowest priority, at which torch's engine stops
SMART, FAST    the two modes of a pass. SMART: marks first tell which gates will get a gradient. FAST: all gates
               must get one
mark           a message which says that tensors sent earlier will get gradients
token          the name of one mark or gradient message, from when it is sent until it is settled
settled        of a token: the receiver has done all that follows from the message
report         a message to the root: the tokens that a worker has settled, and the tokens that it has sent
ledger         the root's account of all tokens; it tells when marking, or the whole pass, is over
given up       of a pass: ended by an error, a lost worker or the user; its gradients are dropped
claim          the leaves that only one step may use, with their ``.grad`` set aside (`passes.claims.Claim`)
reduce         average the gradients of a DistributedDataParallel module over its processes (`passes.ddp`)
turn           the right of one pass to reduce, while others wait (`passes.ddp_turns`)
watch          the user's view of a context's passes, and the control over them (`watching.watcher.Watch`)
observer       the object that reports to a watch, on each worker of a pass (`watching.observer.Observer`)
halt           a stop before one node, until the watch lets the node run
============== =================================================================================================

``docs/a_gradient.md`` follows a gradient through the modules, step by step.

>>> from nbdist import autograd as dist_autograd
>>> w = torch.ones(2, requires_grad=True)
>>> with dist_autograd.context() as context_id:
...     loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
...     dist_autograd.backward(context_id, [loss])
...     dist_autograd.get_gradients(context_id)[w]
tensor([3., 3.])

The modules:

- Users call `api`. The agent calls `recorder` for every message in a context. `inspection` has `trace` and `plan`.
- `graph`, a subpackage: the record of a forward pass. It has the edges between workers, walks over torch's graphs,
  finds the operation that made a NaN, and defines the `messages` between workers.
- `passes`, a subpackage: the contexts and their backward passes. It decides what each worker can run, has torch's
  engine run it, exchanges messages with other workers, and keeps the gradients.
- `watching`, a subpackage: watches passes for the user, and finds the origin of a NaN.
"""

from __future__ import annotations

from nbdist.autograd.api import ContextId, backward, backward_async, context, get_gradients, open, watch
from nbdist.autograd.graph.events import Event, Pass
from nbdist.autograd.graph.inherited import Carried, Inherited
from nbdist.autograd.graph.traces import Plan, Trace
from nbdist.autograd.inspection import plan, plan_from, trace
from nbdist.autograd.passes import pass_driver
from nbdist.autograd.passes.pass_driver import UnusedOutputs
from nbdist.autograd.watching.watcher import Watch

__all__ = ["Carried", "ContextId", "Event", "Inherited", "Pass", "Plan", "Trace", "UnusedOutputs", "Watch"]
__all__ += ["backward", "backward_async", "context", "get_gradients", "open", "plan", "trace", "watch"]

pass_driver.plan_from = plan_from
