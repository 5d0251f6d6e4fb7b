"""Modules that live on other workers, alone or as the stages of a pipeline.

`pipeline` is the handle, `station` what it has on a worker, `stage` how one stage computes; `schedules` are the orders
in which that is done, `reference` the same in one process.
"""

from __future__ import annotations

from nbdist.nn.cutting import cut
from nbdist.nn.pipeline import Pipeline
from nbdist.nn.reference import Reference
from nbdist.nn.remote_module import RemoteModule

__all__ = ["Pipeline", "Reference", "RemoteModule", "cut"]
