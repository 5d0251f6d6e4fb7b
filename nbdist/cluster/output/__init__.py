"""Shows the output of workers: chooses its place, its order, and how much of it to show.

===============  =======================================================
`arranger`       the contract of the two orders below
`pieces`         the items of output: lines, displays, requests to clear
`screen`         remembers what is shown, to show it again after a clear
`sinks`          the places of output
`in_place`       a text that is replaced where it stands
`tail`           the last lines of a text
`terminal`       a line as a terminal shows it
`print_log`      keeps all lines in files
`line_cutting`   cuts one worker's output into whole lines
`live_order`     the order for a user who watches
`log_order`      the order for a log, the same in every run
`output_cutter`  keeps the first and last lines
`outlet`         shows an arranger's messages in time
`origins`        shows the prints of functions that cells call by RPC
===============  =======================================================
"""
