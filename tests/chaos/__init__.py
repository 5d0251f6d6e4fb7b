"""Chaos: kills, stops, full file tables, cut links and bad frames at random, and a ledger that is compared afterwards.

    python -m chaos --seed 7 --minutes 30            (make chaos SEED=7 MINUTES=30)
    python -m chaos --seed 7 --storm 12              one storm again, as a finding asks for

A run is a row of storms. Each storm has a workload, a folder, and processes of its own:

    storm.py (one process, without torch)                the workload's processes
    ------------------------------------                 -----------------------------------
    starts them                              ------>     member.py: worlds of plain scripts
    strikes them: disturbances.py            ------>     driver.py: a notebook cluster's driver
    says which phase it is: phases.py        ------>     storm, settle, check, leave
    reads what they wrote: recorder.py       <------     every call, where it is sent and where it runs
    compares it: ledger.py (pure)
    looks for what is left: leftovers.py

============== ==================================================================================
workload       what runs in the storm
============== ==================================================================================
calls          members that call each other in every way there is: calls.py
passes         members that run backward passes over each other: passes.py
collectives    a cluster whose cells all-reduce: collectives.py
pipelines      a cluster that trains a pipeline: pipelines.py
swarms         a cluster that serves a language model: swarms.py
============== ==================================================================================
"""
