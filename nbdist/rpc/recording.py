"""What an agent lets a recorder do with its messages, so that gradients can flow back where tensors went.

The recorder is `nbdist.autograd`'s, and `nbdist.registry` knows how to make one. This layer does not know what it
records; it hands over the tensors of a message that require grad when one is sent, and has them made by the recorder
when one has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from nbdist.wire.messages import Recording

__all__ = ["Attach", "Calling", "Recorder", "Replied", "Served"]

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Makes the tensors that a message brought part of the graph here."""


class Replied(Protocol):
    """The methods of a recorder that `nbdist.rpc.outcomes` calls where an answer comes."""

    def enter(self, recording: Recording, sender: int) -> Any:
        """Return the context of a message that has come; None if it is over."""

    def incoming(self, context: Any, recording: Recording, sender: int, function: str) -> Attach:
        """Return what makes the tensors of a message that has come part of the graph here."""


class Served(Replied, Protocol):
    """The methods of a recorder that `nbdist.rpc.executor` and `nbdist.rpc.answers` call to run a function."""

    def outgoing(self, context: Any, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Record that tensors go to an agent, as part of a call of a function or of its answer."""

    def running(self, context: Any, recording: Recording) -> AbstractContextManager[None]:
        """Return what to enter around a function that was called in a context."""


class Calling(Protocol):
    """The methods of a recorder that `nbdist.rpc.sender` calls where a call is sent."""

    def current(self) -> Any:
        """Return the context in which the calling thread is; None if in none."""

    def outgoing(self, context: Any, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Record that tensors go to an agent, as part of a call of a function or of its answer."""

    def withdraw(self, recording: Recording) -> None:
        """Forget a recording: its message was not sent."""

    def warn(self, function: str, worker: str) -> None:
        """Warn that tensors which require grad are sent outside of any context."""


class Recorder(Calling, Served, Protocol):
    """All methods of an agent's recorder. A part of the agent knows one of the smaller Protocols instead."""

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward pass from a referenced value."""
