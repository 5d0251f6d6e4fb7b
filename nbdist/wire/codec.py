"""Turns values into frames and back: the functions of the codec, under one name.

=============  =======================================================================================
module         subject
=============  =======================================================================================
`encoding`     any value to frames, in the cheapest way that can carry it
`decoding`     frames to the value, in the reading thread or later
`quick`        values of atoms, tensors and references: a pickle of the atoms, with holes; the usual call
               and the usual result, in one function each
`pickler`      any other value: exceptions, modules, TorchScript, definitions of ``__main__``, references
`unpickler`    reads what it has written (this and the following in `nbdist.wire.pickling`)
`stand_ins`    the objects in a pickled body that are written as names only
`definitions`  the functions and classes of ``__main__``: their names and digests
`registered`   the types and reducers that higher layers register with the codec
=============  =======================================================================================

An *atom* is None, a bool, an int, a float, a str or bytes. The *body* is the first frame after the envelope, a pickle
of protocol 5. Decoding runs code, as unpickling does; callers authenticate the sender first.
"""

from nbdist.wire.decoding import NOT_DECODED, decode, decode_early, decodes_quickly
from nbdist.wire.encoded import Encoded
from nbdist.wire.encoding import encode
from nbdist.wire.quick import encode_usual_call, encode_usual_result

__all__ = [
    "NOT_DECODED",
    "Encoded",
    "decode",
    "decode_early",
    "decodes_quickly",
    "encode",
    "encode_usual_call",
    "encode_usual_result",
]
