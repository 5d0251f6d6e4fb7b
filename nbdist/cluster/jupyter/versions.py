"""Bridges the versions of IPython, ipykernel and ipywidgets that the package runs on: all differences are here.

==============================  ====================  ================================================================
what                            new since             what older versions get
==============================  ====================  ================================================================
completers of one's own         IPython 8.6           `add_completer` wraps ``Completer.completions``
names for the files of cells    IPython 8.0           `name_files` renames them in the text of a traceback
one store for cells' texts      IPython 8.0           `store_source` writes to its second store as well
notes of errors in tracebacks   a later IPython 8     `show_notes` adds them to the text of a traceback
output by threads               ipykernel 7.0         `keep_output_apart` gives each thread a request of its own
``set_thread_parent``           ipykernel 7.4         `answer_in_thread` sets the variables that it would set
replies through the stream      ipykernel 7.4         `answer_through_stream`: requests got lost in 7.3
the thread that sent last       ipykernel 7.4         newer ones hand it a page's messages: `handle_where_sent`
styles of an HTML widget        ipywidgets 8          `html_style` returns the only style that there is
==============================  ====================  ================================================================

Each difference is recognised by the feature itself, not by the number of the version.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

# -- completion: IPython ------------------------------------------------------------------------


class Completions(NamedTuple):
    """The completions that a completer has found at a place in a cell."""

    names: Sequence[str] = ()
    fragment: str = ""
    """The text before the cursor that each of the names replaces."""
    kind: str = ""
    """A word for the names, such as "worker", which front ends show beside them."""
    alone: bool = False
    """True if IPython must not add its own completions, even if there are no names."""


class _Nothing(list[Any]):
    """An empty list of completions that suppresses the completions of other completers."""

    def __len__(self) -> int:
        """Return 1: IPython suppresses others' completions only for a completer whose list is not empty."""
        return 1


def add_completer(shell: Any, complete: Callable[[str, int], Completions]) -> Callable[[], None]:
    """Let ``complete`` add to the completions of a shell; return the function that removes it again.

    ``complete(text, cursor)`` gets a cell's whole text and the place of the cursor in it, in characters.
    """
    from IPython.core import completer

    add = _add_matcher if hasattr(completer, "context_matcher") else _wrap_completions
    return add(shell.Completer, complete)


def _add_matcher(completer: Any, complete: Callable[[str, int], Completions]) -> Callable[[], None]:
    # IPython 8.6 and later have completers of one's own.
    from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

    @context_matcher(identifier="nbdist")  # type: ignore[untyped-decorator, unused-ignore]
    def match(context: CompletionContext) -> SimpleMatcherResult:
        lines = context.full_text.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
        found = complete(context.full_text, cursor)
        completions = [SimpleCompletion(name, type=found.kind) for name in found.names]
        if not found.alone and not found.names:
            return SimpleMatcherResult(completions=[])
        return SimpleMatcherResult(
            completions=completions or _Nothing(), suppress=found.alone, matched_fragment=found.fragment
        )

    completer.custom_matchers.append(match)
    return partial(completer.custom_matchers.remove, match)


def _wrap_completions(completer: Any, complete: Callable[[str, int], Completions]) -> Callable[[], None]:
    # Older versions: our completions come before IPython's.
    from IPython.core.completer import Completion

    plain = completer.completions

    def completions(text: str, offset: int) -> Iterator[Any]:
        found = complete(text, offset)
        for name in found.names:
            yield Completion(offset - len(found.fragment), offset, name, type=found.kind)
        if not found.alone:
            yield from plain(text, offset)

    completer.completions = completions
    return partial(delattr, completer, "completions")


# -- tracebacks: IPython ------------------------------------------------------------------------


def active_autoreloader(shell: Any) -> Any:
    """Return the `ModuleReloader` of IPython's extension ``autoreload`` if it is switched on in a shell, else None."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(magics, "_reloader", None)
    return reloader if getattr(reloader, "enabled", False) else None


def name_files(shell: Any, name: Callable[[str], str | None]) -> None:
    """Make the shell's tracebacks show ``name(file)`` in place of a cell's file; None leaves the shell's own name."""
    compiler = shell.compile
    if hasattr(compiler, "format_code_name"):
        plain: Callable[[str], tuple[str, str] | None] = compiler.format_code_name

        def format_code_name(file: str) -> tuple[str, str] | None:
            kind, _, text = (name(file) or "").partition(" ")
            return (kind, text) if text else plain(file)

        compiler.format_code_name = format_code_name
        return
    files, colours = re.compile(r"\S*[/\\]ipykernel_\d+[/\\]\d+\.py"), re.compile(r"\x1b\[[0-9;]*m")

    def rename(found: re.Match[str]) -> str:
        return name(colours.sub("", found[0])) or found[0]

    _change_tracebacks(shell, lambda lines, _: [files.sub(rename, line) for line in lines])


def store_source(name: str, entry: tuple[int, float | None, list[str], str]) -> None:
    """Give Python's `linecache` the text of a file, as an entry of its cache."""
    linecache.cache[name] = entry
    if hasattr(linecache, "_ipython_cache"):  # from which older versions of IPython restore the texts of cells
        linecache._ipython_cache[name] = entry


def show_notes(shell: Any) -> None:
    """Make the shell's tracebacks show an error's notes (`BaseException.add_note`), as newer versions of IPython do."""

    def with_notes(lines: list[str], error: BaseException) -> list[str]:
        shown, notes = "\n".join(lines), getattr(error, "__notes__", ())
        if not isinstance(notes, list | tuple):  # a program may have put anything there
            return lines
        return [*lines, *(note for note in notes if isinstance(note, str) and note not in shown)]

    _change_tracebacks(shell, with_notes)


def _change_tracebacks(shell: Any, change: Callable[[list[str], BaseException], list[str]]) -> None:
    """Let ``change(lines, error)`` return the lines of each traceback that the shell shows."""
    plain = shell.InteractiveTB.structured_traceback

    def structured_traceback(kind: Any, error: Any, *args: Any, **kwargs: Any) -> Any:
        return change(list(plain(kind, error, *args, **kwargs)), error)

    shell.InteractiveTB.structured_traceback = structured_traceback


# -- widgets: ipykernel, ipywidgets -------------------------------------------------------------


def handle_where_sent(comm: Any) -> None:
    """Make ipykernel handle the page's messages for a comm in the thread that they are sent to."""
    # From version 7.4 on, ipykernel hands a message to the thread that published last, which may be busy with a cell.
    if hasattr(comm, "_reply_subshell_for"):
        # Replaces a method of the comm. ``default`` is the thread to which the page has sent the message.
        comm._reply_subshell_for = lambda _, default: default


def html_style() -> Any:
    """Return a new style for an `ipywidgets.HTML`. With ipywidgets 7 it has only the width of the description."""
    from ipywidgets.widgets import widget_description, widget_string

    kind: Any = getattr(widget_string, "HTMLStyle", widget_description.DescriptionStyle)
    return kind()


# -- the shell channel: ipykernel ---------------------------------------------------------------


def answer_through_stream(kernel: Any) -> None:
    """Make ipykernel 7.3 send its replies by the stream that reads the shell socket, as version 7.4 does.

    ipykernel 7.3 answers directly on the socket of its shell channel, past the stream that reads the socket. The stream
    then overlooks a request that arrives at that moment, and all later ones:
    https://github.com/ipython/ipykernel/pull/1529

    Call it in the kernel's main thread.
    """
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None and hasattr(thread.manager, "_shell_socket"):  # not in 7.4
        thread.manager._shell_socket = kernel.shell_stream


# -- the output of threads: ipykernel -----------------------------------------------------------


def answer_in_thread(shell: Any, parent: dict[str, Any]) -> Callable[[], None]:
    """Make the calling thread's output a reply to ``parent``, a Jupyter request; return a function that undoes it."""
    # `keep_output_apart` comes first, once for the shell.
    if hasattr(shell, "set_thread_parent"):
        return partial(shell.reset_thread_parent, shell.set_thread_parent(parent))
    undo = contextlib.ExitStack()
    if hasattr(shell, "_parent_header"):
        for source in _publishers(shell):
            variable = source._parent_header
            undo.callback(variable.reset, variable.set(parent if source is shell else parent["header"]))
    else:
        scope = _Scope(parent)
        undo.callback(scope.flush)
        undo.callback(_scope.reset, _scope.set(scope))
    return undo.close


def keep_output_apart(shell: Any) -> None:
    """Let each thread of a worker have a request of its own as the parent of its output. Once in a worker."""
    if hasattr(shell, "_parent_header"):  # ipykernel 7.0 and later can do this
        return
    # In older versions, one request is the parent of the output of all threads. So the class of the shell, and of each
    # object that publishes, changes: its ``parent_header`` becomes the request of the calling thread.
    for source in _publishers(shell):
        kind = _ApartStream if hasattr(source, "pub_thread") else _Apart
        parent = source.parent_header
        source.__class__ = type(type(source).__name__, (kind, type(source)), {})
        source.parent_header = parent


def send_text() -> None:
    """Have the text that the calling thread has printed sent at once; ipykernel keeps text for 0.2 s. Does not wait."""
    if (scope := _scope.get()) is not None:
        scope.flush()
    for stream in (sys.stdout, sys.stderr):
        own = getattr(stream, "__dict__", {})  # not by getattr: a stream of the user's may pass the kernel's through
        if own.get("_flush_pending") and own.get("pub_thread") is not None:
            own["pub_thread"].schedule(stream.flush)


def _publishers(shell: Any) -> tuple[Any, ...]:
    # Each has the request that its output answers.
    return shell, shell.displayhook, shell.display_pub, sys.stdout, sys.stderr


# The request that the calling thread's output answers, and its unsent text; None for the request of the cell.
_scope: ContextVar[_Scope | None] = ContextVar("nbdist_scope", default=None)


class _Scope:
    """A request that the output of one thread answers, and the text that waits to be sent."""

    def __init__(self, parent: dict[str, Any]) -> None:
        self.parent = parent
        self._lock = threading.Lock()
        self._waiting: dict[Any, list[str]] = {}

    def write(self, stream: Any, text: str) -> None:
        """Send text to a stream soon, together with later text."""
        with self._lock:
            first = stream not in self._waiting
            self._waiting.setdefault(stream, []).append(text)
        if first:
            loop, after = stream._io_loop, stream.flush_interval
            stream.pub_thread.schedule(lambda: loop.call_later(after, self.flush))

    def flush(self) -> None:
        """Send the text that waits. Any thread may call this."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            for stream, texts in waiting.items():
                content = {"name": stream.name, "text": "".join(texts)}
                stream.session.send(
                    stream.pub_thread, "stream", content, parent={"header": self.parent["header"]}, ident=stream.topic
                )


class _Apart:
    """Mixed into an object that publishes: gives the calling thread the request that its output answers."""

    _own_parent: Any  # the request, or its header, that the output of all other threads answers

    @property
    def parent_header(self) -> Any:
        """The request, for the shell, or its header, for all others."""
        if (scope := _scope.get()) is None:
            return self._own_parent
        return scope.parent if hasattr(self, "run_cell") else scope.parent["header"]

    @parent_header.setter
    def parent_header(self, parent: Any) -> None:
        object.__setattr__(self, "_own_parent", parent)


class _ApartStream(_Apart):
    """Mixed into a kernel's stream: keeps the text of a thread with a request of its own out of the common buffer."""

    def write(self, text: str) -> int:
        scope = _scope.get()
        if scope is None or self.pub_thread is None or not isinstance(text, str):  # type: ignore[attr-defined]
            return int(super().write(text) or 0)  # type: ignore[misc]
        scope.write(self, text)
        return len(text)

    def flush(self) -> None:
        """Send the buffered text, the calling thread's own text included."""
        if (scope := _scope.get()) is not None:
            scope.flush()
        super().flush()  # type: ignore[misc]
