"""A door for clients on other hosts, which are no members of the workers' world: they never get the members' secret.

::

    a client's process                    a member's process                           workers
    Crew, FarPlacer, FarWeights           Doorkeeper: reads each message, checks it,
        │ at(...).call                    and calls for the client                     NamedObjects: is the method
    Outside ─────── DoorLink ──────► Door ──► NamedObject.for_client ────────────────► published for clients?
            answers, news of servers ◄─────── outcomes of the calls, the crew's news

The doorkeeper relays. So the workers open no port, and clients reach no part of the agents' own protocol (members,
references, pickles, autograd). What passes is `nbdist.wire.plain`.

===================  ===========================================================
`client_invitation`  the file with the door's address, its key, and the secret
`doorkeeper`         the member's end
`outside`            the client's end, in the place of an agent
===================  ===========================================================
"""
