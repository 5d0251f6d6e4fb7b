"""Tools for tests: agents in one process, channels that fail on purpose, a clock that the test moves, launchers.

===========  ==========================================================================
`world`      agents in one process, with faults; a clock
`launchers`  the tests that every launcher passes
===========  ==========================================================================

>>> with World(2, faults=Faults(drop={"*": 0.1}, duplicate={"*": 0.1})) as world:
...     with world[0].activate():
...         rpc.rpc_sync("worker1", max, args=(1, 2))
2

`Faults` names messages by the words of `nbdist.wire.messages.Message.kind`: ``call``, ``remote``, ``fetch``,
``method``, ``reply``, ``ack``, ``ping``, ``fork_request``, ``user_delete`` and so on. The release of a reference is a
``user_delete`` only if it is sent in a message of its own. Most releases travel with another message, and are dropped
or delayed with that message.
"""

from nbdist.channel.faulty import Faults, FaultyChannel
from nbdist.channel.inprocess import InProcessChannel, Network
from nbdist.testing.launchers import LauncherContract
from nbdist.testing.world import ManualClock, World

__all__ = ["Faults", "FaultyChannel", "InProcessChannel", "LauncherContract", "ManualClock", "Network", "World"]
