"""A language model served over workers that may die.

>>> sw = nbdist.swarm.serve(model, workers=[0, 1, 2])        # doctest: +SKIP
>>> remote = sw.causal_lm()
>>> remote.generate(**inputs)                                # goes on when a worker is killed meanwhile

The way of a token: transformers' own model, whose layers are stand-ins (`model`), calls a `session`, which keeps the
`history` of what has gone into each span, and asks the `crew` for a way (`routing`) and for a step. A `server` has it
computed by the one thread of its `runtime`, in the order of its `pools`, with what it has `held` of the session, for
which it has `room` in its `budget`; what comes out goes on to its `neighbours`, and back to the client, in pieces
where it is `large`. Without a cache the same blocks are called by `stateless`, in parts that `stacking` tells apart.
When a server is lost, the session has its history taken again elsewhere, or at once, by `merging`. All that depends on
transformers' version is in `adapter`.
"""

from nbdist.swarm.budget import CacheFull
from nbdist.swarm.routing import NoRoute
from nbdist.swarm.server import Options
from nbdist.swarm.swarm import Swarm, serve

__all__ = ["CacheFull", "NoRoute", "Options", "Swarm", "serve"]
