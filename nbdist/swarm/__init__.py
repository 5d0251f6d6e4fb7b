"""A language model served over workers that may die.

>>> sw = nbdist.swarm.serve(model, workers=[0, 1, 2])        # doctest: +SKIP
>>> remote = sw.causal_lm()
>>> remote.generate(**inputs)                                # goes on when a worker is killed meanwhile
"""

from nbdist.swarm.budget import CacheFull
from nbdist.swarm.routing import NoRoute
from nbdist.swarm.server import Options
from nbdist.swarm.swarm import Swarm, serve

__all__ = ["CacheFull", "NoRoute", "Options", "Swarm", "serve"]
