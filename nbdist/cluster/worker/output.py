"""Tells ipykernel, which sends a worker's output, to which cell it belongs, in RPC threads too; keeps values of cells.

Every call carries its *origin*, the key by which the notebook knows the cell that makes the call. While a function
runs for the call, the origin is the parent id of all output of its thread, and travels on with nested calls.

With each execute request the notebook sends a description of the cell, in the metadata under `METADATA`::

    number   the cell's number, for ``In[3]`` in tracebacks
    above    how many lines stand above the code in the page's cell
    keep     whether to keep the value of the last expression until `take_last_value` or `drop_value`
    origin   the key of the notebook's cell, for calls that this cell makes
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from IPython.core.autocall import IPyAutocall

from nbdist import trace
from nbdist.cluster.examination.imported_files import code_in_use
from nbdist.cluster.jupyter.jupyter_wire import COLLECTIVES, FENCE, NAMES
from nbdist.cluster.jupyter.page_lines import Page, follow_page
from nbdist.cluster.jupyter.versions import answer_in_thread, keep_output_apart, send_text
from nbdist.cluster.worker.collective_errors import raise_translated
from nbdist.cluster.worker.collectives import Collectives
from nbdist.errors import RemoteError, UsageError
from nbdist.rpc.api import current_agent
from nbdist.rpc.functions import async_execution
from nbdist.rpc.futures import Future

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.rpc.agent import Agent

METADATA = "nbdist"
"""The key, in the metadata of an execute request, under which the notebook describes the cell."""

# The types of requests that run user code, and so become the parent of its output.
_CAUSES = ("execute_request", "comm_open", "comm_msg", "comm_close")


class _Exit(IPyAutocall):
    """Takes the place of `exit` and `quit`: IPython's would end the kernel unnoticed."""

    rewrite = False

    def __call__(self, *_: object) -> None:
        raise UsageError(
            "a cell cannot end its worker: %dist_restart restarts a worker, and %dist_shutdown ends all workers"
        )


_exit: Any = _Exit()  # type: ignore[no-untyped-call]


class _CalledOff(Exception):
    """The error of a cell that was interrupted before it began; the notebook sees it as a KeyboardInterrupt."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt: the cell was interrupted before it began"]


# The kernel replies with the name of the error's class.
_CalledOff.__name__ = "KeyboardInterrupt"


class WorkerOutput:
    """The cells of a worker: their output, numbers and values. The notebook may call the methods in `METHODS`.

    Prepares a shell for cells, once in a process: defines the variables ``given``, and numbers cells as the notebook
    does. Cells end in the main thread; the notebook's calls run in RPC threads.
    """

    METHODS = ("call_off", "drop_value", "fence")

    def __init__(self, shell: InteractiveShell, given: Mapping[str, Any], collectives: Collectives) -> None:
        self._shell: Any = shell
        self._collectives = collectives
        self._names_given = frozenset(given)  # names such as ``rank``, which are no variables of the user's
        self._told: object = None  # the names and the modules that the notebook was sent last
        self.called_off: set[str] = set()
        """The requests of cells that must not run, and have not ended."""
        self.values: dict[str, Future[Any]] = {}
        """The kept values by the ids of their requests. A value may arrive before or after the request for it."""
        # True while the shell runs a silent request; `_told_of_cell` then still tells of the cell before.
        self._is_silent = False
        self._numbered = ""  # the id of the request whose number the shell has
        # Not interactive, so that `%who` does not list them.
        self._shell.push({**given, "exit": _exit, "quit": _exit}, interactive=False)
        shell.input_transformers_cleanup.append(self._number_cell)  # runs before the shell reads its own count
        self.running: list[tuple[str, float]] = []
        """The cell that runs, and when it began by `time.monotonic`; then a cell that this cell runs, and so on."""
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        keep_output_apart(shell)
        self._keep_parent()
        follow_page(self._shell.compile, self._page)

    def _keep_parent(self) -> None:
        """Keep the output of threads with the last cell when the kernel gets other requests, such as completion."""
        shell = self._shell
        plain = shell.set_parent
        undo: Callable[[], object] | None = None

        def set_parent(parent: dict[str, Any]) -> None:
            nonlocal undo
            # Ignored, since the output of a thread that a cell has started would be lost once the user presses Tab.
            if parent.get("header", {}).get("msg_type") not in _CAUSES:
                return
            if undo is not None:
                with contextlib.suppress(ValueError):  # the context of the silent request has ended
                    undo()
                undo = None
            self._is_silent = bool(parent.get("content", {}).get("silent"))
            if self._is_silent:
                # A silent request of the notebook's, such as to form the process group, is not shown. Only the output
                # of the main thread belongs to it; that of other threads stays with the last cell.
                undo = answer_in_thread(shell, parent)
            else:
                plain(parent)

        shell.set_parent = set_parent

    def follow(self, agent: Agent) -> None:
        """Make the agent send an origin with each call, and run each call that it serves as part of the call's origin.

        Called once, when the agent has started.
        """
        agent.know_cells(self._origin, self._as_part_of)
        agent.named.publish("output", self, *self.METHODS)

    def fence(self, token: str) -> None:
        """Send the notebook a message with the ``token``, behind all output so far."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._publish(FENCE, {"token": token})

    def _told_of_cell(self) -> tuple[str, dict[str, Any]]:
        """Return the id of the last cell's request, and the notebook's description of it; empty if there is none."""
        parent = self._shell.parent_header or {}
        return parent.get("header", {}).get("msg_id", ""), parent.get("metadata", {}).get(METADATA, {})

    def _before_cell(self, *_: object) -> None:
        number = self._told_of_cell()[1].get("number")
        self.running.append((f"In[{number}]" if number is not None else "cell", time.monotonic()))

    def call_off(self, id: str) -> None:
        """Make the cell with this request id fail, instead of running, unless it has begun."""
        self.called_off.add(id)

    def _page(self) -> Page | None:
        """Return the present cell's code and the lines above it in the notebook's cell; None if these are not known."""
        told = self._told_of_cell()[1]
        return Page(self._shell.parent_header["content"]["code"], told["above"]) if "above" in told else None

    def _number_cell(self, lines: list[str]) -> list[str]:
        """Give the shell the cell's number, before it compiles the lines; return the lines unchanged.

        Raises `_CalledOff`, in the notebook a KeyboardInterrupt, if `call_off` was called for the cell.
        """
        id, told = self._told_of_cell()
        if self._is_silent:  # not the cell that `_told_of_cell` tells of
            return lines
        # The id stays until the cell has ended: after an error the kernel transforms the cell again.
        if id in self.called_off:
            raise _CalledOff
        if "number" in told and id != self._numbered:  # once a cell: magics such as %%time transform their code as well
            self._shell.execution_count, self._numbered = told["number"], id
        return lines

    def _tell_names(self) -> None:
        """Send the notebook the names of the user's variables, which it completes, and the modules, which it compares.

        So it needs no answer of this worker, which may be busy, or has made no calls.
        """
        # Without names of IPython's own, but with those that every worker has, such as `rank`.
        hidden = self._shell.user_ns_hidden
        shown = [name for name in list(self._shell.user_ns) if name[:1] != "_"]
        names = [name for name in shown if name not in hidden or name in self._names_given]
        if (names, code := code_in_use()) != self._told:
            self._told = names, code
            self._publish(NAMES, {"names": names, "code": code})

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        # Past the stream's buffer: text that is not flushed comes later.
        kernel = self._shell.kernel
        kernel.session.send(kernel.iopub_socket, kind, content, ident=kind.encode())

    def _after_cell(self, result: Any) -> None:
        """Send the variables' names and the collectives, and keep the cell's last value if the notebook wants it."""
        for cell, start in self.running[-1:]:
            self.running.pop()
            if trace.listeners:
                trace.emit("cell.ran", agent=current_agent().me.name, cell=cell, start=start)
        id, told = self._told_of_cell()
        self.called_off.discard(id)
        self._tell_names()
        if (histories := self._collectives.news()) is not None:
            self._publish(COLLECTIVES, {"groups": msgspec.to_builtins(histories)})
        if told.get("keep"):
            error = result.error_before_exec or result.error_in_exec
            # A new error: the cell's own would keep the cell's frames alive, and with them their variables.
            failure = RemoteError(f"{type(error).__name__}: {error}") if error is not None else None
            self._value_of(id).try_settle(None if failure is not None else result.result, failure)

    def take_last_value(self, id: str) -> Future[Any]:
        """Return the future of the value of a cell's last expression; ``id`` is the id of the cell's request.

        Before or after the cell, which must have been sent with ``keep``. The value can be taken once: another future
        would never be settled. It fails with RemoteError if the cell fails.
        """
        value = self._value_of(id)
        value.add_done_callback(lambda _: self.values.pop(id, None))
        return value

    def drop_value(self, id: str) -> None:
        """Drop the value of a cell's last expression, which nobody will take. Called after the cell has ended."""
        self.values.pop(id, None)

    def _value_of(self, id: str) -> Future[Any]:
        """Return the future for the value of the cell with this request id; make one if there is none yet."""
        # In one step, because the main thread and an RPC thread may both be the first to ask for it.
        return self.values.setdefault(id, Future())

    def _origin(self) -> str:
        """Return the key of the cell to which the output of calls made now, in the calling thread, belongs."""
        send_text()  # before the call, whose function may print as well
        id, told = self._told_of_cell()
        return str(told.get("origin", id))

    @contextlib.contextmanager
    def _as_part_of(self, origin: str) -> Iterator[None]:
        """Return a block for a call's function, in which the output goes to the cell with the key ``origin``.

        Only the calling thread is affected. An empty origin, as of calls that no cell has made, changes nothing.
        torch's error of a dead member becomes WorkerLost or GroupError.
        """
        undo = answer_in_thread(self._shell, {"header": {"msg_id": origin}}) if origin else None
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise_translated(self._collectives, error)
            raise
        finally:
            if undo is not None:
                send_text()  # now, and not 0.2 s later, as ipykernel would
                undo()


@async_execution
def take_last_value(id: str) -> Future[Any]:
    """Return what `WorkerOutput.take_last_value` returns on this worker. Runs by RPC, also for an RRef to the value."""
    value: Future[Any] = current_agent().named.find("output").take_last_value(id)
    return value
