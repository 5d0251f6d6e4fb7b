"""The use of GPUs that several layers share. Nothing here starts CUDA in a process that does not use it.

==============  ======================================================================
`order`         the order of a copy in chunks, by way of two pinned buffers (pure)
`staging`       copies large tensors between a GPU and the host's memory in that order
`pinned`        the calls of ``torch.cuda`` for it: pinned memory, a stream, events
`side_streams`  lets threads with different current streams work on the same tensors
`spans`         how long work takes on a GPU, by pairs of events
==============  ======================================================================
"""
