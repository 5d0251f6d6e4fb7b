"""Views of the workers of a cluster: their start, their work, their prints, their memory.

=============  ================================================
`remarks`      lines about a cluster that has just started
`status`       the table of `%dist_status`
`stacks`       the text of `%dist_stacks`
`panel`        the samples of `%dist_panel`
`printed`      the lines of `%dist_log`
`difference`   the result of `%dist_diff`
`comparison`   the result of `%dist_compare`
`examination`  the result of `%dist_doctor`
`line`         one line for a long operation
`memory_rows`  the memory reports of workers as rows of a table
`memory`       the tables of `%dist_memory` and `%dist_free`
`progress`     workers that start
=============  ================================================
"""
