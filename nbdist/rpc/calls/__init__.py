"""The life of a call: `nbdist.rpc.core.exchange` decides what happens, and these modules encode, run and settle it.

=====================  ================================================
`waiting_reader`       lets the thread that waits for an answer read it
`collecting`           waits for several futures at once
`keyboard_interrupts`  Ctrl-C in waits that Python cannot end
`answers`              encodes the result, or the error
`executor`             runs the calls that arrive
`stopping`             ends a call that its caller has given up
`outcomes`             settles a call
`repeats`              sends a call again, with its definitions
`sender`               encodes and posts a call
`caller`               checks a call, and finds the callee
=====================  ================================================
"""
