"""Backward passes over workers: which part of which graph runs when, and where the gradients go.

==================  ========================================================
`driver`            runs passes, in SMART and FAST mode
`ledger`            what the pass's root knows to be left to do
`worker_part`       decides what can run now on this worker
`engine`            calls torch's engine for it
`ordering`          puts gradients that arrive in any order into a fixed one
`leaves`            keeps gradients out of ``.grad``
`ddp`, `ddp_turns`  DistributedDataParallel modules in a pass
==================  ========================================================
"""
