"""Modules that live on other workers, alone (`RemoteModule`) or as the stages of a pipeline (`Pipeline`).

================ ==========================================================================================
module           contents
================ ==========================================================================================
`remote_module`  `RemoteModule`: a handle on one module of another worker
`pipeline`       `Pipeline`: the handle through which a user drives a pipeline
`cutting`        `cut`: splits a Sequential into stages
`placement`      parses places such as ``"worker1/cuda:0"``
`schedules`      the order in which each worker runs its forwards and backwards: pure tables
`pipeline_part`  the part of a pipeline on one worker: the worker's stages, and its share of each step
`pipeline_parts` `PipelineParts`: the parts on all workers, for the handle
`inbox`          the inputs of that part's operations, and the wait for them
`stage`          one stage's forward computation, with checkpoints and reproducible random numbers
`shared_inputs`  starts a new graph at the input of a stage, and catches the gradient of the input
`randomness`     the seed of each stage and micro-batch; saves and restores random generators
`batches`        splits a batch into micro-batches, joins their outputs
`losses`         computes a micro-batch's share of the loss, adds the shares
`watched`        shows a training step to the watcher of its context, as if it were a backward pass
`timeline`       `PipelineTimeline`: when each operation of a step ran
`reference`      `Reference`: the same arithmetic in one process
================ ==========================================================================================
"""

from nbdist.nn.cutting import cut
from nbdist.nn.pipeline import Pipeline
from nbdist.nn.reference import Reference
from nbdist.nn.remote_module import RemoteModule

__all__ = ["Pipeline", "Reference", "RemoteModule", "cut"]
