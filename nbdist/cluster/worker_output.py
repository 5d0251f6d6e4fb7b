"""Sends what runs in a worker for somebody's cell to that cell, also what runs in RPC threads.

Every call carries its *origin*: the id of the message with which the cell began whose work this is. While a
function runs for an RPC, that message is the parent of all output of its thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.rpc.agent import Agent

__all__ = ["FENCE", "METADATA", "fence", "follow", "install", "take_last_value"]

METADATA = "nbdist"
"""The key, in the metadata of an execute request, of what the notebook says about its cell."""

FENCE = "nbdist_fence"
"""The type of a message that only says that nothing is to come from before it."""

_shell: Any = None
_keep: set[str] = set()
_values: dict[str, Any] = {}


def install(shell: InteractiveShell) -> None:
    """Number cells as the notebook does, and keep the values that it will ask for."""
    global _shell
    _shell = shell
    shell.input_transformers_cleanup.append(_number)  # what comes before the shell looks at its own count
    shell.events.register("post_run_cell", _after)


def follow(agent: Agent) -> None:
    """Give calls that this worker makes their origin, and the output of calls that it runs to theirs."""
    agent.origin = _origin
    agent.around = _as_part_of


def fence(token: str) -> None:
    """Tell the notebook, behind all output so far, that there is no more of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    kernel = _shell.kernel
    kernel.session.send(kernel.iopub_socket, FENCE, {"token": token}, ident=FENCE.encode())


def _told() -> tuple[str, dict[str, Any]]:
    parent = _shell.parent_header or {}
    return parent.get("header", {}).get("msg_id", ""), parent.get("metadata", {}).get(METADATA, {})


def _number(lines: list[str]) -> list[str]:
    _, told = _told()
    if "number" in told:
        _shell.execution_count = told["number"]
    return lines


def _after(result: Any) -> None:
    id, told = _told()
    if told.get("keep") and result.success:
        _values[id] = result.result


def take_last_value(id: str) -> Any:
    """The value of the last expression of a cell that was sent with ``keep``; once."""
    return _values.pop(id, None)


def _origin() -> str:
    id, _ = _told()
    return id


@contextlib.contextmanager
def _as_part_of(origin: str) -> Iterator[None]:
    if not origin:
        yield
        return
    tokens = _shell.set_thread_parent({"header": {"msg_id": origin}})
    try:
        yield
    finally:
        _shell.reset_thread_parent(tokens)
