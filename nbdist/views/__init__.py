"""Tables, pictures and live views of a cluster, for the notebook.

=============== =============================================================================================
module          shows
=============== =============================================================================================
`status`        `%dist_status`: a table of the workers
`panel`         `%dist_panel`: the workers, sampled each second while somebody looks
`memory`        `%dist_memory`, `%dist_free`; `memory_rows` computes the rows
`difference`    `%dist_diff`: where a value differs between workers
`printed`       `%dist_log`: lines that workers have printed
`progress`      the workers while a cluster starts; `line` shows the current step of another long operation
`cards`         remote references; `references` collects what is known of them
`watching`      `%%watch`: backward passes; `backward` interprets what was seen, `remarks` says what stands out,
                `report` makes text and HTML of both, `scouts` watches contexts of other workers, `pace` decides
                how often
`timeline`      `cluster.timeline()`; `recording` runs on the workers, `wording` names their calls
`map`           a swarm: which worker has which blocks
`widgets`       the live forms of references, passes, panels and swarms; `shown` puts a picture behind each
`displays`      registers the views with IPython, so that values of cells show themselves
`clusters`      adds `timeline` to `Cluster`
`tables`        rows as text and HTML; `amounts` formats bytes and seconds; `intervals` computes with times
=============== =============================================================================================
"""
