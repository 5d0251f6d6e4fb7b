"""The handle of a backward pass that runs in the background."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from nbdist.autograd.passes.context import Run
from nbdist.autograd.recorder import Recorder
from nbdist.errors import Interrupted
from nbdist.rpc.futures import Future


class Handle:
    """A backward pass that runs in the background, as `backward_async` returns it.

    It can be awaited in a coroutine: ``await handle``.
    """

    def __init__(self, here: Recorder, run: Run, ended: Future[None]) -> None:
        self._passes = here.passes
        self._run = run
        self._outcome: Future[None] = Future()
        self._ended = ended
        ended.add_done_callback(self._end)

    def go(self) -> None:
        """Run the nodes that can run before other workers send gradients; a thread of the agent's pool calls this."""
        try:
            self._passes.go(self._run)
        except BaseException as error:  # `wait` raises it, whatever its class: nobody waits for this thread
            self._outcome.try_settle(None, error)

    def _end(self, done: Future[None]) -> None:
        error = done.exception()  # that of the pass, or of `cancel`
        if error is None:  # first, so that a thread which has waited finds the gradients in the context
            self._passes.commit(self._run)
        else:
            self._passes.give_up(self._run)
        self._outcome.try_settle(None, error)

    def wait(self) -> None:
        """Wait until the gradients are in the context; raises the error of the pass. Each later call does the same.

        Ctrl-C ends the wait only, and the pass continues: `cancel` ends it.
        """
        self._outcome.wait()
        self._passes.let_read(self._run)

    def done(self) -> bool:
        """Return whether the pass has ended, with its gradients or by an error."""
        return self._outcome.done()

    def cancel(self) -> None:
        """Give the pass up on all workers; `wait` then raises `nbdist.Interrupted`. Does nothing after the end."""
        error = Interrupted(
            "the backward pass was cancelled, by cancel() of its handle, and left no gradients in the context. Before "
            "another pass, run the forward pass again, unless retain_graph has kept the graph"
        )
        self._ended.try_settle(None, error)

    def __await__(self) -> Generator[Any, None, None]:
        return self._outcome.__await__()
