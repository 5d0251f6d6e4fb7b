"""The layer of bytes: messages, the encoding of values as frames, and the protocol with one peer. All of it is pure.

===========  ================================================================
`devices`    the device of the receiver for each tensor of a message
`history`    joins the tensors of a recorded message to the receiver's graph
`messages`   the typed headers of all messages
`plain`      values that cannot carry code, for messages of strangers
`tensors`    tensors as raw bytes and a few integers
`encoded`    an encoded value: its frames, and the header that describes them
`peer`       handles each message of one other agent once, in any order
`pickling`   the values that need a pickler
`quick`      the usual arguments and results, without a pickler
`encoding`   chooses the cheapest way that can carry a value
`decoding`   rebuilds values, early in the reading thread or later in a job
`codec`      the functions of the two, under one name
===========  ================================================================
"""
