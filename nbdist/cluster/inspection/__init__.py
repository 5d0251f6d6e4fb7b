"""Looks into workers: their work, the objects that they hold, the names that hold these, and the memory they take.

================  ===================================================
`print_logs`      the lines that each worker has printed
`comparing`       compares a value across workers
`rounding`        tells rounding from a difference
`forward_passes`  observes parameters and forward passes of models
`one_piece`       compares the notebook's model with the workers'
`anatomy`         what a value consists of, and where in it an object is
`census`          counts the memory of objects
`pins`            the names that hold an object
`roots`           the objects that a user knows
`status_report`   the worker's side of `%dist_status`
`status`          the table of `%dist_status`
`thread_stacks`   the threads of workers, for `%dist_stacks`
`variables`       a row for each of a worker's variables
`holdings`        the values and contexts that live on each worker
`freeing`         frees values that only the shell keeps
`breakpoints`     the breakpoints of a cluster
`code_versions`   lets workers follow `%autoreload`, and compares versions of modules
`reloads`         runs edited modules again
================  ===================================================
"""
