"""The README's notebook, its script and its links, and the picture of the docs' first page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.notebook.frontend import Notebook

from nbdist.magics.dist_magics import DistMagics

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "coming_from.md")


def block(name: str) -> str:
    return re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)[1]


def promised(code: str) -> list[str]:
    """What the comments of some code say that it shows."""
    return re.findall(r"  # (.+)", code)


def test_the_notebook():
    cells = block("notebook").strip().split("\n\n")
    assert sum(len(cell.splitlines()) for cell in cells) <= 13
    assert len(promised(block("notebook"))) == 2
    with Notebook(load=False) as notebook:
        for code in cells:
            cell = notebook.run(code)
            for text in promised(code):
                assert text in (cell.stdout.strip(), cell.result)
            if cell.result is not None and not promised(code):
                assert f"`{cell.result}`" in README.read_text()
        assert cell.stdout == "0 processes left.\n"


def test_every_namespace_comes_when_it_is_asked_for():
    names = (
        "rpc.rpc_sync",
        "autograd.context",
        "optim.DistributedOptimizer",
        "nn.Pipeline",
        "swarm.serve",
        "testing.World",
    )
    code = "import nbdist\n" + "".join(f"nbdist.{name}\n" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(block("script"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised(block("script"))


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15),
    reason="it begins an error with the operation's name, which the picture's torch does not",
)
def test_the_picture_shows_what_a_notebook_shows():
    place = ROOT / "docs" / "draw_tour.py"
    spec = importlib.util.spec_from_file_location("draw_tour", place)
    draw_tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_tour)
    drawn = draw_tour.draw(draw_tour.run_cells())
    assert drawn == draw_tour.PICTURE.read_text(), f"run `python {place.relative_to(ROOT)}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):  # Sphinx checks those of docs/ in `make docs`
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_magics_that_are_named_exist(page):
    text = page.read_text() if page == README else here_column(page.read_text())
    named = set(re.findall(r"%%?([a-z]\w+)", text)) - {"load_ext", "debug", "run", "capture", "pip"}  # IPython's own
    from nbdist.compat.ipyparallel.px import Px

    there = {*DistMagics.magics["line"], *DistMagics.magics["cell"], *vars(Px)}
    assert named <= there
    assert named


def here_column(text: str) -> str:
    """The right-hand columns of tables that say what is called what."""
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return "\n".join(re.split(r"(?<!\\)\|", row, maxsplit=1)[1] for row in rows)
