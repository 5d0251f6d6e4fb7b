"""The timeline: when each worker did what.

===========  =============================
`timeline`   records, shows and saves
`recording`  the part of it on each worker
`wording`    names calls in a user's words
===========  =============================
"""
