"""A step of DDP in a real page: the buttons act on all workers' own ``backward()``, while the cell is busy."""

import pytest
from helpers.notebook.browser import needs_browser, notebook

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

START = """
%load_ext nbdist
%dist_init -n 2 --backend gloo
"""
MODEL = """
%%remote
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
x = torch.randn(3, 4)
"""
CELL = """%%watch --paused
%%remote
loss = model(x).pow(2).mean()
loss.backward()
"""
SAME = """
%%remote
seen = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x).pow(2).mean().backward()
print(all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), seen)))
"""


def test_buttons_step_all_workers(tmp_path, request):
    with notebook([START, MODEL, CELL, SAME], "lab", tmp_path) as page:
        page.finish(0)
        page.finish(1)
        page.run(2)
        cell = page.cell(2)
        cell.locator(".node.halted").nth(1).wait_for()  # both workers are there
        for count in (2, 4):
            cell.get_by_role("button", name="Step", exact=True).click()
            page.page.wait_for_function("count => document.querySelectorAll('.node.done').length === count", arg=count)
        page.expect(cell.locator(".jp-InputPrompt")).to_contain_text("*")
        cell.locator(".node.done").first.click()
        page.expect(cell.locator(".nbdist-details")).to_contain_text("loss = model(x).pow(2).mean()")
        if picture := request.config.getoption("--pictures"):
            cell.screenshot(path=f"{picture}/local.png")
        cell.get_by_role("button", name="Run", exact=True).click()
        page.page.wait_for_function("() => !document.querySelector('.node.halted')")
        page.finish(3)
        page.expect(page.cell(3).locator(".jp-OutputArea")).to_contain_text("True")


def test_earlier_passes_of_the_cell_are_folded_below_the_view(tmp_path):
    loop = "%%watch\n%%remote\nfor number in range(2):\n    model(x).pow(2).mean().backward()"
    with notebook([START, MODEL, loop], "lab", tmp_path) as page:
        for number in range(3):
            page.finish(number)
        cell = page.cell(2)
        page.expect(cell.locator(".nbdist-view .nbdist-status")).to_contain_text("backward() #2 on worker0,1")
        cell.locator("summary", has_text="backward() on worker0,1").click()  # the live view is above
        page.expect(cell.locator("details[open] img")).to_be_visible()
        page.expect(cell.locator("img:visible")).to_have_count(1)  # not that of the second pass
