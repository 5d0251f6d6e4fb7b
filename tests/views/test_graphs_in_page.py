"""Pictures of graphs in a page: nothing is cut at the right, wide or narrow, light or dark, and titles lie on boxes."""

import nbformat
import pytest
from helpers.notebook.browser import CHROMIUM, needs_browser, notebook
from helpers.simulated.handmade_traces import residual, step

from nbdist.autograd.graph.traces import planned

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

WIDTHS = (1050, 700, 400)
MEASURE = """() => [...document.querySelectorAll("img[src^='data:image/svg']")].map((image) => {
    const scrolled = image.parentElement.parentElement;
    const before = image.getBoundingClientRect();
    const [span] = [...image.parentElement.querySelectorAll("span[title]")]
        .map((each) => each.getBoundingClientRect()).sort((one, other) => one.left - other.left || one.top - other.top);
    scrolled.scrollLeft = 1e6;
    const after = image.getBoundingClientRect(), room = scrolled.getBoundingClientRect();
    scrolled.scrollLeft = 0;
    return {
        width: before.width, natural: Number(image.getAttribute("width")), page: document.documentElement.scrollWidth,
        room: room.right, right: after.right, left: before.left, roomLeft: room.left,
        span: [(span.left - before.left) / before.width, (span.top - before.top) / before.height, span.width],
    };
})"""


def bundles():
    """A plan that is too large for a page unfolded, and a step that is nearly as wide as a picture may be."""
    trace, root = residual(16)
    folded = planned(trace, [root])
    return [folded._repr_mimebundle_(), step(4, 8)._repr_mimebundle_()]


def outputs():
    return [[nbformat.v4.new_output("display_data", data=bundle)] for bundle in bundles()]


def check(page, width):
    """Every picture is as wide as there is room for, or is scrolled to its right edge."""
    found = page.evaluate(MEASURE)
    assert len(found) == 2
    for each in found:
        assert each["width"] <= each["natural"] + 1
        assert each["width"] >= 0.65 * each["natural"], "it can be read"
        assert each["left"] >= each["roomLeft"] - 1
        assert each["right"] <= each["room"] + 1, "its right edge can be seen"
        assert each["page"] <= width + 1, "the page itself is not scrolled"
        left, top, wide = each["span"]
        assert 0.05 < left < 0.5, each
        assert top < 0.5, each
        assert wide > 10, each


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_of_nbconvert(theme, tmp_path):
    from nbconvert import HTMLExporter
    from playwright.sync_api import sync_playwright

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=each) for each in outputs()])
    (tmp_path / "page.html").write_text(HTMLExporter(theme=theme).from_notebook_node(book)[0])
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page()
            page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
            page.goto(f"file://{tmp_path}/page.html", wait_until="domcontentloaded")
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 800})
                check(page, width)
        finally:
            browser.close()


@pytest.mark.soak  # the test above makes the same checks in a page without JupyterLab
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_a_notebook_of_others_in_jupyterlab(theme, tmp_path):
    with notebook(["folded", "step"], "lab", tmp_path, outputs=outputs(), theme=theme) as opened:
        page = opened.page
        page.locator(".jp-OutputArea-output img").nth(1).wait_for(state="attached")
        for width in WIDTHS[:2]:
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_function("width => document.querySelector('.jp-LabShell').offsetWidth === width", arg=width)
            check(page, width)
