"""The record of a forward pass: torch's graph on each worker, and the edges between workers.

==============  ==============================================================
`parameters`    the names of leaves
`inherited`     a NaN that came from the forward pass, as data and in words
`measuring`     measures a node's gradients
`edges`         the two ends of an edge between workers
`walk`          goes over torch's graph, node by node
`numbers`       the numbers by which nodes are shown
`saved`         reads the tensors that nodes have saved
`hooks`         the user's hooks on a node, and what a checkpoint computes again
`origins`       which module and which line made a node
`countdown`     keeps an engine call going until nodes on all devices have run
`forward_nans`  the operation that made the first NaN of a forward pass
`noting`        notes the origins while the forward pass runs
`messages`      the messages of contexts and passes
`transport`     sends and receives them for one agent
`events`        what a watched pass shows, as data
`traces`        all of it as plain data
==============  ==============================================================
"""
