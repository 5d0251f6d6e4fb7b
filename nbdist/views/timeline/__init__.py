"""The timeline of a cluster: the work of each worker over time.

===========  ==================================================
`timeline`   `Timeline`, in the notebook: records, shows, saves
`recording`  the part of the recording on each worker
`wording`    names calls in words that users know
===========  ==================================================
"""
