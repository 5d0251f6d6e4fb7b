"""Cards of references in a real page."""

import pytest
from browser import needs_browser, notebook

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

START = """
import time, torch
%load_ext nbdist
%dist_init -n 2 --backend none
"""
SHOW = """
rref = rpc.remote("worker1", torch.nn.Linear, args=(3, 2))
rref
"""
BUSY = """
for second in range(80):
    time.sleep(0.1)
"""


@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_a_card_peeks_and_releases_while_a_cell_is_busy(front, tmp_path):
    with notebook([START, SHOW, BUSY], front, tmp_path) as page:
        page.finish(0)
        page.finish(1)
        card = page.cell(1).locator(".nbdist-card")
        card.get_by_text("confirmed").wait_for()
        assert "worker1" in card.text_content()
        page.run(2)
        page.page.wait_for_timeout(500)
        card.get_by_role("button", name="Peek").click()
        card.get_by_text("weight").wait_for(timeout=4000)
        assert "float32(2, 3)" in card.text_content()
        card.get_by_role("button", name="Release").click()
        page.cell(1).get_by_text("released").first.wait_for(timeout=4000)
        assert "*" in page.cell(2).locator(".jp-InputPrompt").text_content()  # it was busy all the time
        page.page.keyboard.press("Escape")
        assert not page.complaints
        assert not page.strangers
