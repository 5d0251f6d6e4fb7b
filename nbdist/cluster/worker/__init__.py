"""The code of nbdist that only runs inside of worker processes.

====================  ==========================================================
`imports`             the modules that the zygote imports for all workers
`kernel`              makes an ipykernel a worker
`output`              sends prints to the cells that caused them
`tasks`, `values`     the worker's side of `Cluster.executor` and `Cluster.push`
`status_report`       the worker's side of `%dist_status`
`gpu`                 makes the worker's GPU its device, and explains its errors
`collectives`         the process group, and how its collectives end
`default_group`       ``init_process_group`` in a worker's cells
`gloo`, `gloo_waits`  gloo's connections and waits
`nccl`                aborts of NCCL's collectives, and the threads in them
`collective_errors`   turns torch's errors of collectives into nbdist's
====================  ==========================================================
"""
