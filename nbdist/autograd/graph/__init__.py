"""The record of a forward pass: torch's graph on each worker, and the edges between workers.

============  ==============================================================
`edges`       the two ends of an edge between workers
`walk`        goes over torch's graph, node by node
`numbers`     the numbers by which nodes are shown
`saved`       reads the tensors that nodes have saved
`origins`     which module and which line made a node
`noting`      notes the origins while the forward pass runs
`parameters`  the names of leaves
`memory_use`  the memory that a context takes
`waiting`     keeps an engine call going until nodes on all devices have run
`traces`      all of it as plain data
`inspection`  collects that data: `trace` and `plan`
============  ==============================================================
"""
