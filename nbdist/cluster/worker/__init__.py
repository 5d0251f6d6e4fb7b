"""The code of nbdist that only runs inside of worker processes.

====================  ==========================================================
`imports`             what the zygote imports for all of them
`kernel`              makes an ipykernel a worker
`output`              sends prints to the cells that caused them
`tasks`, `values`     the worker's side of `Cluster.executor` and `Cluster.push`
`status_report`       the worker's side of `%dist_status`
`collectives`         the process group, and how its collectives end
`gloo`, `gloo_waits`  gloo's connections and waits
`nccl`                aborts of NCCL's collectives, and who waits for them
`collective_errors`   torch's errors of collectives as ours
====================  ==========================================================
"""
