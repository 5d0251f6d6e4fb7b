"""Names the frames of cells: ``In[3] on worker1`` instead of the name of a generated file.

IPython compiles a cell under a file name that tells a reader nothing, in a directory of its process. Only the process
that compiled a cell knows the cell's number. So a worker renames the frames of cells that it ran. The notebook renames
the frames of functions that were defined in its own cells and sent to workers.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import traceback
import warnings
from functools import partial
from types import TracebackType
from typing import Any

from ipykernel.compiler import get_file_name
from IPython import core
from IPython.core.interactiveshell import InteractiveShell

from nbdist.cluster.jupyter.versions import name_files, show_notes, store_source
from nbdist.code_lines import CodeLine
from nbdist.code_places import CELLS, NBDIST, is_nbdists, is_of_cell, is_pythons, shown_name
from nbdist.errors import NbdistError, UsageError

# A frame in a text of Python's faulthandler: file, line and function.
_FAULT_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
# A frame in a formatted traceback of Python: indent, file, line, function and source line.
_FRAME = re.compile(r'^( *)File "([^"]+)", line (\d+)(, in .*)?\n?((?:\1  .*\n?)?)', re.MULTILINE)

_IPYTHON = f"{os.path.dirname(core.__file__)}/"  # the folder of IPython's code that runs cells and magics


_format_warning = warnings.formatwarning  # the user, or a library, may set another


class _Cells:
    """The cells that this process compiles."""

    def __init__(self) -> None:
        self.shell: Any = None  # the shell that runs the cells; None before `install`
        self.number: int | None = None  # of the cell that runs or ran last
        self.files: set[str] = set()  # of the cells; `CELLS` has those of functions that the process was sent, too

    def follow(self, shell: InteractiveShell) -> None:
        """Note the number of every cell that the shell compiles, for `cell_number` and for the names of files."""
        # Not the shell's own count: depending on IPython's version, that belongs to this cell or to the next one.
        self.shell = shell
        cache: Any = shell.compile.cache
        CELLS.clear()
        CELLS.update(getattr(shell.compile, "_filename_map", {}))  # of cells before this one; IPython 8.0
        self.files = set(CELLS)

        def noting(transformed: str, number: int = 0, *args: Any, **kwargs: Any) -> Any:
            self.number = number or self.number
            name: str = cache(transformed, number, *args, **kwargs)
            self.files.add(name)
            CELLS[name] = number or self.number or 0  # %%time and others compile their text without a number
            return name

        shell.compile.cache = noting  # type: ignore[method-assign, assignment]


_cells = _Cells()


# The number and the source of each cell that was sent to workers, by the name of its file there, without a folder.
_sent: dict[str, tuple[int, str]] = {}
_SENT_KEPT = 2000


def install(shell: InteractiveShell, worker: str | None) -> None:
    """Name the frames of cells by their numbers in this process; in a worker, add the worker's name. Call it once."""
    _cells.follow(shell)
    if threading.excepthook is threading.__excepthook__:  # else the user, or a library, has set one
        threading.excepthook = partial(_show_thread_error, f" on {worker}" if worker else "")
    if worker is None:
        return
    if warnings.formatwarning is _format_warning:
        warnings.formatwarning = _format_warning_of_cell
    name_files(shell, lambda file: f"Cell In[{CELLS[file]}] on {worker}" if file in CELLS else None)


def _show_thread_error(where: str, args: Any) -> None:
    """Print an error that ends a thread, as Python does, but with the numbers of cells in place of their files."""
    if args.exc_type is not SystemExit:
        text = "".join(traceback.format_exception(args.exc_value))
        text = re.sub(r'File "([^"]+)"', lambda m: f"Cell {shown_name(m[1])}{where}" if m[1] in CELLS else m[0], text)
        sys.stderr.write(f"Exception in thread {getattr(args.thread, 'name', '?')}:\n{text}")


def _format_warning_of_cell(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning as Python does, but with a cell's number in place of its file, which has a name of its own."""
    if filename not in CELLS:
        return _format_warning(message, category, filename, lineno, line)
    source = linecache.getline(filename, lineno) if line is None else line
    return _format_warning(message, category, shown_name(filename), lineno, source)


def cell_number() -> int | None:
    """Return the number of the cell that runs or ran last in this process; None before the first."""
    return _cells.number


def has_variable(name: str) -> bool:
    """Return whether this notebook has a variable of that name."""
    return _cells.shell is not None and name in _cells.shell.user_ns


def rename_frames(text: str, worker: str) -> str:
    """Return a traceback of ``worker`` in which this process's cells are named ``Cell In[3] on worker1``."""

    def rename(match: re.Match[str]) -> str:
        indent, file, line, function, source = match.groups()
        if file not in _cells.files:  # a function that was sent: who sent it has its source line
            return match[0]
        code = source.strip() or linecache.getline(file, int(line)).strip()
        shown = f"{indent}  {code}\n" if code else ""
        return f"{indent}Cell {shown_name(file)} on {worker}, line {line}{function or ''}\n{shown}"

    return _FRAME.sub(rename, text)


def note_sent(code: str, number: int) -> None:
    """Note the number of a cell that is sent to workers. If the same text is sent twice, the last number counts."""
    _sent[os.path.basename(get_file_name(code))] = number, code  # a digest of the code, in a directory of the process
    if len(_sent) > _SENT_KEPT:
        del _sent[next(iter(_sent))]


def _learn(file: str) -> str:
    # Let this process name and read a file as it does those of its own cells, if it is a cell's that was sent to a
    # worker. Only here, not for each cell that is sent: a program may send a million, and hardly one of them hangs.
    if is_of_cell(file) and (sent := _sent.get(os.path.basename(file))):
        CELLS[file], code = sent
        store_source(file, (len(code), None, code.splitlines(keepends=True), file))
    return file


def read_frames(text: str) -> list[CodeLine]:
    """Return the frames but nbdist's, innermost first, in a text that Python's faulthandler has written in a worker."""
    found = [CodeLine(_learn(file), int(line), function) for file, line, function in _FAULT_FRAME.findall(text)]
    return [each for each in found if not each.file.startswith(NBDIST)]


def rename_cell_frames(text: str, worker: str) -> str:
    """Return a text of a worker in which names such as ``Cell In[3] on worker1`` replace the files of cells."""

    def rename(match: re.Match[str]) -> str:
        return f"Cell {shown_name(match[1])} on {worker}" if _learn(match[1]) in CELLS else match[0]

    return re.sub('File "([^"]+)"', rename, text)


def is_cell(file: str, code: str) -> bool:
    """Return whether ``file`` is the name under which a worker has compiled this cell."""
    return bool(os.path.basename(file) == os.path.basename(get_file_name(code)))


def trim_tracebacks(shell: Any) -> None:
    """Make a shell show nbdist's errors, interrupts and errors from workers without the frames inside this package.

    A UsageError is shown without its cause as well. Call it once for a shell.
    """
    show_notes(shell)
    shown: Any = shell.InteractiveTB.structured_traceback

    def structured_traceback(kind: Any, error: Any, tb: Any = None, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(error, NbdistError | KeyboardInterrupt)
        for last in traceback.extract_tb(tb)[-1:]:  # the package refuses an argument: this is no error inside of it
            ours |= isinstance(error, TypeError) and is_nbdists(last.filename) and str(last.line).startswith("raise ")
        if ours or any(note.startswith("raised on ") for note in getattr(error, "__notes__", ())):
            _leave_out_our_frames(tb)
        if not isinstance(error, UsageError):
            return shown(kind, error, tb, *args, **kwargs)
        # The text of a UsageError says all: its cause, inside of this package, is not shown.
        before = error.__cause__, error.__suppress_context__
        error.__cause__ = None
        error.__suppress_context__ = True
        try:
            return shown(kind, error, tb, *args, **kwargs)
        finally:
            error.__cause__, error.__suppress_context__ = before

    shell.InteractiveTB.structured_traceback = structured_traceback


def _leave_out_our_frames(tb: TracebackType | None) -> None:
    """Leave this package's frames out of a traceback, but its first ones, with those of Python's that they call."""
    last, ours = None, False
    while tb is not None:
        file, following = tb.tb_frame.f_code.co_filename, tb.tb_next
        # Frames of IPython by which a cell comes to a magic are left out as well; IPython 7 shows them.
        ours = file.startswith((NBDIST, _IPYTHON, "<decorator-gen-")) or (ours and is_pythons(file))
        if not ours:
            if last is not None:
                last.tb_next = tb
            last = tb
        tb = following
    if last is not None:
        last.tb_next = None
