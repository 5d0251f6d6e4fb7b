"""JupyterLab's own debugger, turned to a worker: a breakpoint beside a line of a cell stops that worker there."""

import re

import pytest
from helpers.notebook.browser import needs_browser, notebook

pytestmark = needs_browser()

CELLS = [
    "%load_ext nbdist\n%dist_init -n 2 --backend none",
    "%dist_debug --lab worker1",
    "%%remote\n\ndouble = 2 * (rank + 1)\ntriple = double + rank + 1\nprint('triple', triple)",
    "from nbdist import rpc\nrpc.rpc_sync('worker1', pow, (2, 5))",
    "%dist_debug --lab off",
    "here = 5\nthere = here + 1\nprint('there', there)",
]


class Debugger:
    """What a user does with it."""

    def __init__(self, opened):
        from playwright.sync_api import TimeoutError

        self.opened, self.page, self.timeout = opened, opened.page, TimeoutError

    def toggle(self):
        self.page.locator("button[data-command='debugger:toggle'], .jp-DebuggerBugButton").first.click()
        self.page.wait_for_timeout(2000)  # it asks the kernel several things, and shows none of them

    def break_at(self, cell, line):
        found = self.opened.cell(cell)
        found.scroll_into_view_if_needed()
        box = found.locator(".cm-line").nth(line - 1).bounding_box()
        gutter = found.locator(".cm-breakpoint-gutter").first.bounding_box()
        self.page.mouse.click(gutter["x"] + gutter["width"] / 2, box["y"] + box["height"] / 2)
        self.opened.expect(found.locator(".cm-breakpoint-icon, .cm-breakpoint-gutter .cm-gutterElement:has-text('●')"))

    def run_to(self, cell, line):
        """Run a cell until it stops at a line. The page does not show when the kernel has taken its breakpoints."""
        frame = self.page.locator(".jp-DebuggerCallstack-body li").first
        for _ in range(10):
            self.opened.run(cell)
            try:
                frame.wait_for(timeout=10_000)
                break
            except self.timeout:
                self.opened.ended(cell)  # it has run through
        self.opened.expect(frame).to_contain_text(f":{line}")

    def variable(self, name):
        return self.page.locator(".jp-DebuggerVariables-body jp-tree-item", has_text=re.compile(f"^{name}")).first

    def go_on(self):
        self.page.keyboard.press("F9")


@pytest.mark.timeout(300)
def test_a_breakpoint_in_a_remote_cell_stops_the_worker_and_no_other(tmp_path):
    with notebook(CELLS, "lab", tmp_path) as opened:
        debugger = Debugger(opened)
        for cell in (0, 1):
            opened.finish(cell)
        opened.tells(1, "without a password")
        debugger.toggle()
        debugger.break_at(2, 4)
        debugger.run_to(2, 4)
        opened.expect(debugger.variable("double")).to_contain_text("4")
        opened.tells(2, "[worker0] triple 3")
        assert "worker1] triple" not in opened.told(2)
        opened.page.wait_for_timeout(8000)  # longer than the agents need to take a silent worker for dead
        debugger.go_on()
        opened.ended(2)
        opened.tells(2, "[worker1] triple 6")
        opened.finish(3)  # its agent has run meanwhile, and so its threads were not stopped
        opened.tells(3, "32")
        debugger.toggle()
        opened.finish(4)
        debugger.toggle()
        debugger.break_at(5, 2)
        debugger.run_to(5, 2)
        opened.expect(debugger.variable("here")).to_contain_text("5")
        debugger.go_on()
        opened.ended(5)
        opened.tells(5, "there 6")
        assert opened.complaints == []
