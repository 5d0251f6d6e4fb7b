"""`Transport`: what contexts, passes and watches need of the agent."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from nbdist.autograd.graph.messages import PassMessage


class Transport(Protocol):
    """The methods of an agent's `Recorder` that lower modules call. Workers are named by their incarnations."""

    me: int
    """This worker."""
    name: str
    """This worker's name."""
    contexts: Any
    """The `Contexts` of this worker."""

    def name_of(self, worker: int) -> str:
        """Return the name of a worker."""

    def is_there(self, worker: int) -> bool:
        """Return whether this agent is still connected to a worker."""

    def tell(self, to: int, message: PassMessage, body: Any = None) -> None:
        """Send a message, with ``body`` as its payload, to a worker; drop it if the worker is gone."""

    def post(self, to: int, message: PassMessage, body: Any = None) -> None:
        """Send a message as `tell` does, but raise WorkerLost if the worker is gone."""

    def submit(self, job: Any) -> None:
        """Run a job, a function without arguments, on another thread; log its errors."""

    def noting(self, context: Any) -> AbstractContextManager[None]:
        """Return the block in which a thread notes lines of code, or looks for NaN, as the `Context` asks."""

    def freeze(self, context_id: int, frozen: bool) -> None:
        """Stop the clocks of all timeouts on all workers while a pass is paused, or start them again."""
