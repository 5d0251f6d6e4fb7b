"""The world, which is the group of agents that can call each other: how they meet, who they are, how it ends.

===========================  ===========================================================
`start`                      starts an agent and brings it into a world
`rendezvous`                 opens the store at which members meet
`tcp_store`, `meeting_file`  the stores of ``tcp://`` and ``env://``, and of ``file://``
`roster`                     the list of members in that store
`members`                    names, ids and incarnations, as one agent knows them
`handshake`                  what two agents exchange before any call
`watching`                   which members an agent watches, so that a loss is noticed
`clocks`                     how far another worker's clock is ahead
`shutdown`                   the orderly end: nobody leaves while anything is under way
===========================  ===========================================================
"""
