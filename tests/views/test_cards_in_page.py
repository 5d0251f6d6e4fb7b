"""Cards of references in a real page."""

import pytest
from helpers.notebook.browser import BOTH, needs_browser, notebook

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
MANY = """
def slowly(x):
    time.sleep(1)
    if x < 0:
        raise ValueError(f"{x} is negative, which is said here at such a length that no page has one line for it all")
    return torch.ones(x)

several = [rpc.remote(f"worker{n}", slowly, args=(2 * n - 1,)) for n in range(2)]
several
"""
BUSY = """
import os
while not os.path.exists("go"):
    time.sleep(0.1)
"""


THEMES = {"lab": "JupyterLab Dark", "notebook": "JupyterLab Light"}


def check_rows(page):
    """The rows come up to date by themselves, and nothing of them is cut off in a narrow page."""
    table = page.cell(3).locator(".nbdist-card")
    table.get_by_text("confirmed").wait_for()
    table.get_by_text("failed").wait_for()
    shown = page.expect(table)
    for text in ("ValueError: -1 is negative", "Tensor float32(1,)"):
        shown.to_contain_text(text, use_inner_text=True)
    shown.not_to_contain_text("on its way", use_inner_text=True)
    page.page.set_viewport_size({"width": 1050, "height": 1000})
    assert page.page.evaluate("el => el.scrollWidth <= el.clientWidth", table.locator("div div").first.element_handle())


def check_theme(page, told):
    """A text has the font, size and colour that the page gives its own."""
    found, wanted = page.page.evaluate(
        """el => [el, Object.assign(document.body.appendChild(document.createElement("p")), {style:
            "font-family: var(--jp-ui-font-family); font-size: var(--jp-ui-font-size1); color: var(--jp-ui-font-color1)"
        })].map(each => getComputedStyle(each)).map(each => [each.fontFamily, each.fontSize, each.color])""",
        told.locator("td").first.element_handle() if told.locator("td").count() else told.element_handle(),
    )
    assert found == wanted


@pytest.mark.parametrize("front", BOTH)
def test_a_card_peeks_and_releases_while_a_cell_is_busy(front, tmp_path):
    with notebook([START, SHOW, BUSY, MANY], front, tmp_path, theme=THEMES[front]) as page:
        page.finish(0)
        page.finish(3)
        rows = page.cell(3).locator(".nbdist-card tbody tr")
        page.expect(rows.locator("visible=true")).to_have_count(2)
        check_rows(page)
        page.finish(1)
        card = page.cell(1).locator(".nbdist-card")
        card.get_by_text("confirmed").wait_for()
        page.expect(card).to_contain_text("worker1")
        page.run(2)
        page.page.wait_for_timeout(500)
        card.get_by_role("button", name="Peek").click()
        card.get_by_text("weight").wait_for()
        page.expect(card).to_contain_text("float32(2, 3)")
        card.get_by_role("button", name="Release").click()
        page.cell(1).get_by_text("released").first.wait_for()
        assert "*" in page.cell(2).locator(".jp-InputPrompt").text_content()  # it was busy all the time
        (tmp_path / "go").touch()
        released = page.cell(1).locator("div[class$='-picture']")
        page.expect(released).to_contain_text("Linear", use_inner_text=True)  # it is known still
        picture = page.cell(3).locator("div[class$='-picture']")  # hidden, as long as the live table is there
        picture.filter(has_text="failed").filter(has_not_text="on its way").wait_for(state="attached")
        saved = page.save()
        kinds = [output.data for output in saved.cells[3].outputs if "text/html" in output.data]
        assert "failed</span>" in kinds[-1]["text/html"]
        assert "on its way" not in kinds[-1]["text/html"]
        for told in (released, page.cell(3).locator(".nbdist-card td").first):
            check_theme(page, told)
        page.page.keyboard.press("Escape")
        assert not page.complaints
        assert not page.strangers
