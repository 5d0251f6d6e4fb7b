"""Draws graphs and timelines as SVG without scripts, so that a saved notebook shows them too. Pure: data in, text out.

================= ================================================================
`values`          draws the values of lower layers that show themselves
`graph`           the graph of a context, with a plan or the progress of a pass
`folding`         which nodes share a box of it
`layout`          where its boxes and lines are
`gantt`           timelines: bars in rows, and the colours of all timelines
`pipelines`       the timeline of a pipeline's step
`pictures`        drawings as images, in the colours of the page
================= ================================================================
"""
