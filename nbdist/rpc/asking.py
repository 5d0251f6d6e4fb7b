"""Asks several workers at once, and tells which of them answered, failed or kept silent.

::

    ask_each(agent, function, {"worker1": (1,), "worker2": (2,), "worker3": (3,)}, timeout=0.5)

    worker1  returns 10                     values["worker1"] is 10
    worker2  raises an error, or dies       errors["worker2"] is that error, or WorkerLost
    worker3  does not answer within 0.5 s   errors["worker3"] is an RpcTimeout, and `silent` names worker3

All calls are sent before this thread waits for the first answer, and none is pending once `ask_each` has returned or
raised: an answer that comes later is dropped.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import EncodeError, Interrupted, NbdistError, RpcTimeout
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import without_first_frame
from nbdist.rpc.latch import Latch

# Seconds after the time limit when `ask_each` gives up a call that cannot time out, because its clock is stopped.
_GIVEN_UP_AFTER = 0.2


@dataclass(eq=False, slots=True)
class WorkerAnswers:
    """The answers of several workers, by name, in the order in which the workers were asked."""

    values: dict[str, Any] = field(default_factory=dict)
    """The results of the workers that answered."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """The errors of all other workers: the function's own, or the reason why there is no answer."""
    silent: list[str] = field(default_factory=list)
    """The workers that did not answer in time. `errors` has an RpcTimeout for each."""

    def or_raise(self, but: type[Exception] | tuple[type[Exception], ...] = ()) -> dict[str, Any]:
        """Return the results by worker if no worker failed; else raise the first error, with a note of the others.

        A worker whose error is an instance of ``but`` is left out of the result instead.
        """
        errors = {worker: error for worker, error in self.errors.items() if not isinstance(error, but)}
        if not errors:
            return self.values
        first, *others = errors
        if others:
            told = "".join(f"\n  {worker}: {_first_line(errors[worker])}" for worker in others)
            errors[first].add_note(f"{len(others)} more worker{'s' if len(others) > 1 else ''} failed:{told}")
        try:
            raise errors.pop(first)
        finally:
            del self  # else the error would keep itself alive, through its traceback and this frame


def ask_each(
    agent: Agent, function: Any, arguments: Mapping[str, Sequence[Any]], *, timeout: float = -1.0, label: str = ""
) -> WorkerAnswers:
    """Call a function on several workers at once; wait until each has answered, failed, died or kept silent.

    A worker that is gone, or that this agent cannot reach, fails at once. Ctrl-C ends the wait, and all calls with it.

    Args:
        agent: The agent that makes the calls.
        function: The function, as in `nbdist.rpc.agent.Agent.call`.
        arguments: The arguments for each worker, by its name. ``dict.fromkeys(names, args)`` gives each the same.
        timeout: Seconds until a worker counts as silent, even while a paused backward pass stops the clocks of calls.
            0 for no limit. Negative for the agent's own limit, whose clock a paused pass stops.
        label: A name of the function for errors and displays, if not its own.

    Returns:
        The answers. Every worker of ``arguments`` is either in `WorkerAnswers.values` or in `WorkerAnswers.errors`.

    Raises:
        EncodeError: An argument cannot be sent. The workers called before run the function; their answers are dropped.
    """
    answers = WorkerAnswers()
    latches: dict[str, Latch] = {}
    given_up = time.monotonic() + timeout + _GIVEN_UP_AFTER
    try:
        for worker, args in arguments.items():
            try:
                latches[worker] = agent.caller.begin(worker, function, args, timeout, label)
            except EncodeError:  # the caller's fault, not a worker's
                raise
            except NbdistError as error:
                latches[worker] = unreached = Latch()
                unreached.try_settle(None, error.with_traceback(None))  # its frames would keep the arguments alive
        together = list(latches.values())
        read = agent.read_as_guest if timeout <= 0 else None  # a guest reads without a time limit
        for worker, latch in latches.items():
            left = max(0.0, given_up - time.monotonic()) if timeout > 0 else -1.0
            try:
                answers.values[worker] = latch.wait(read, left, together)
            except Exception as error:  # the function's own, whatever it is, or why there is no answer
                # Drop the frames of this function and of `Latch.wait`: they would keep the answers, and so the error.
                answers.errors[worker] = without_first_frame(without_first_frame(error))
                # An RpcTimeout that the function raised on the worker comes with a note of its traceback.
                if isinstance(error, RpcTimeout) and not getattr(error, "__notes__", ()):
                    answers.silent.append(worker)
                if not latch.is_settled:
                    answers.errors[worker] = RpcTimeout(
                        f"{worker} did not answer within {timeout:g} s, and may still do what it was asked to. Call "
                        "again when it is free: a paused backward pass has to go on first"
                    )
    except BaseException:  # Ctrl-C, mostly: no call may stay pending
        _give_up(agent, latches.values())
        raise
    if answers.silent:
        _give_up(agent, latches.values())
    return answers


def _give_up(agent: Agent, latches: Iterable[Latch]) -> None:
    """Fail the pending calls of these latches with Interrupted. Their workers may still run them."""
    own = set(map(id, latches))
    calls = [call for call in agent.pending.all() if id(call.outcome) in own]
    agent.outcomes.interrupt(calls, Interrupted("nobody waits for this call any more"))


def _first_line(error: Exception) -> str:
    return traceback.format_exception_only(error)[0].partition("\n")[0]
