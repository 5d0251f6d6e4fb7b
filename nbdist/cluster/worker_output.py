"""Sends what runs in a worker for somebody's cell to that cell, also what runs in RPC threads.

Every call carries its *origin*: the id of the message with which the cell began whose work this is. While a
function runs for an RPC, that message is the parent of all output of its thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.autocall import IPyAutocall

from nbdist.cluster.page_lines import Page, follow_page
from nbdist.cluster.translating import raise_translated
from nbdist.errors import RemoteError, UsageError
from nbdist.rpc.functions import async_execution
from nbdist.rpc.futures import Future

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.rpc.agent import Agent

__all__ = ["FENCE", "METADATA", "NAMES", "call_off", "fence", "follow", "install", "take_last_value"]

METADATA = "nbdist"
"""The key, in the metadata of an execute request, of what the notebook says about its cell."""

FENCE = "nbdist_fence"
"""The type of a message that only says that nothing is to come from before it."""

_CAUSES = ("execute_request", "comm_open", "comm_msg", "comm_close")
"""The messages that run what puts something out."""

NAMES = "nbdist_names"
"""The type of a message that lists the user's names on a worker."""

_REMEMBERED = 1000

_shell: Any = None
_names_given: frozenset[str] = frozenset()
_names_told: list[str] = []
_called_off: dict[str, None] = {}
_values: dict[str, Future[Any]] = {}
_keeping = threading.Lock()
_numbered = ""


def install(shell: InteractiveShell, given: Mapping[str, Any]) -> None:
    """Give the user these names, number cells as the notebook does, and keep the values that it will ask for."""
    global _shell, _names_given
    _shell = shell
    _names_given = frozenset(given)
    _shell.push(dict(given), interactive=False)  # they are no variables of the user's, for `%who`
    _shell.push(dict.fromkeys(("exit", "quit"), _exit), interactive=False)
    shell.input_transformers_cleanup.append(_number)  # what comes before the shell looks at its own count
    shell.events.register("post_run_cell", _after)
    _keep_parent(shell)
    follow_page(_shell.compile, _page)


class _Exit(IPyAutocall):
    """Stands for `exit` and `quit`, also without brackets: IPython's end the kernel behind the notebook's back."""

    rewrite = False

    def __call__(self, *_: object) -> None:
        raise UsageError("a cell does not end its worker: %dist_restart starts it anew, and %dist_shutdown ends all")


_exit: Any = _Exit()  # type: ignore[no-untyped-call]


def _keep_parent(shell: Any) -> None:
    """Let the output of threads go on belonging to the last cell when the kernel is asked for completions and such."""
    plain = shell.set_parent

    def set_parent(parent: dict[str, Any]) -> None:
        if parent.get("header", {}).get("msg_type") in _CAUSES:
            plain(parent)

    shell.set_parent = set_parent


def follow(agent: Agent) -> None:
    """Give calls that this worker makes their origin, and the output of calls that it runs to theirs."""
    agent.know_cells(_origin, _as_part_of)


def fence(token: str) -> None:
    """Tell the notebook, behind all output so far, that there is no more of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    _publish(FENCE, {"token": token})


def _told() -> tuple[str, dict[str, Any]]:
    parent = _shell.parent_header or {}
    return parent.get("header", {}).get("msg_id", ""), parent.get("metadata", {}).get(METADATA, {})


def call_off(id: str) -> None:
    """Have a cell that has been sent and has not begun fail instead of running."""
    _called_off[id] = None
    if len(_called_off) > _REMEMBERED:
        del _called_off[next(iter(_called_off))]


def _page() -> Page | None:
    """Return the cell that runs, as far as the notebook has said where it is in the page's cell."""
    told = _told()[1]
    return Page(_shell.parent_header["content"]["code"], told["above"]) if "above" in told else None


class _CalledOff(Exception):
    """What a cell fails with that was interrupted before it began."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt: it was interrupted before it began"]


_CalledOff.__name__ = "KeyboardInterrupt"


def _number(lines: list[str]) -> list[str]:
    global _numbered
    id, told = _told()
    if id in _called_off:  # for good: the kernel transforms a cell again when that failed
        raise _CalledOff
    if "number" in told and id != _numbered:  # once: magics such as %%time transform what they run as well
        _shell.execution_count, _numbered = told["number"], id
    return lines


def _tell_names() -> None:
    """Tell the notebook which names there are, for completion while this worker is busy."""
    global _names_told
    hidden = _shell.user_ns_hidden
    names = [name for name in list(_shell.user_ns) if name[:1] != "_" and (name not in hidden or name in _names_given)]
    if names != _names_told:
        _names_told = names
        _publish(NAMES, {"names": names})


def _publish(kind: str, content: dict[str, Any]) -> None:
    kernel = _shell.kernel
    kernel.session.send(kernel.iopub_socket, kind, content, ident=kind.encode())


def _after(result: Any) -> None:
    id, told = _told()
    _tell_names()
    if told.get("keep"):
        value = _value_of(id)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            # Not the error itself, which would keep the frames of the cell, and what is in them.
            value.try_settle(None, RemoteError(f"{type(error).__name__}: {error}"))
        else:
            value.try_settle(result.result, None)


@async_execution
def take_last_value(id: str) -> Future[Any]:
    """The value of the last expression of a cell that was sent with ``keep``, as soon as it has run; once."""
    value = _value_of(id)
    value.add_done_callback(lambda _: _values.pop(id, None))
    return value


def _value_of(id: str) -> Future[Any]:
    with _keeping:
        if id not in _values:
            _values[id] = Future()
            if len(_values) > _REMEMBERED:
                # Those of cells that failed, mostly: nobody asks for their values.
                for old in [old for old, value in _values.items() if value.done()][: _REMEMBERED // 2]:
                    del _values[old]
        return _values[id]


def _origin() -> str:
    id, told = _told()
    return str(told.get("origin", id))


@contextlib.contextmanager
def _as_part_of(origin: str) -> Iterator[None]:
    """Run a call's function as part of the cell that caused it: the output goes there, and a dead member is named."""
    parent = {"header": {"msg_id": origin}}
    undo: Callable[[], object] | None = None
    if origin and hasattr(_shell, "set_thread_parent"):
        undo = partial(_shell.reset_thread_parent, _shell.set_thread_parent(parent))
    elif origin:
        undo = _set_parent_by_hand(parent)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise_translated(error)
        raise
    finally:
        if undo is not None:
            undo()


def _set_parent_by_hand(parent: dict[str, Any]) -> Callable[[], None]:
    """Do what `set_thread_parent` of ipykernel 7.4 does, in an older one; return what undoes that."""
    values: dict[Any, Any] = {_shell: parent}
    for source in (_shell.displayhook, _shell.display_pub, sys.stdout, sys.stderr):
        values[source] = parent["header"]
    resets = [(source._parent_header, source._parent_header.set(value)) for source, value in values.items()]

    def undo() -> None:
        for variable, token in resets:
            variable.reset(token)

    return undo
