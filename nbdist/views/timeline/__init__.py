"""The timeline of a cluster: the work of each worker over time.

=============  ====================================================
`wording`      names calls in words that users know
`taps`         events of torch's steps and batches, for a recording
`recording`    the part of the recording on each worker
`collectives`  joins what each worker has called to collectives
`timeline`     `Timeline`, in the notebook: records, shows, saves
=============  ====================================================
"""
