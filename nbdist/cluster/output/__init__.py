"""Shows the output of workers: chooses its place, its order, and how much of it to show.

==========================  =======================================================
`pieces`                    the items of output: lines, displays, requests to clear
`line_cutting`, `terminal`  make whole lines of text, as a terminal shows them
`arranger`                  the contract of the two orders below
`live_order`                the order for a user who watches
`log_order`                 the order for a log, the same in every run
`one_place`                 remembers what is shown, to show it again after a clear
`shortening`, `tail`        keep the first and last lines; the last lines only
`outlet`                    shows an arranger's messages in time
`sinks`, `in_place`         the places of output; a text that is replaced in place
`origins`                   shows the prints of functions that cells call by RPC
`print_log`                 keeps all lines in files
==========================  =======================================================
"""
