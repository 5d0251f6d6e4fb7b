"""Live views, which change in the page: the only modules that import ipywidgets and anywidget.

============  =======================================================
`view`        the base class of all live views
`live`        the base class of views of references, and a limit for their number
`card`        one remote reference; `rref_table`: several, in a table
`backward`    a backward pass, with buttons to pause and step it
`panel`       the workers of a cluster: `%dist_panel`
`map`         a swarm
`rref_table`  the live table of several remote references
============  =======================================================
"""
