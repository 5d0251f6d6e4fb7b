"""`RayActor`: the code in the process that Ray starts for a worker. Imports neither torch nor the launchers.

Ray imports this module in every actor. If it also held `RayLauncher`, every actor would import torch, which takes
seconds and 200 MB of memory, and never use it.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any


class RayActor:
    """The actor of one worker. It starts a keeper, the process that starts the worker, and waits for its end."""

    def run(self, invitation: bytes) -> int:
        """Run a keeper with this invitation; return its exit code. The keeper has the actor's GPUs and environment."""
        host = address_of_this_node()
        command = [sys.executable, "-m", "nbdist", "worker", "--connect", "-", "--with-parent"]
        keeper = subprocess.Popen([*command, "--host", host], stdin=subprocess.PIPE, start_new_session=True)
        keeper.communicate(invitation)
        return keeper.returncode


def address_of_this_node() -> str:
    """Return the address at which Ray's other nodes reach this one. This process must be connected to Ray."""
    import ray

    find: Any = ray.util.get_node_ip_address
    return str(find())
