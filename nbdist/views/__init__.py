"""Tables, pictures and live views of a cluster, for the notebook.

=================== =========================================================================================
room or module      shows
=================== =========================================================================================
`workers`           the workers of a cluster: `%dist_status`, `%dist_panel`, `%dist_memory`, `%dist_log` …
`passes`            backward passes: `%%watch`, reports, remarks
`timeline`          `cluster.timeline()`: when each worker did what
`drawing`           graphs and timelines as SVG
`cards`             remote references; `references` collects what is known of them
`map`               a swarm: which worker has which blocks
`widgets`           the live forms of references, passes, panels and swarms; `shown` puts a picture behind each
`displays`          registers the views with IPython, so that values of cells show themselves
`tables`            rows with a head, as text and as HTML
=================== =========================================================================================
"""
