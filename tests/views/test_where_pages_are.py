"""The tour, the buttons of `%%watch`, and Stop in a page, on every server that people have notebooks on."""

from pathlib import Path

import nbformat
import pytest
from helpers.notebook import older_packages
from helpers.notebook.browser import needs_browser, notebook
from helpers.suite.python_path import python_path
from views.test_backward_in_page import CELL, HERE, START, WORKERS, press

pytestmark = [needs_browser(), pytest.mark.soak, pytest.mark.timeout(600)]

TOUR = Path(__file__).parents[2] / "notebooks" / "00_tour.ipynb"
PLACES = [("lab", "alone"), ("notebook", "alone"), ("nbclassic", "alone"), ("lab", "prefix"), ("lab", "hub")]
FOREVER = "%%remote\nprint('runs')\nwhile True:\n    pass"


@pytest.fixture(params=PLACES, ids="-".join)
def where(request, tmp_path):
    """The arguments that open a notebook there: a front end, a folder, and more by name."""
    front, place = request.param
    more = {}
    if front == "nbclassic":
        older_packages.install(front, tmp_path / "packages")
        more["env"] = python_path(tmp_path / "packages")
    return (front, tmp_path), {"place": place} | more


def test_the_tour(where):
    cells = [cell for cell in nbformat.read(TOUR, 4).cells if cell.cell_type == "code"]
    positional, named = where
    with notebook([cell.source for cell in cells], *positional, **named) as page:
        for index, cell in enumerate(cells):
            page.finish(index, timeout=120)
            if cell.source.startswith("%%watch --paused"):
                press(page, index, "Step")
                page.cell(index).locator(".node.done").first.wait_for()
        saved = [cell for cell in page.save().cells if cell.cell_type == "code"]
        for cell, found in zip(cells, saved, strict=True):
            tags = cell.metadata.get("tags", [])
            raised = [output for output in found.outputs if output.output_type == "error"]
            assert bool(raised) == ("raises-exception" in tags), (cell.source, found.outputs)
            if "verdict" in tags:
                assert found.outputs[-1].data["text/plain"] == "True", (cell.source, found.outputs)
        assert not page.complaints
        assert not page.strangers


def test_buttons_while_the_cell_is_busy_and_stop(where):
    positional, named = where
    subshells = positional[0] != "nbclassic"
    cells = [START, WORKERS, HERE, CELL, FOREVER, "%%remote\nrank"]
    with notebook(cells, *positional, **named) as page:
        for index in range(3):
            page.finish(index)
        page.run(3)
        page.cell(3).locator(".node.halted").first.wait_for()
        if subshells:
            for count in (1, 2):
                press(page, 3, "Step")
                page.expect(page.cell(3).locator(".node.done")).to_have_count(count)
            press(page, 3, "Run")
        else:
            page.expect(page.cell(3).locator(".nbdist-notice")).to_contain_text("%%watch -a")
            page.interrupt()
        page.ended(3)
        page.run(4)
        page.tells(4, "runs")
        page.interrupt()
        page.ended(4)
        page.tells(4, "stopped in while True")
        page.finish(5)
        page.tells(5, "2")
        assert not page.complaints
