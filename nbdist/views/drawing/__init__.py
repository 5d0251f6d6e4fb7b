"""Draws graphs and timelines as SVG without scripts, so that a saved notebook shows them too. Pure: data in, text out.

===========  =============================================================
`folding`    which nodes share a box of it
`columns`    the column of each box, and the order in it
`layout`     where its boxes and lines are
`pictures`   drawings as images, in the colours of the page
`gantt`      timelines: bars in rows, and the colours of all timelines
`pipelines`  the timeline of a pipeline's step
`mirrored`   a layout with its direction turned round
`graph`      the graph of a context, with a plan or the progress of a pass
===========  =============================================================
"""
