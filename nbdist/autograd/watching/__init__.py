"""Watches backward passes: shows, halts and steps them, and finds out where a NaN came from.

==============  ======================================================================
`group_limits`  stops the time limits of process groups meanwhile
`freezing`      stops the clocks of calls while a pass is paused
`watcher`       what the user calls: pause, step, read
`observer`      sees one worker's part of a pass
`prompter`      has observers send what they have kept back, where nothing more happens
`node_hooks`    the hooks by which an observer sees the nodes that torch's engine runs
==============  ======================================================================
"""
