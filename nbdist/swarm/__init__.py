"""A language model served over workers that may die.

>>> sw = nbdist.swarm.serve(model, workers=[0, 1, 2])        # doctest: +SKIP
>>> remote = sw.causal_lm()
>>> remote.generate(**inputs)                                # goes on when a worker is killed meanwhile
"""

from nbdist.swarm.swarm import Swarm, serve

__all__ = ["Swarm", "serve"]
