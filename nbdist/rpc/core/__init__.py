"""Decides about calls, references and members: no socket, no thread, no clock.

==========  ============================================================
`arrivals`  a call that has arrived at its callee
`forks`     counts references to a value, and decides what follows; pure
`members`   names, ids and incarnations, as one agent knows them
`pending`   the calls that have no answer yet
`exchange`  decides the next step of calls and references
`watching`  chooses the members on other hosts that an agent watches
==========  ============================================================
"""
