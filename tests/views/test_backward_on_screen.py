"""The picture of a backward pass, measured on the screen: it fits, nothing is clipped, keys and links lead to nodes."""

import re

import pytest
from helpers.notebook.browser import needs_browser, notebook

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

CLIPPED = """(view) => {
    const found = [];
    const name = (element) => `${element.getAttribute('class') ?? element.tagName}: ${element.textContent}`;
    const isShown = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0;
    const isWithin = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
        && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
    const edge = view.parentElement.getBoundingClientRect();
    if (view.scrollWidth > view.clientWidth + 1) found.push(`the view is ${view.scrollWidth} wide`);
    for (const text of view.querySelectorAll('.nbdist-picture .node text')) {
        const box = text.parentElement.querySelector('.box');
        if (!isWithin(text.getBoundingClientRect(), box.getBoundingClientRect())) found.push(name(text));
    }
    for (const label of view.querySelectorAll('.worker')) {
        if (!isWithin(label.firstChild.getBoundingClientRect(), label.getBoundingClientRect())) found.push(name(label));
    }
    for (const element of view.querySelectorAll('button, select, label, summary, span, li, th, td, .key, .value')) {
        if (element.closest('.nbdist-frame') || !isShown(element)) continue;
        const { left, right } = element.getBoundingClientRect();
        const cut = element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== 'inline';
        if (left < edge.left - 1 || right > edge.right + 1 || cut) found.push(name(element));
    }
    return found;
}"""
"""What of a view cannot be read in full, though it is on the page: texts of boxes, lanes, buttons, tables, remarks."""

CONTRAST = """(view) => {
    const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const light = (...layers) => {
        for (const [colour, opacity] of layers) {
            probe.globalAlpha = opacity;
            probe.fillStyle = colour;
            probe.fillRect(0, 0, 1, 1);
        }
        const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map((value) => {
            const part = value / 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (text, behind, opacity = 1) => {
        const layers = [['#fff', 1], [behind, 1]];
        const [low, high] = [light(...layers), light(...layers, [text, opacity])].sort((one, other) => one - other);
        return (high + 0.05) / (low + 0.05);
    };
    const found = [];
    for (const node of view.querySelectorAll('.node')) {
        const box = getComputedStyle(node.querySelector('.box')).fill;
        for (const text of node.querySelectorAll('text')) {
            found.push([node.getAttribute('class'), ratio(getComputedStyle(text).fill, box)]);
        }
    }
    for (const lane of view.querySelectorAll('.worker')) {
        const { color, backgroundColor } = getComputedStyle(lane);
        found.push(['lane', ratio(color, backgroundColor)]);
    }
    let page = view;
    const isClear = (element) => getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)';
    while (page.parentElement && isClear(page)) page = page.parentElement;
    const { backgroundColor } = getComputedStyle(page);
    const texts = '.nbdist-link, .nbdist-meaning-item span, .nbdist-details .key, .nbdist-status, summary';
    for (const text of view.querySelectorAll(texts)) {
        const { color, opacity } = getComputedStyle(text);
        found.push([text.className || text.tagName, ratio(color, backgroundColor, Number(opacity))]);
    }
    return found;
}"""
"""How much the texts of a view of a backward pass stand out from what is behind them, by WCAG."""

CELLS = [
    "%load_ext nbdist\n%dist_init -n 3 --backend none --seed 1\nimport torch",
    """%%remote
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).relu()

part = Part()""",
    "def through(x):\n    import __main__\n    return __main__.part(x)",
    """%%watch --paused -a -o handle
with dist_autograd.context() as context_id:
    x = torch.randn(4, 8)
    for worker in ("worker0", "worker1", "worker2"):
        x = rpc.rpc_sync(worker, through, args=(x,))
    dist_autograd.backward(context_id, [x.pow(2).mean()])""",
    "print(len(handle.step(6)))",
    "handle.run()\nhandle.wait()",
]
PASS = 3
NODES = 22
FRAME = """(frame) => {
    const { left } = frame.getBoundingClientRect();
    const svg = frame.querySelector('svg');
    const lanes = [...svg.querySelectorAll('.lane')].map((lane) => lane.getBoundingClientRect());
    const labels = [...frame.querySelectorAll('.worker')].map((label) => label.getBoundingClientRect());
    return {
        room: frame.clientWidth,
        content: frame.scrollWidth,
        scale: svg.getBoundingClientRect().height / svg.viewBox.baseVal.height,
        away: labels.map((label) => Math.abs(label.left - left)),
        beside: labels.map(({ top, height }, index) =>
            Math.abs(top - lanes[index].top) + Math.abs(height - lanes[index].height)),
    };
}"""
"""How a frame is filled; and how far its lanes' labels are from its edge, and from their lanes."""
FOCUSED = "() => document.activeElement?.getAttribute('aria-label') ?? document.activeElement?.tagName"
RING = "() => getComputedStyle(document.activeElement).outlineStyle"
SELECTED = """() => [...document.querySelectorAll('.jp-Notebook .jp-Cell')]
    .findIndex((cell) => cell.matches('.jp-mod-selected'))"""


def resize(page, width, frame):
    """Change the page's width, and wait until the picture has followed."""
    page.page.set_viewport_size({"width": width, "height": 1000})
    page.page.evaluate("() => new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")
    return frame.evaluate(FRAME)


def check_fit(page, view, frame):
    wide = resize(page, 1400, frame)
    assert wide["content"] <= wide["room"] + 1, wide  # all of it can be seen
    assert 0.8 <= wide["scale"] <= 1
    for width in (1050, 700):
        narrow = resize(page, width, frame)
        assert view.evaluate(CLIPPED) == []
        assert 0.8 - 1e-3 <= narrow["scale"] <= wide["scale"]
        frame.evaluate("(frame) => { frame.scrollLeft = 10000; }")
        scrolled = frame.evaluate(FRAME)
        assert max(scrolled["away"]) <= 2, scrolled
        assert max(scrolled["beside"]) <= 2, scrolled
    assert narrow["content"] > narrow["room"]  # where it would be too small, it is scrolled
    resize(page, 1400, frame)


def check_zoom(page, view, frame):
    scale = lambda: frame.evaluate(FRAME)["scale"]  # noqa: E731
    fitted = scale()
    view.get_by_role("button", name="Larger", exact=True).click()
    assert scale() == pytest.approx(fitted * 1.25, rel=1e-3)
    view.get_by_role("button", name="Smaller", exact=True).click()
    assert scale() == pytest.approx(fitted, rel=1e-3)
    frame.hover()
    page.page.keyboard.down("Control")
    page.page.mouse.wheel(0, -100)
    page.page.keyboard.up("Control")
    page.page.wait_for_function(
        "([frame, than]) => frame.querySelector('svg').getBoundingClientRect().height > than",
        arg=[
            frame.element_handle(),
            fitted * frame.evaluate("(frame) => frame.querySelector('svg').viewBox.baseVal.height") + 1,
        ],
    )
    assert page.page.evaluate("() => visualViewport.scale") == 1
    view.get_by_role("button", name="Fit", exact=True).click()
    assert scale() == pytest.approx(fitted, rel=1e-3)


def check_keys(page, view, frame):
    keyboard, focused = page.page.keyboard, lambda: page.page.evaluate(FOCUSED)
    page.expect(view.locator(".node")).to_have_count(NODES)
    page.expect(view.locator(".nbdist-picture [tabindex='0']")).to_have_count(1)
    selected = page.page.evaluate(SELECTED)
    view.locator("select").focus()
    keyboard.press("Tab")
    if not page.page.evaluate("() => document.activeElement.classList.contains('node')"):
        keyboard.press("Tab")  # the browser lets a frame that scrolls be reached too
    keyboard.press("Home")
    assert focused().startswith("Mean on notebook, done"), focused()
    assert page.page.evaluate(RING) == "solid"
    keyboard.press("ArrowRight")
    assert focused().startswith("Pow on notebook")
    keyboard.press("ArrowDown")
    assert focused().startswith("receive on notebook")
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    assert focused().startswith("Addmm on worker2")
    keyboard.press("ArrowLeft")
    assert focused().startswith("Relu on worker2")
    keyboard.press("End")
    assert "worker0" in focused()
    keyboard.press("Home")
    keyboard.press("Enter")
    page.expect(view.locator(".nbdist-details")).to_contain_text("Mean")
    before = frame.evaluate(FRAME)["scale"]
    keyboard.press("+")
    assert frame.evaluate(FRAME)["scale"] == pytest.approx(before * 1.25, rel=1e-3)
    keyboard.press("0")
    assert frame.evaluate(FRAME)["scale"] == pytest.approx(before, rel=1e-3)
    page.expect(view.locator(".nbdist-picture [tabindex='0']")).to_have_count(1)
    keyboard.press("Tab")
    assert focused() == "SUMMARY"  # one press leaves the picture: the legend comes next
    assert page.page.evaluate(SELECTED) == selected  # no key has led the notebook elsewhere


def check_links(page, view, link):
    """Press a link of the remarks by a key: its node is chosen, and can be seen."""
    operation, _, worker = link.text_content().partition("@")
    link.focus()
    page.page.keyboard.press("Enter")
    chosen = view.locator(".node.chosen")
    page.expect(chosen).to_have_count(1)
    assert page.page.evaluate(FOCUSED).startswith(f"{operation} on {worker}")
    assert chosen.evaluate("(node) => node === document.activeElement")
    inside = """(node) => {
        const [inner, outer] = [node, node.closest('.nbdist-frame')].map((each) => each.getBoundingClientRect());
        return inner.left >= outer.left && inner.right <= outer.right && inner.top >= 0 && inner.bottom <= innerHeight;
    }"""
    assert chosen.evaluate(inside)
    page.expect(view.locator(".nbdist-details")).to_contain_text(f"{worker}:")


def check_contrast(view):
    found = view.evaluate(CONTRAST)
    assert len(found) > NODES
    assert not [each for each in found if each[1] < 4.5 and "unused" not in each[0]]
    return {name for name, _ in found}


@pytest.mark.soak  # tests/views/test_backward_in_page.py opens the view in a page
@pytest.mark.parametrize("theme", ["Light", "Dark"])
@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_it_fits_reads_and_is_walked_by_keys(front, theme, tmp_path, request):
    with notebook(CELLS, front, tmp_path, theme=f"JupyterLab {theme}") as page:
        for index in range(PASS + 1):
            page.finish(index)
        view = page.cell(PASS).locator(".nbdist-view")
        frame = view.locator(".nbdist-frame")
        view.locator(".node.halted").first.wait_for()
        step = view.get_by_role("button", name="Step", exact=True)
        step.focus()
        for count in (1, 2):
            page.page.keyboard.press("Enter")
            page.page.wait_for_function(
                "([view, count]) => view.querySelectorAll('.node.done').length === count",
                arg=[view.element_handle(), count],
            )
        page.finish(PASS + 1)
        page.page.wait_for_function(
            "(view) => view.querySelectorAll('.node.done').length === 8", arg=view.element_handle()
        )
        view.scroll_into_view_if_needed()
        check_fit(page, view, frame)
        check_zoom(page, view, frame)
        check_keys(page, view, frame)
        names = " ".join(check_contrast(view)).split()
        assert {"done", "halted", "waiting", "lane", "nbdist-link"} <= set(names)

        view.locator(".node[aria-label^='receive on notebook, done']").first.click()
        told = re.compile(r"its gradient goes to\s*node \d+ Relu on worker2")
        page.expect(view.locator(".nbdist-details")).to_contain_text(told)
        view.locator(".nbdist-details .nbdist-link").first.click()
        assert page.page.evaluate(FOCUSED).startswith("Relu on worker2")
        page.expect(view.locator(".nbdist-details")).to_contain_text("a gradient comes from")

        for what in ("time", "norm"):
            view.locator("select").select_option(what)
            page.expect(view.locator(".node.scaled").nth(7)).to_be_attached()
            page.expect(view.locator(".nbdist-scale")).to_be_visible()
            check_contrast(view)
        if picture := request.config.getoption("--pictures"):
            view.screenshot(path=f"{picture}/backward-{front}-{theme.lower()}.png")
        view.locator(".nbdist-meanings summary").click()
        page.expect(view.locator(".nbdist-scale")).to_be_hidden()
        view.locator("select").select_option("state")
        page.expect(view.locator(".node.scaled")).to_have_count(0)

        page.finish(PASS + 2)
        page.page.wait_for_function(  # until the last event has come, the remarks may change
            f"(view) => view.querySelector('.node.path') && view.querySelectorAll('.node.done').length === {NODES}",
            arg=view.element_handle(),
        )
        resize(page, 700, frame)
        # The critical path ends at a parameter of a worker. Which worker, and which nodes are named, depends on times.
        links = view.locator(".nbdist-remarks li").first.locator(".nbdist-link", has_text="@worker")
        check_links(page, view, links.last)
        view.get_by_role("button", name="Modules", exact=True).click()
        page.expect(view.locator(".node.group").nth(2)).to_be_attached()
        check_links(page, view, links.first)
        assert view.evaluate(CLIPPED) == []
        assert not page.complaints
