"""Shows what workers print: where, in which order, and how much of it.

==========================  ==============================================
`pieces`                    lines, displays, requests to clear
`line_cutting`, `terminal`  bytes to whole lines, as a terminal shows them
`arranger`                  the contract of the orders below
`live_order`                for a user who watches
`log_order`                 for a log that is to be the same each time
`one_place`                 for a place that can only be cleared
`shortening`, `tail`        first and last lines; last lines only
`outlet`                    shows an arranger's messages in time
`sinks`, `in_place`         the places where they are shown
`origins`                   prints of functions that others called
`print_log`                 everything, in files
==========================  ==============================================
"""
