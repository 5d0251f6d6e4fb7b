"""Backward passes over workers: decides what each worker runs when, and where the gradients go.

================  ========================================================
`ledger`          tells the root of a pass what workers still have to do
`ordering`        puts gradients that arrive in any order into a fixed one
`ddp`             the leaves that DistributedDataParallel averages
`gradient_store`  adds up the gradients of leaves
`claims`          keeps gradients out of ``.grad``
`local_passes`    who watches torch's own ``backward()``
`engine`          calls torch's engine for `worker_part`
`worker_part`     decides what can run now on this worker
`context`         a context, and a pass in it, on one worker
`contexts`        the contexts of one worker
`ddp_turns`       lets one pass at a time average
`inherited_nans`  finds the value of the forward pass that a NaN came from
`observing`       connects a watch with the workers that run its passes
`pass_driver`     runs passes, in SMART and FAST mode
================  ========================================================
"""
