"""Views of the workers of a cluster: how they start, what they do, print and hold.

=======================  ==================================================
`progress`, `line`       workers that start; one line for a long operation
`remarks`                what to know about a cluster that has just started
`status`                 the table of `%dist_status`
`panel`                  the samples of `%dist_panel`
`memory`, `memory_rows`  the tables of `%dist_memory` and `%dist_free`
`printed`                the lines of `%dist_log`
`difference`             the result of `%dist_diff`
`examination`            the result of `%dist_doctor`
=======================  ==================================================
"""
