"""Examines the members of a cluster and the links between them, and says what to do about each fault.

=============  ================================================================================
`machine`      the facts about one process: its memory, files, ports, GPUs, NCCL, versions
`speed`        measures how fast messages go from one process to another
`findings`     finds the faults in these facts and numbers, and says what to do: pure
`examination`  asks all members of a running cluster, one pair after another: `Cluster.examine`
=============  ================================================================================

``python -m nbdist doctor`` uses all but the last one, for one machine and its link to a notebook.
"""
