"""Views of backward passes: choose the passes to watch, draw them, and say what stands out.

===========  ==========================================
`watching`   watches the passes that a cell begins
`scouts`     find contexts that other workers open
`pace`       which steps of a loop are watched
`backward`   plan and events, as the data that is drawn
`page`       that data as JSON, for the live view
`remarks`    sentences on what stands out
`report`     the pass as text and as HTML
`intervals`  arithmetic on spans of time
===========  ==========================================
"""
