"""Adds ipyparallel's magics ``%px``, ``%%px``, ``%autopx``, ``%pxresult`` and ``%pxconfig``, on top of nbdist's."""

from __future__ import annotations

from typing import Any

from IPython import get_ipython

from nbdist.errors import UsageError
from nbdist.magics.reader import Reader
from nbdist.magics.session import NotebookSession

_USAGE = "%%px [-t TARGETS] [-a] [--block] [--local] [--group-outputs=engine] [-o NAME] [--progress-after SECONDS]"


def _read(line: str) -> dict[str, Any]:
    """Return the options of a line of ``%%px``, by their long names. Raises UsageError for a wrong line."""
    reader = Reader(_USAGE, "-a --noblock", "--local", "--stream", "--no-stream", "-v --verbose")
    for option in ("-t --targets", "-o --out", "-g --group-outputs", "-p --progress-after"):
        reader.add_argument(*option.split())
    # The same entry as --noblock: of the two, the last one counts.
    reader.add_argument("--block", dest="noblock", action="store_false")
    return {name.replace("_", "-"): value for name, value in vars(reader.read(line)).items()}


class Px:
    """The magics ``%px``, ``%autopx`` and so on, for some engines."""

    def __init__(self, shell: Any, targets: str) -> None:
        """Make the magics for ``targets``, a target of ``%%remote``, which a line of ``%%px`` can override."""
        self._shell, self._defaults = shell, f"--targets={targets}"
        self._last: Any = None

    def px(self, line: str, cell: str | None = None) -> Any:
        """Run a line or a cell on the engines, as ``%%remote`` does. Options are read after ``%%px`` only.

        -t names other engines for this cell. -a returns at once, with a handle; ``%pxresult`` waits for the cell.
        --local runs the cell in the notebook, too. UsageError for a wrong option.

        %%px [-t TARGETS] [-a] [--local] [--group-outputs=engine] [-o NAME] [--progress-after SECONDS]
        """
        asked = _read(self._defaults if cell is None else f"{self._defaults} {line}")
        flags = [f"--{name}" for name in ("noblock", "local", "group-outputs") if asked[name]]
        values = [f"--{name}={asked[name]}" for name in ("out", "progress-after") if asked[name]]
        words = " ".join([asked["targets"], *flags, *values])
        handle = self._shell.run_cell_magic("remote", words, line if cell is None else cell)
        self._last = handle if asked["noblock"] else self._last
        return handle

    def autopx(self, line: str) -> None:
        """Switch between running cells without a magic on all engines and in the notebook, as ``%dist_mode`` does."""
        self._shell.run_line_magic("dist_mode", "-d" if NotebookSession.of(self._shell).everywhere else "-e")

    def pxresult(self, line: str) -> None:
        """Wait for the last cell that was sent with ``--noblock``. Its output appears below that cell.

        Raises UsageError if there is none, and the cell's error if it failed.
        """
        if self._last is None:
            raise UsageError("%pxresult has no cell to wait for: none was sent with %%px --noblock")
        self._last.wait()

    def pxconfig(self, line: str) -> None:
        """Set options, as of ``%%px``, for each ``%px`` and ``%%px`` from now on.

        Raises UsageError for a wrong line.
        """
        _read(line)  # raises if the line is wrong
        self._defaults += f" {line}"


def activate(targets: str = "all", suffix: str = "") -> None:
    """Add the magics for some engines, or all, to the notebook. Their names end with the suffix.

    Raises UsageError outside of IPython.
    """
    shell: Any = get_ipython()
    if shell is None:
        raise UsageError("%px needs a notebook, and this program has none; view.execute(code) runs code on engines")
    shell.extension_manager.load_extension("nbdist")
    px = Px(shell, targets)
    shell.register_magic_function(px.px, "line_cell", "px" + suffix)
    for name in ("autopx", "pxresult", "pxconfig"):
        shell.register_magic_function(getattr(px, name), "line", name + suffix)
