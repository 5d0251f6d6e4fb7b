"""Views of backward passes: choose the passes to watch, draw them, and say what stands out.

===========  ==========================================
`pace`       which steps of a loop are watched
`scouts`     find contexts that other workers open
`intervals`  arithmetic on spans of time
`backward`   plan and events, as the data that is drawn
`remarks`    sentences on what stands out
`page`       that data as JSON, for the live view
`report`     the pass as text and as HTML
`watching`   watches the passes that a cell begins
===========  ==========================================
"""
