"""What a running cell tells in a real page, and in the notebook's file, before it has ended."""

import re

import pytest
from helpers.notebook.browser import BOTH, needs_browser, notebook

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

START = """
%load_ext nbdist
%dist_init -n 3
"""
RAISES = """%%remote --progress-after 2
if rank == 1:
    1 / 0
dist.all_reduce(torch.ones(1))
"""
DIES = """%%remote
import os, time
if rank == 2:
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
REDUCES = """%%remote
one = torch.ones(1)
dist.all_reduce(one)
print(one.item())
"""


def running(page, index):
    return "*" in (page.cell(index).locator(".jp-InputPrompt").text_content() or "")


def stop(page):
    page.page.locator('[data-command="notebook:interrupt-kernel"] , jp-button[title^="Interrupt"]').first.click()


def texts(cell):
    """All texts of a cell's outputs in the notebook's file."""
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]


@pytest.mark.parametrize("front", BOTH)
def test_an_error_and_a_death_are_told_while_the_cell_runs(front, tmp_path):
    with notebook([START, RAISES, DIES, "%dist_restart", REDUCES], front, tmp_path) as page:
        page.finish(0)
        page.run(1)
        said = "[worker1] ZeroDivisionError: division by zero (worker0,2 still run; Stop ends them)"
        page.cell(1).get_by_text(said).wait_for()
        page.cell(1).get_by_text(re.compile(r"worker0,2 wait in dist\.all_reduce.*worker1 has failed")).wait_for()
        assert running(page, 1)
        saved = page.save().cells[1]
        assert running(page, 1)
        assert saved.execution_count is None
        assert any(said in text for text in texts(saved))
        stop(page)
        page.ended(1)
        page.tells(1, "1 / 0")
        assert not any("wait in" in text for text in texts(page.save().cells[1]))

        page.run(2)
        page.cell(2).get_by_text(re.compile(r"\[worker2\] WorkerLost: .* \(worker0,1 still run")).wait_for()
        assert running(page, 2)
        assert any("[worker2] WorkerLost" in text for text in texts(page.save().cells[2]))
        stop(page)
        page.ended(2)
        page.finish(3)
        page.finish(4)
        page.tells(4, "3.0")
        assert not page.complaints
