"""All views in all pages: both front ends, light and dark, wide and narrow."""

import pytest
from helpers.notebook.browser import needs_browser, notebook
from helpers.simulated import swarm_double

pytestmark = [needs_browser(), pytest.mark.soak, pytest.mark.timeout(240)]

START = "%load_ext nbdist\n%dist_init -n 2 --backend none\nimport torch"
VIEWS = {
    "card": "rref = rpc.remote('worker1', torch.ones, args=(3,))\nrref",
    "references": "[rref, rref]",
    "timeline": "%%timeline\nrpc.rpc_sync('worker1', torch.add, args=(torch.ones(2), 1));",
    "map": f"exec(open({swarm_double.__file__!r}).read())\nthree()",
    "map that is over": "over = three()\nover.ended = True\nover",
    "status": "%dist_status",
    "memory": "%dist_memory",
    "peek": "display(rref)\nrref.release()\nrref",
}
LOOK = """el => {
    const shown = [...el.querySelectorAll("td, th, div, span, pre, b")].filter((each) =>
        each.offsetParent && [...each.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()));
    const background = (each) => {
        for (; each; each = each.parentElement) {
            const found = getComputedStyle(each).backgroundColor;
            if (!/rgba\\(.*, 0\\)|transparent/.test(found)) return found;
        }
        return "rgb(255, 255, 255)";
    };
    return shown.map((each) => [each.textContent, getComputedStyle(each).color, background(each)]);
}"""


def luminance(colour):
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_all_can_be_read_and_nothing_is_cut_off(front, theme, tmp_path):
    with notebook([START, *VIEWS.values()], front, tmp_path, theme=theme) as page:
        for index in range(len(VIEWS) + 1):
            page.finish(index)
        for width in (1050, 700):
            page.page.set_viewport_size({"width": width, "height": 1000})
            page.page.wait_for_timeout(500)
            for index, name in enumerate(VIEWS, 1):
                output = page.cell(index).locator(".jp-OutputArea").first
                output.scroll_into_view_if_needed()
                texts = page.page.evaluate(LOOK, output.element_handle())
                for text, colour, paper in texts:
                    if "■" not in text:  # of the legend, in the colours that it explains
                        assert contrast(colour, paper) > 4, (name, text, colour, paper)
                if front == "notebook" or width == 1050:  # else there are 330 pixels, in which tables scroll
                    for frame in output.locator("div[style*='overflow']:visible, .nbdist-rows:visible").all():
                        fits = "el => el.scrollWidth <= el.clientWidth + 1"
                        assert page.page.evaluate(fits, frame.element_handle()), (name, width)
                for image in output.locator("img:visible").all():
                    scheme = page.page.evaluate("el => getComputedStyle(el).colorScheme", image.element_handle())
                    assert ("dark" in scheme) == ("Dark" in theme), name
        assert not page.complaints
