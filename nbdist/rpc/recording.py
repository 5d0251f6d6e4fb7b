"""The interface through which an agent tells an autograd recorder which tensors its messages carry.

`nbdist.autograd` has the recorder, and each agent makes one by `nbdist.registry`. This layer does not know what a
recorder does. When a message is sent, this layer gives the recorder the tensors that require grad. When a message has
arrived, it lets the recorder join the tensors to the graph, so that gradients can flow back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from nbdist.wire.messages import Recording

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Joins the tensors that a message brought to this process's graph: takes them and returns them with their history."""


class Served(Protocol):
    """The methods of an autograd recorder that modules of `nbdist.rpc.calls` call to serve a call, or for an answer.

    In all methods, ``recording`` is the note that the sender's recorder put into the message, ``context`` an autograd
    context of this worker, ``sender`` or ``to`` the other agent's incarnation, and ``function`` the name of the
    function that was called, for displays.
    """

    def enter(self, recording: Recording, sender: int) -> Any:
        """Return the context of a message that has arrived; None if it is over: its tensors get no history then."""

    def incoming(self, context: Any, recording: Recording, sender: int, function: str) -> Attach:
        """Return the function that joins the tensors of a message from ``sender`` to the graph here.

        The decoder calls that function with the recorded tensors, and uses the tensors that it returns.
        """

    def looks(self, context_id: int) -> bool:
        """Return whether that function reads whole tensors, so that decoding takes long, and belongs in a job."""

    def outgoing(self, context: Any, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Record that tensors go to an agent in a call or its answer; return the note for the message.

        ``tensors`` has the tensors that require grad; it may be empty.
        """

    def running(self, context: Any, recording: Recording) -> AbstractContextManager[None]:
        """Return a context manager that puts this thread into the context, and into the caller's gradient mode."""


class Calling(Protocol):
    """The methods of an autograd recorder that `nbdist.rpc.calls.sender` calls when a call is sent."""

    def current(self) -> Any:
        """Return the autograd context of the calling thread; None outside of any. Every call asks this first."""

    def outgoing(self, context: Any, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Record tensors, as `Served.outgoing` does. If the message is not sent, `withdraw` must follow."""

    def withdraw(self, recording: Recording) -> None:
        """Forget a recording whose message was not sent. Nothing happens if its context is over."""

    def warn(self, function: str, worker: str) -> None:
        """Warn the user, once for each line of code, that tensors which require grad leave outside of any context."""


class CallRecorder(Calling, Served, Protocol):
    """All methods of an autograd recorder. Each part of the agent knows only one of the smaller protocols."""

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward pass in a context from a tensor on this worker, for `RRef.backward`, and wait for its end."""
