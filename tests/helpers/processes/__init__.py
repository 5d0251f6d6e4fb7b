"""Processes that tests start, what these run, and what can be seen of a process.

==============================  =================================================================
`stacks`                        collects the stacks of processes that hang
`listening`                     finds where processes listen, and a port where none does
`file_table`                    fills this process's table of open files
`full_files`                    fills a worker's table of open files; functions that it runs then
`forking`                       functions that fork while they hold shared memory
`mains`                         several ``__main__`` modules in one process
`shared_cluster`                two workers, for all tests that only want a cluster of two
`workers`                       workers that call each other, and functions for them
`entries`                       what the worker processes of `tests/cluster` do
`entries_threaded`              starts a thread when it is imported
`entries_that_exit`             raises SystemExit when it is imported
`entries_that_end_the_process`  ends the process that imports it
`torch_suites`                  the process that runs torch's own test suites
==============================  =================================================================
"""
