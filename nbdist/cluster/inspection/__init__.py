"""Looks into workers: their work, the objects that they hold, the names that hold these, and the memory they take.

=======================================  ================================================
`status`, `where`                        the work of each worker, and its line of code
`print_logs`                             the lines that each worker has printed
`holdings`                               the values and contexts that live on each worker
`pins`, `roots`                          the names that hold an object
`variables`, `census`, `process_memory`  memory of variables, of objects, of the process
`freeing`                                frees values that only the shell keeps
`comparing`                              compares a value across workers
=======================================  ================================================
"""
