"""The record of a forward pass: torch's graph on each worker, and the edges between workers.

============  ===========================================
`edges`       the two ends of an edge between workers
`walk`        goes over torch's graph, node by node
`saved`       what nodes have saved of the forward pass
`origins`     which module and which line made a node
`parameters`  the names of leaves
`memory_use`  the memory that a context takes
`inspection`  all of it as plain data: `trace` and `plan`
============  ===========================================
"""
