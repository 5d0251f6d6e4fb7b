"""Looks into workers: what they do, what they hold and who holds it, and what memory that takes.

=======================================  ===============================================
`status`, `where`                        what each worker does, and on which line
`print_logs`                             what each worker has printed
`holdings`                               what lives on each worker
`pins`, `roots`                          which names hold an object
`variables`, `census`, `process_memory`  memory of variables, of objects, of the process
`freeing`                                frees what only the shell keeps
`comparing`                              compares a value across workers
=======================================  ===============================================
"""
