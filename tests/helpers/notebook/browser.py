"""A real Jupyter server, and a page of it in a real browser: for tests of what lives in a page."""

import contextlib
import json
import os
import re
import shutil
import time

import nbformat
import pytest

from helpers.notebook.servers import USER, serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BOTH = ["lab", pytest.param("notebook", marks=pytest.mark.soak)]
"""Both front ends, for a test that looks alike in them: only `make soak` runs it in Notebook 7, too."""
PATIENCE = 60


def needs_browser():
    """A mark for tests that need one."""
    missing = "" if CHROMIUM else "there is no Chromium here (Debian's package is called chromium)"
    return pytest.mark.skipif(bool(missing), reason=missing)


class Page:
    """One notebook, open in a browser."""

    CELL, EDITOR, PROMPT, OUTPUT = ".jp-Notebook .jp-Cell", ".jp-InputArea-editor", ".jp-InputPrompt", ".jp-OutputArea"

    def __init__(self, page, folder):
        self.page = page
        self.folder = folder
        self.complaints = []
        """What the page had to complain of on its console."""
        self.strangers = []
        """What it asked others for than its server."""
        page.on("console", self._look_at_line)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._look_at)

    def _look_at_line(self, told):
        """Note an error on the console; not that a test beside this one has added or removed a network interface."""
        if told.type == "error" and "net::ERR_NETWORK_CHANGED" not in told.text:
            self.complaints.append(told.text)

    def _look_at(self, request):
        if not re.match(r"(https?|wss?)://(localhost|127\.0\.0\.1)[:/]|data:|blob:|about:", request.url):
            self.strangers.append(request.url)

    def run(self, index):
        """Begin to run a cell."""
        cell = self.cell(index)
        cell.scroll_into_view_if_needed()
        cell.locator(self.EDITOR).click()
        self.page.keyboard.press("Control+Enter")

    def cell(self, index):
        """A cell, to look for things in."""
        return self.page.locator(self.CELL).nth(index)

    def expect(self, locator):
        """Return Playwright's assertions about what a locator finds: each is tried again until it holds.

        A cell has ended before the page shows all of its output, so a look that is made once may be too early.
        """
        from playwright.sync_api import expect

        expect.set_options(timeout=PATIENCE * 1000)
        return expect(locator)

    def finish(self, index, timeout=PATIENCE):
        """Run a cell, and wait for its end."""
        self.run(index)
        self.ended(index, timeout)

    def ended(self, index, timeout=PATIENCE):
        """Wait for a cell's end."""
        prompt = self.cell(index).locator(self.PROMPT)
        deadline = time.monotonic() + timeout
        while not re.search(r"\[\d+\]", prompt.text_content() or ""):
            assert time.monotonic() < deadline, f"cell {index} has not ended: {self.told(index)}"
            self.page.wait_for_timeout(50)

    def tells(self, index, text):
        """Wait until a text stands below a cell: a cell's end may be shown before all that it printed."""
        self.expect(self.cell(index).locator(self.OUTPUT).first).to_contain_text(text)

    def told(self, index):
        """The text below a cell."""
        return self.cell(index).locator(self.OUTPUT).first.text_content()

    def interrupt(self):
        """Interrupt the kernel, as who types in no cell does it by two keys."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("i")
        self.page.keyboard.press("i")

    def save(self):
        """Save the notebook, wait until the server has written the file, and return what is in the file."""
        self.page.keyboard.press("Escape")
        with self.page.expect_response(_is_save, timeout=PATIENCE * 1000) as answer:
            self.page.keyboard.press("Control+s")
        assert answer.value.ok, answer.value.status
        return nbformat.read(self.folder / "book.ipynb", 4)

    def heap(self):
        """Bytes in use by the page's scripts, after a collection."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        return session.send("Runtime.getHeapUsage")["usedSize"]


class ClassicPage(Page):
    """One notebook in nbclassic."""

    CELL, EDITOR, PROMPT, OUTPUT = "#notebook-container .cell", ".CodeMirror", ".input_prompt", ".output_wrapper"


def _is_save(answer):
    return answer.request.method == "PUT" and "/api/contents/book.ipynb" in answer.url


@contextlib.contextmanager
def notebook(cells, front, folder, *, place="alone", outputs=None, theme=None, subshells=True, env=None, again=False):
    """Open a notebook of these cells in a front end, connected to its kernel; with outputs, as one that others sent.

    That is, it is not trusted, and there is no such kernel. With ``again`` it is the notebook that was saved there
    before, with a new kernel. Without ``subshells`` the front end does not use those of the kernel.
    """
    from playwright.sync_api import sync_playwright

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    for cell, told in zip(book.cells, outputs or [], strict=False):
        cell.outputs = told
    name = "python3" if outputs is None else "absent"
    book.metadata["kernelspec"] = {"name": name, "display_name": name, "language": "python"}
    if not again:
        nbformat.write(book, folder / "book.ipynb")
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    if theme is not None:
        (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    if not subshells:
        chosen = {"commsOverSubshells": "disabled"}
        (settings / "kernels-settings.jupyterlab-settings").write_text(json.dumps(chosen))
    places = {f"JUPYTER_{what}_DIR": str(folder / what.lower()) for what in ("CONFIG", "DATA", "RUNTIME")}
    places |= {f"JUPYTERLAB_{what}_DIR": str(folder / what.lower()) for what in ("SETTINGS", "WORKSPACES")}
    places |= {"IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"}
    with serve(front, folder, {**os.environ, **(env or {}), **places}, place) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.set_default_timeout(PATIENCE * 1000)
            opened = (ClassicPage if front == "nbclassic" else Page)(page, folder)
            page.goto(address)
            if place == "hub":
                page.fill("#username_input", USER)
                page.fill("#password_input", "any")
                page.click("#login_submit")
            page.wait_for_selector(opened.CELL)
            if outputs is None:
                _await_kernel(opened)
                opened.complaints.clear()  # Notebook 7.6 has one of its own when it starts
            yield opened
        finally:
            browser.close()


def _await_kernel(opened):
    """Until the kernel answers: the light says idle also before there is a connection."""
    connected = """async () => {
        if (window.Jupyter?.notebook) { return Boolean(Jupyter.notebook.kernel?.is_connected()); }
        const app = window.jupyterapp ?? window.jupyterlab;
        for (const kernel of app?.serviceManager?.kernels?._kernelConnections ?? []) {
            if (kernel.connectionStatus === "connected") { await kernel.info; return true; }
        }
        return !app;
    }"""
    deadline = time.monotonic() + PATIENCE
    while not opened.page.evaluate(connected):
        assert time.monotonic() < deadline, "the kernel is not connected"
        opened.page.wait_for_timeout(100)
    opened.page.wait_for_timeout(500)
