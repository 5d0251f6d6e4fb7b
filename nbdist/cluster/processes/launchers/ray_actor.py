"""`RayActor`: what runs in the process that Ray starts for a worker. It imports neither torch nor the launchers.

The class is apart from `RayLauncher` for that: Ray imports its module in every actor, and torch would take seconds and
200 MB of memory in each of them, for nothing.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

__all__ = ["RayActor", "address_of_this_node"]


class RayActor:
    """The actor of one worker: it starts the keeper, and waits for its end."""

    def run(self, invitation: bytes) -> int:
        """Run a keeper with this invitation; return its exit code. It has this actor's GPUs and environment."""
        host = address_of_this_node()
        command = [sys.executable, "-m", "nbdist", "worker", "--connect", "-", "--with-parent"]
        keeper = subprocess.Popen([*command, "--host", host], stdin=subprocess.PIPE, start_new_session=True)
        keeper.communicate(invitation)
        return keeper.returncode


def address_of_this_node() -> str:
    """Return the address by which the other nodes of Ray's reach this one. This process must be connected to Ray."""
    import ray

    find: Any = ray.util.get_node_ip_address
    return str(find())
