"""The timeline of a cluster: the work of each worker over time.

===========  ==================================================
`wording`    names calls in words that users know
`recording`  the part of the recording on each worker
`timeline`   `Timeline`, in the notebook: records, shows, saves
===========  ==================================================
"""
