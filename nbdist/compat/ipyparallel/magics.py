"""``%px``, ``%%px``, ``%autopx``, ``%pxresult`` and ``%pxconfig``: ipyparallel's words for nbdist's own magics."""

from __future__ import annotations

from typing import Any

from IPython import get_ipython

from nbdist.compat.ipyparallel.views import DirectView
from nbdist.errors import UsageError
from nbdist.magics import lines
from nbdist.magics.session import Session

__all__ = ["activate"]

_USAGE = "%%px [-t TARGETS] [-a] [--block] [--local] [--group-outputs=engine] [-o NAME] [--progress-after SECONDS]"


def _read(line: str) -> dict[str, Any]:
    """Return the options of a line of ``%%px`` that were given, by name."""
    reader = lines.reader(_USAGE)
    for option in ("-t --targets", "-o --out", "-g --group-outputs", "-p --progress-after"):
        reader.add_argument(*option.split())
    for option in ("-a --noblock", "--block", "--local", "--stream", "--no-stream", "-v --verbose"):
        reader.add_argument(*option.split(), action="store_true")
    return {name: value for name, value in vars(reader.read(line)).items() if value}


class Px:
    """``%px`` and its kin for one view."""

    def __init__(self, shell: Any, view: DirectView | None) -> None:
        self._shell = shell
        self._view = view
        self._last: Any = None
        self._default: dict[str, Any] = {}

    def px(self, line: str, cell: str | None = None) -> Any:
        """Run a line or a cell on the engines: `%%remote` under ipyparallel's name.

        %%px [-t TARGETS] [-a] [--local] [--group-outputs=engine] [-o NAME] [--progress-after SECONDS]
        """
        asked = {**self._default, **(_read(line) if cell is not None else {})}
        noblock = "noblock" in asked and "block" not in asked
        words = [asked.get("targets") or self._engines()]
        words += ["-a"] * noblock + ["--local"] * ("local" in asked) + ["--group-outputs"] * ("group_outputs" in asked)
        for name in ("out", "progress_after"):
            words += [f"--{name.replace('_', '-')}", asked[name]] if name in asked else []
        handle = self._shell.run_cell_magic("remote", " ".join(words), line if cell is None else cell)
        self._last = handle if noblock else self._last
        return handle

    def _engines(self) -> str:
        return ",".join(map(str, self._view.targets)) if self._view is not None else "all"

    def autopx(self, line: str) -> None:
        """Run plain cells on the engines from now on, or in the notebook again: `%dist_mode -e` and `-d`."""
        on = Session.of(self._shell).everywhere
        self._shell.run_line_magic("dist_mode", "-d" if on else "-e")

    def pxresult(self, line: str) -> Any:
        """Wait for the last cell that was not waited for; its output appears below that cell."""
        if self._last is None:
            raise UsageError("no cell was sent with %%px --noblock")
        self._last.wait()

    def pxconfig(self, line: str) -> None:
        """Set what ``%px`` does unless a cell says something else: the options of ``%%px``."""
        self._default.update(_read(line))


def activate(view: DirectView | None, suffix: str = "") -> None:
    """Add the magics for a view, or for all engines, to the notebook; their names end with the suffix."""
    shell: Any = get_ipython()
    if shell is None:
        raise UsageError("%px needs a notebook; view.execute(code) runs code")
    if "nbdist" not in shell.extension_manager.loaded:
        shell.extension_manager.load_extension("nbdist")
    px = Px(shell, view)
    shell.register_magic_function(px.px, "line_cell", "px" + suffix)
    for name in ("autopx", "pxresult", "pxconfig"):
        shell.register_magic_function(getattr(px, name), "line", name + suffix)
