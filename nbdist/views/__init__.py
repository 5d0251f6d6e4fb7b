"""Tables, pictures and live views of a cluster, for the notebook.

=================== ===========================================================================================
module              shows
=================== ===========================================================================================
`workers`           the workers of a cluster: `%dist_status`, `%dist_panel`, `%dist_memory`, `%dist_log` …
`passes`            backward passes: `%%watch`, reports, remarks
`timeline`          `cluster.timeline()`: the work of each worker over time
`drawing`           graphs and timelines as SVG
`cards`             remote references; `references` collects the facts about them
`map`               a swarm: which worker has which blocks
`widgets`           the live forms of references, passes, panels and swarms; `shown` puts a picture behind each
`displays`          registers the views with IPython, so that values of cells show themselves
`tables`            rows with a head, as text and as HTML
=================== ===========================================================================================
"""
