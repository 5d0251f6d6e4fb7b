"""Runs notebooks that were written for ipyparallel, with one line changed, and prints a table of what each does.

The notebooks are not ours and not in this repository. ``NBDIST_NOTEBOOKS`` names a folder that has them, such as
``docs/source/examples`` of a checkout of github.com/ipython/ipyparallel:

    NBDIST_NOTEBOOKS=ipyparallel/docs/source/examples python tests/public_notebooks.py --write docs/notebooks.md

In each notebook the first ``import ipyparallel`` becomes ``%load_ext nbdist.compat.ipyparallel``. A cell does not run
if it raises, unless it raised when its notebook was saved.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

from nbdist import __version__

VARIABLE = "NBDIST_NOTEBOOKS"
LOAD = "%load_ext nbdist.compat.ipyparallel"
_IMPORT = re.compile(r"^import ipyparallel.*$", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CELL_TIMEOUT = 60
_LONGEST = 110
"""Letters of an error in the table."""


@dataclass
class Run:
    """How a notebook went."""

    name: str
    changed: int = 0
    cells: int = 0
    ended: int = 0
    failed: list[str] = field(default_factory=list)
    """Of each cell that does not run: its number among the code cells, and its error."""


def change(notebook: Any) -> int:
    """Load the extension instead of importing ipyparallel; return how many lines were changed."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and _IMPORT.search(cell.source):
            cell.source = _IMPORT.sub(LOAD, cell.source, count=1)
            return 1
    return 0


def has_raised(cell: Any) -> bool:
    """Return whether a cell has an error among its outputs."""
    return any(output.output_type == "error" for output in cell.outputs)


def run(path: Path, root: Path) -> Run:
    """Run a notebook in its own folder and a new kernel, to its end whatever its cells raise."""
    notebook: Any = nbformat.read(path, as_version=4)
    found = Run(str(path.relative_to(root)), change(notebook))
    expected = [has_raised(cell) for cell in notebook.cells if cell.cell_type == "code"]
    kernels: Any = AsyncKernelManager(kernel_name="python3")
    kernels.kernel_spec.argv[0] = sys.executable
    client = NotebookClient(
        notebook,
        km=kernels,
        timeout=_CELL_TIMEOUT,
        allow_errors=True,
        interrupt_on_timeout=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    died = ""
    try:
        client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    except (CellTimeoutError, DeadKernelError) as error:
        died = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found.cells = len(code)
    for number, (cell, may) in enumerate(zip(code, expected, strict=True), 1):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if not errors or may:
            found.ended += cell.execution_count is not None or not cell.source.strip()
            continue
        text = " ".join(_COLOUR.sub("", f"{errors[-1].ename}: {errors[-1].evalue}").replace("|", "\\|").split())
        found.failed.append(f"{number}: {textwrap.shorten(text, _LONGEST, placeholder=' …')}")
    if died:
        found.failed.append(died)
    return found


def table(runs: list[Run]) -> str:
    """Return the runs as a table in Markdown."""
    lines = ["| notebook | code cells | lines changed | cells that run | cells that do not, and why |"]
    lines.append("| --- | ---: | ---: | ---: | --- |")
    lines += [f"| {run.name} | {run.cells} | {run.changed} | {run.ended} | {'<br>'.join(run.failed)} |" for run in runs]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what the command line names, or all notebooks of the folder that import ipyparallel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="parts of names")
    parser.add_argument("--write", type=Path, help="the page whose table is to be replaced")
    asked = parser.parse_args()
    if not os.environ.get(VARIABLE):
        print(f"skipped: {VARIABLE} names no folder with notebooks")
        return 0
    root = Path(os.environ[VARIABLE])
    runs = []
    for path in sorted(root.rglob("*.ipynb")):
        if "ipyparallel" in path.read_text() and (
            not asked.notebooks or any(each in path.name for each in asked.notebooks)
        ):
            runs.append(run(path, root))
            print(table(runs[-1:]).splitlines()[-1], flush=True)
    if asked.write is not None:
        page = asked.write.read_text()
        head = page.partition("| notebook |")[0]
        asked.write.write_text(f"{head}{table(runs)}\nnbdist {__version__}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
