"""Pickles the values that the quick way (`nbdist.wire.quick`) cannot encode, and rebuilds them.

===============  ==========================================================
`names`          names functions and classes of modules for other processes
`definitions`    functions and classes of ``__main__``, and their digests
`stand_ins`      the functions to which pickled bodies refer
`registered`     types and reducers that higher layers add
`culprit`        finds the part of a value that cannot be pickled
`scripts`        recognises code of TorchScript
`large_values`   warns about large values that travel with functions
`classes`        rebuilds classes that came by value
`pickler`        pickles any value
`unpickler`      rebuilds what `pickler` has pickled
===============  ==========================================================
"""
