"""The world is the group of agents that can call each other. How it forms, who its members are, and how it ends.

===========================  ===========================================================
`start`                      starts an agent and brings it into a world
`rendezvous`                 opens the store at which members meet
`tcp_store`, `meeting_file`  the stores of ``tcp://`` and ``env://``, and of ``file://``
`shared_store`               the store of ``nbdist://``, in the memory of a notebook
`roster`                     the list of members in that store
`members`                    names, ids and incarnations, as one agent knows them
`handshake`                  what two agents exchange before any call
`watching`                   which members an agent watches, so that a loss is noticed
`clocks`                     how far another worker's clock is ahead
`shutdown`                   the orderly end: no member leaves while calls are running
===========================  ===========================================================
"""
