"""Examines the members of a cluster and the links between them, and says what to do about what is wrong.

============= ===================================================================================
`machine`     what one process has of its machine: memory, files, ports, GPUs, NCCL, versions
`speed`       how fast messages go from one process to another
`findings`    what is wrong with these numbers, and what to do about it: pure
`examination` asks all members of a running cluster, one pair after another: `Cluster.examine`
============= ===================================================================================

``python -m nbdist doctor`` uses all but the last one, for one machine and its link to a notebook.
"""
