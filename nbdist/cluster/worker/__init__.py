"""The code of nbdist that only runs inside of worker processes.

===================  ==========================================================
`imports`            the modules that the zygote imports for all workers
`gpu`                makes the worker's GPU its device, and explains its errors
`gloo`               gloo's connections
`nccl`               aborts of NCCL's collectives, and the threads in them
`wrapped_models`     names the part of a model for which DDP or FSDP2 calls a collective
`group_hooks`        sees each operation of the process groups, of an older torch sends and receives
`roots`              notes the root of each broadcast, scatter, reduce and gather
`flight_recorder`    reads torch's record of this process's collectives
`record_server`      lets the host read that record while the worker holds the GIL
`gloo_waits`         ends gloo's waits for transfers that were cut off
`non_members`        the warning of a collective in a group that the worker is not in
`collectives`        the process group, and how its collectives end
`default_group`      ``init_process_group`` in a worker's cells
`collective_errors`  turns torch's errors of collectives into nbdist's
`output`             sends prints to the cells that caused them
`values`             the worker's side of `Cluster.push`
`new_code`           lets a worker run the new code of edited modules
`debugger`           ``breakpoint()``, and the last error, driven from the notebook
`breakpoints`        stops in code that stays as it is
`debugged_page`      names the worker's cells for JupyterLab's debugger
`kernel`             makes an ipykernel a worker
`tasks`              the worker's side of `Cluster.executor`
===================  ==========================================================
"""
