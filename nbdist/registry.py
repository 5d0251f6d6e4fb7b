"""Functions through which a lower layer gets objects of a higher layer, without importing it.

`nbdist` itself, above all layers, sets them; each imports its layer when it is first called. So a worker takes part in
calls that are recorded for a backward pass, although its program never imported `nbdist.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["make_recorder"]

make_recorder: Callable[[Any], Any]
"""Returns the recorder of an agent, a `nbdist.rpc.recording.CallRecorder`, which the agent calls for each call."""
