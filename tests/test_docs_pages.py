"""The code on the pages of docs/ runs, page by page, and shows what the page says.

A page may have cells of a notebook (```ipython) and scripts (```python). All cells of a page run in one notebook, all
scripts of a page as one. What stands below code as ```text is what it shows, or the error with which it ends. Commands
(```console) do not run. Code that cannot run everywhere says why: ```ipython not-run: needs two GPUs.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.notebook.frontend import Notebook
from helpers.suite.python_path import python_path

DOCS = Path(__file__).parents[1] / "docs"
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
WRITTEN_BY_TOOLS = {"notebooks.md", "errors.md", "magics.md"}
WITH_DRAWINGS = {"a_call.md", "a_cell.md", "a_gradient.md", "a_token.md", "coming_from.md", "programs.md"}


class Block(NamedTuple):
    """A piece of code, and what stands below it."""

    kind: str
    code: str
    shown: str | None


def blocks(page: Path) -> list[Block]:
    """Return the pieces of code of a page that run."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    found = []
    for number, (info, code) in enumerate(fences):
        kind, _, reason = info.partition(" ")
        if kind in ("ipython", "python") and not reason.startswith("not-run: "):
            below = fences[number + 1] if number + 1 < len(fences) else ("", "")
            found.append(Block(kind, code, below[1].strip() if below[0] == "text" else None))
    return found


PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name not in WRITTEN_BY_TOOLS)
WITH = {
    kind: [page for page in PAGES if any(block.kind == kind for block in blocks(page))]
    for kind in ("ipython", "python")
}


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", WITH["ipython"], ids=name_of)
def test_cells_run(page, tmp_path):
    with Notebook(load=False, env=python_path(tmp_path)) as notebook:
        notebook.run(f"__import__('os').chdir({str(tmp_path)!r})")  # cells may write files beside the notebook
        for block in blocks(page):
            if block.kind == "ipython":
                cell = notebook.run(block.code, check=False)
                if cell.error is not None:
                    first = cell.error["evalue"].split("\n")[0]
                    assert block.shown == f"{cell.error['ename']}: {first}", block.code
                elif block.shown is not None:
                    assert block.shown in (cell.stdout.strip(), str(cell.result).strip()), block.code


@pytest.mark.parametrize("page", WITH["python"], ids=name_of)
def test_scripts_run(page, tmp_path):
    script = tmp_path / "script.py"
    written = [block for block in blocks(page) if block.kind == "python"]
    script.write_text("\n".join(block.code for block in written))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == " ".join(block.shown or "" for block in written).split()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_says_whether_it_runs(page):
    kinds = {info.partition(" ")[0] for info, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
    known = {"ipython", "python", "text", "console", "{toctree}", "{glossary}", "{include}", "{eval-rst}"}
    assert kinds <= known | ({""} if page.name in WITH_DRAWINGS else set())


def test_pages_have_code():
    assert len(WITH["ipython"]) >= 7
    assert len(WITH["python"]) >= 3


def test_the_list_of_errors_is_that_of_the_package(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    make_pages = importlib.import_module("make_pages")
    written = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert written == make_pages.errors_page(), "run `python docs/make_pages.py`"


@pytest.mark.parametrize("script", ["make_pages.py", "make_messages.py"])
def test_scripts_find_the_modules_beside_them(script):
    """Under PYTHONSAFEPATH, with which the tests run, Python does not put the folder of a script on the path."""
    load = f"import runpy; runpy.run_path({str(DOCS / script)!r})"
    subprocess.run([sys.executable, "-P", "-c", load], check=True, timeout=120)
