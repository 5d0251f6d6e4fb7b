"""Examines the members of a cluster and the links between them, and says what to do about each fault.

================  ================================================================================
`imported_files`  notes the user's files as modules are imported, and says which have changed
`reloading`       runs edited modules again, in this process
`replaced`        finds the functions of torch that somebody has replaced
`cell_functions`  the functions and classes that cells have defined
`code_facts`      the facts about the code and the settings of one process
`machine`         the facts about one process: its memory, files, ports, GPUs, NCCL, versions
`speed`           measures how fast messages go from one process to another
`findings`        finds the faults in these facts and numbers, and says what to do: pure
`code_remarks`    says where code and settings of members differ, for `%dist_diff --code`: pure
`examination`     asks all members of a running cluster, one pair after another: `Cluster.examine`
================  ================================================================================

``python -m nbdist doctor`` uses `machine`, `speed` and `findings`, for one machine and its link to a notebook.
"""
