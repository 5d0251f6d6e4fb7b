"""Watches backward passes: shows, halts and steps them, and finds out where a NaN came from.

================  =================================================================
`watcher`         what the user calls: pause, step, read
`records`         the data that it shows
`connection`      connects it with the workers of the pass
`observer`        sees one worker's part of a pass
`measuring`       measures a node's gradients
`forward_nans`    the operation that made the first NaN of a forward pass
`inherited`       a NaN that came from the forward pass, as data and in words
`inherited_nans`  finds the value of the forward pass that it came from
================  =================================================================
"""
