"""The panel in a real page: buttons that interrupt and restart workers while a cell is busy."""

import re

import pytest
from helpers.notebook.browser import BOTH, needs_browser, notebook

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

START = """
import torch
%load_ext nbdist
%dist_init -n 2 --backend none
"""
BUSY = """%%remote 1
import time
print("training of the residual network begins")
for second in range(600):
    time.sleep(0.1)
"""
LONG = """%%remote 0 -a
def train_one_epoch_of_the_residual_network(seconds):
    import time
    for second in range(seconds): time.sleep(0.1 + 0.0 * second * len("a line that is long enough to be cut"))
train_one_epoch_of_the_residual_network(6000)
"""
CLIPPED = """panel => [...panel.querySelectorAll("th, td, pre, .nbdist-rows, .nbdist-talk")]
    .filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.className + part.textContent)"""
ALIVE = "%remote all rank"


@pytest.mark.parametrize("front", BOTH)
def test_interrupt_and_restart(front, tmp_path, request):
    with notebook([START, "%dist_panel", BUSY, ALIVE, LONG], front, tmp_path) as page:
        page.finish(0)
        page.finish(1)
        panel = page.cell(1).locator(".nbdist-panel")
        panel.get_by_text("idle").first.wait_for()
        page.run(2)
        panel.get_by_text("busy").wait_for()
        at = panel.get_by_text("time.sleep(0.1)").first
        at.click()
        page.expect(panel.locator(".nbdist-log")).to_contain_text("worker1: MainThread")
        at.click()
        page.expect(panel.locator(".nbdist-log")).not_to_contain_text("MainThread")
        if picture := request.config.getoption("--pictures"):
            page.page.wait_for_timeout(4000)
            panel.screenshot(path=f"{picture}/panel-{front}.png")
        panel.get_by_role("button", name="Interrupt").nth(1).click()
        page.ended(2)
        page.tells(2, "KeyboardInterrupt")
        told = re.compile(r"^\d\d:\d\d:\d\d \[worker1\] training of[^\n]*$")
        page.expect(panel.locator(".nbdist-log")).to_have_text(told)

        panel.get_by_text("busy").wait_for(state="hidden")
        page.run(2)
        panel.get_by_text("busy").wait_for()
        panel.get_by_role("button", name="Restart").nth(1).click()
        page.ended(2)
        page.tells(2, "worker1 was restarted")
        assert "%dist_restart" not in page.told(2)
        panel.get_by_text("idle").nth(1).wait_for()
        page.finish(3)
        page.tells(3, "[0, 1]")

        page.finish(4)
        panel.get_by_text("def train_one_epoch_of_the_residual_network(seconds):").wait_for()
        panel.get_by_text("time.sleep(0.1 + 0.0 * second").wait_for()
        for width in (1400, 1050, 700):
            page.page.set_viewport_size({"width": width, "height": 1000})
            page.page.wait_for_timeout(500)
            assert panel.evaluate(CLIPPED) == []
            if picture:
                panel.screenshot(path=f"{picture}/panel-{front}-{width}.png")
        assert not page.complaints
        assert not page.strangers


STUCK = """%%remote --local
import threading
from nbdist import rpc
gate = threading.Event()

def layer(x, ahead):
    if not ahead:
        gate.wait()
        return x
    return rpc.rpc_sync(ahead[0], layer, args=(x, ahead[1:]))
"""
HANG = """
hung = rpc.rpc_async("worker0", layer, args=(torch.ones(2), ["worker1", "worker2", "worker3"]))
"""


@pytest.mark.soak  # tests/views/test_panel.py has who waits for whom
def test_a_hang_is_traced_to_its_worker_and_line(tmp_path, request):
    free = "%remote 3 gate.set()\nprint(hung.wait().tolist())"
    with notebook([START.replace("-n 2", "-n 4"), STUCK, HANG, "%dist_panel", free], "lab", tmp_path) as page:
        for index in range(4):
            page.finish(index)
        panel = page.cell(3).locator(".nbdist-panel")
        panel.get_by_text("notebook → worker0 → worker1 → worker2 → worker3, which is at").wait_for()
        page.expect(panel.locator(".nbdist-talk")).to_contain_text("gate.wait()")
        if picture := request.config.getoption("--pictures"):
            page.page.wait_for_timeout(5000)
            panel.screenshot(path=f"{picture}/panel.png")
        page.finish(4)
        page.tells(4, "[1.0, 1.0]")
        panel.get_by_text("which is at").wait_for(state="hidden")
        assert not page.complaints


INVITE = "%dist_invite more.json\nimport os, subprocess, sys"
JOIN = """
command = [sys.executable, "-m", "nbdist", "worker", "--connect", "more.json", "--host", "127.0.0.1"]
keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def test_an_open_panel_shows_a_worker_that_joins(tmp_path):
    start = START.replace("-n 2", "-n 1 --host 127.0.0.1")
    cells = [start, "%dist_panel", INVITE, JOIN, "%dist_shutdown\nkeeper.wait(20)"]
    with notebook(cells, "lab", tmp_path) as page:
        for index in range(4):
            page.finish(index)
        panel = page.cell(1).locator(".nbdist-panel")
        panel.get_by_text("worker0").wait_for()
        panel.get_by_text("worker1").wait_for()
        page.expect(panel.get_by_role("button", name="Interrupt")).to_have_count(2)
        page.tells(2, "worker1 joined from")
        panel.get_by_role("button", name="Restart").nth(1).click()
        panel.get_by_text("idle").nth(1).wait_for()
        page.finish(4)
        page.tells(4, "0 processes left.")
        assert not page.complaints
