"""Rules of the test suite itself.

=============  =======================================================================
`python_path`  where processes that tests start find their modules
`needs`        finds out what a test needs: a thread, other processes, a page
`remains`      what tests may leave in a process: variables, groups, hooks, threads
`examples`     how many examples hypothesis tries where a whole program is the example
=============  =======================================================================
"""
