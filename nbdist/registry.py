"""What a higher layer makes for a lower one, which knows of it only what is said here.

`nbdist` itself, above all layers, puts the makers in; each imports what it makes when it is first called. So a worker
takes part in what others record although its program never imported `nbdist.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["make_recorder"]

make_recorder: Callable[[Any], Any]
"""Returns the recorder of an agent, an `nbdist.rpc.recording.Recorder`; takes the agent."""
