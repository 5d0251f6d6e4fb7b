"""The life of a call. `nbdist.rpc.exchange` decides what happens to a call; these modules encode, run and settle it.

======================  ======================================================
`caller`, `sender`      check, encode and post a call
`pending`               the calls that have no answer yet
`waiting_reader`        lets the thread that waits for an answer read it
`arrivals`, `executor`  a call that has arrived, and the part that runs it
`answers`, `failures`   encode the result, or the error
`outcomes`, `repeats`   settle the call, or send it again with its definitions
`stopping`              ends a call that its caller has given up
`collecting`            waits for several futures at once
`streams`               CUDA streams that compute the value of a future
`keyboard_interrupts`   Ctrl-C in waits that Python cannot end
======================  ======================================================
"""
