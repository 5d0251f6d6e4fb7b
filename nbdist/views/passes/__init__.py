"""Views of backward passes: choose the passes to watch, draw them, and say what stands out.

=============  ==========================================
`pace`         which steps of a loop are watched
`intervals`    arithmetic on spans of time
`backward`     plan and events, as the data that is drawn
`remarks`      sentences on what stands out
`page`         that data as JSON, for the live view
`report`       the pass as text and as HTML
`joint`        a local pass of each worker, as one
`owners`       which parameters no optimizer has
`local_scout`  finds the local passes of its process
`scouts`       find passes and contexts of other workers
`watching`     watches the passes that a cell begins
=============  ==========================================
"""
