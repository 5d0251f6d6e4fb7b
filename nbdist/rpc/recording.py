"""The interface through which an autograd recorder sees an agent's messages, so that gradients can flow back.

`nbdist.autograd` has the recorder, and `nbdist.registry` makes one for each agent. This layer does not know what a
recorder records. When a message is sent, it gives the recorder the tensors that require grad. When a message has come,
it has the recorder join them to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from nbdist.wire.messages import Recording

__all__ = ["Attach", "Calling", "CallRecorder", "Replied", "Served"]

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Joins the tensors that a message brought to this process's graph: takes them and returns them with their history."""


class Replied(Protocol):
    """The methods of a recorder that `nbdist.rpc.outcomes` calls when an answer comes."""

    def enter(self, recording: Recording, sender: int) -> Any:
        """Return the context of a message that has come; None if that context is over."""

    def incoming(self, context: Any, recording: Recording, sender: int, function: str) -> Attach:
        """Return the function that joins the tensors of a message from ``sender`` to the graph here."""


class Served(Replied, Protocol):
    """The methods of a recorder that `nbdist.rpc.executor` and `nbdist.rpc.answers` call for a call that has come."""

    def outgoing(self, context: Any, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Record that tensors go to an agent in a call of a function or its answer; return the note for the message."""

    def running(self, context: Any, recording: Recording) -> AbstractContextManager[None]:
        """Return the context manager to enter around a function that was called in a context."""


class Calling(Protocol):
    """The methods of a recorder that `nbdist.rpc.sender` calls when a call is sent."""

    def current(self) -> Any:
        """Return the autograd context of the calling thread; None outside of any."""

    def outgoing(self, context: Any, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Record that tensors go to an agent in a call of a function or its answer; return the note for the message."""

    def withdraw(self, recording: Recording) -> None:
        """Forget a recording whose message was not sent."""

    def warn(self, function: str, worker: str) -> None:
        """Warn the user that tensors which require grad are sent outside of any context: no gradient will come back."""


class CallRecorder(Calling, Served, Protocol):
    """All methods of an agent's recorder. Each part of the agent knows only one of the smaller protocols."""

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward pass in a context, from a tensor on this worker."""
