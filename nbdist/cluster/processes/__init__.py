"""The worker processes of a cluster: how they are started, how they find each other, how they end.

==================  ==================================================
`lifecycle`         start, restart and end of a cluster's workers
`launchers`         who starts the processes: `Launcher`
`worker_processes`  the processes of this host, for the usual launcher
`zygote`            imports torch once and forks the workers
`setup`             what a worker is told when it starts
`run_directory`     the folder of sockets and logs
`group_store`       the store at which the process group forms
`probe`             asks the host about a worker that does not answer
`last_words`        what a worker writes as it crashes
==================  ==================================================
"""
