"""Views of the workers of a cluster: their start, their work, their prints, their memory.

=======================  ==================================================
`progress`, `line`       workers that start; one line for a long operation
`remarks`                lines about a cluster that has just started
`status`                 the table of `%dist_status`
`panel`                  the samples of `%dist_panel`
`memory`, `memory_rows`  the tables of `%dist_memory` and `%dist_free`
`printed`                the lines of `%dist_log`
`difference`             the result of `%dist_diff`
`examination`            the result of `%dist_doctor`
=======================  ==================================================
"""
