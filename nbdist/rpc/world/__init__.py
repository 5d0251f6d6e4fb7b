"""The world is the group of agents that can call each other. How it forms, who its members are, and how it ends.

==============  ==============================================================
`shared_store`  the store of ``nbdist://``, in the memory of a notebook
`roster`        the list of members in that store
`handshake`     what two agents exchange before any call
`clocks`        how far another worker's clock is ahead
`survey`        when a round of ending the world is over
`shutdown`      the orderly end: no member leaves while calls are running
`meeting_file`  a text in a file that many processes change by compare-and-set
`tcp_store`     torch's TCPStore, at one address
`meeting`       opens the store at which members meet
==============  ==============================================================
"""
