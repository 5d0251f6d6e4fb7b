"""The worker processes of a cluster: their start, their meeting, their end.

==================  ====================================================
`zygote`            imports torch once and forks the workers
`setup`             the data that a worker gets when it starts
`run_directory`     the folder of sockets and logs
`worker_processes`  the processes of this host, for the default launcher
`group_store`       the store at which the process group forms
`generations`       the number of each process group, and its store
`last_words`        saves the text that a worker writes as it crashes
`process_memory`    the memory of a process, as Linux counts it
`last_operations`   the last operations of a worker, which survive it
`probe`             asks the host about a worker that does not answer
`launchers`         the classes that start the processes: `Launcher`
==================  ====================================================
"""
