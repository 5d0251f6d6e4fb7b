"""Backward passes over workers: decides what each worker runs when, and where the gradients go.

==================  ========================================================
`driver`            runs passes, in SMART and FAST mode
`ledger`            tells the root of a pass what workers still have to do
`worker_part`       decides what can run now on this worker
`engine`            calls torch's engine for `worker_part`
`ordering`          puts gradients that arrive in any order into a fixed one
`leaves`            keeps gradients out of ``.grad``
`ddp`, `ddp_turns`  DistributedDataParallel modules in a pass
==================  ========================================================
"""
