"""The notebook's side of cells: the workers as it sees them, and the cells that run on their kernels.

================  ============================================================
`output_widgets`  messages of widgets that capture output
`notices`         texts about workers that failed
`cells`           a cell that runs on workers
`crash_reports`   the reason in what a process wrote before it died
`sightings`       where a worker was before the system killed it
`workers`         one worker as the notebook sees it, through all its restarts
`comms`           messages of widgets
`routing`         messages to the cells that caused them
================  ============================================================
"""
