"""Channels, which move frames between agents. Each channel implements the contract in `contract`.

==================  ======================================================================
`after_fork`        lets a forked process release what belongs to its parent
`contract`          the contract between an agent and its channel
`faulty`            a channel that injects faults into another one
`gate`              wakes sleeping threads, unless another thread reads alone
`inprocess`         the channel of agents in one process, for tests
`machine`           how much of its machine this process may use
`assembly`          cuts a large message into chunks, and joins them: pure
`framing`           cuts messages out of a stream of bytes
`local_link`        sends over unix sockets, and queues what they have no room for
`locked_file`       a file that several processes change in turn
`resources`         explains which resource of the system is used up
`process_watch`     reports the end of a process of this host
`secret`            the keys of a cluster, and the user's runtime directory
`locked_directory`  a directory that shows by a lock whether its owner lives
`shared_memory`     the memory in which large tensors travel on one host
`spinning`          whether a waiting thread polls first
`zeromq_links`      links over ZeroMQ, for small messages and for large ones
`large_inbox`       puts the chunks of large messages together
`zeromq`            the channel between hosts
`door`              a socket for processes without the members' secret
`entrance`          the socket at which processes of other hosts ask to be let in
`local`             the channel that agents use: unix sockets on one host, else `zeromq`
==================  ======================================================================
"""
