"""A notebook that is saved while its views live, and opened again: each view is there, as a picture.

What stands in the file is looked at where it was saved, where its kernel was killed and another one runs, and as one
that others sent, which is not trusted.
"""

import os
import signal

import nbformat
import pytest
from helpers.notebook.browser import needs_browser, notebook
from helpers.simulated import swarm_double

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

WIDGET = "application/vnd.jupyter.widget-view+json"
START = "%load_ext nbdist\n%dist_init -n 2 --backend none\nimport torch"
PID = "import os\nos.getpid()"
VIEWS = {
    "card": "rref = rpc.remote('worker1', torch.ones, args=(3,))\nrref",
    "pass": "%%watch --paused -a\nx = torch.ones(3, requires_grad=True)\nwith dist_autograd.context() as context_id:\n"
    "    dist_autograd.backward(context_id, [rpc.rpc_sync('worker1', torch.exp, args=(x,)).sum()])",
    "panel": "%dist_panel",
    "map": f"exec(open({swarm_double.__file__!r}).read())\nmap = three()\nmap",
}
SAID = {"card": "Tensor float32(3,)", "pass": "ExpBackward0", "panel": "idle", "map": "nobody has blocks 10-19"}
FIRST = 2
"""The cell of the first view."""


def visible(page, index):
    """The text below a cell that can be seen."""
    return page.cell(index).locator(".jp-OutputArea").first.inner_text()


def kinds_of(cell):
    """The MIME types of each output of a cell in the notebook's file."""
    return [set(output.get("data", {})) for output in cell.outputs]


def live(page, index):
    return page.cell(index).locator(".nbdist-card, .nbdist-view")


def check_pictures(page):
    """Each view shows its picture, and nothing else."""
    for index, name in enumerate(VIEWS, FIRST):
        picture = page.cell(index).locator("div[class$='-picture']")
        picture.wait_for()
        assert SAID[name] in picture.inner_text() or picture.locator("img, svg").count(), name
        said = visible(page, index)
        assert "widget" not in said, (name, said)
        assert "Error" not in said, (name, said)
        page.expect(live(page, index)).to_have_count(0)


@pytest.mark.parametrize(
    ("front", "sent"),
    [
        ("lab", False),  # tests/views/test_untrusted_in_page.py opens a notebook that others sent
        pytest.param("lab", True, marks=pytest.mark.soak),
        pytest.param("notebook", True, marks=pytest.mark.soak),
    ],
)
def test_saved_live_and_opened_with_a_new_kernel(front, sent, tmp_path):
    cells = [START, PID, *VIEWS.values(), "%dist_shutdown"]
    with notebook(cells, front, tmp_path) as page:
        for index in range(len(cells) - 1):
            page.finish(index)
        for index in range(FIRST, FIRST + len(VIEWS)):
            page.expect(live(page, index).locator("visible=true")).to_have_count(1)
            page.expect(page.cell(index).locator("div[class$='-picture']:visible")).to_have_count(0)
        page.page.wait_for_timeout(6000)  # until the pictures have caught up
        for index, name in enumerate(VIEWS, FIRST):
            picture = page.cell(index).locator("div[class$='-picture']")
            picture.filter(has_text=SAID[name]).or_(picture.locator("img")).first.wait_for(state="attached")
        saved = page.save()
        for index, name in enumerate(VIEWS, FIRST):
            kinds = kinds_of(saved.cells[index])
            assert {WIDGET} in kinds, name
            assert {"text/plain", "text/html"} in kinds, name
        nbformat.validate(saved)

        page.finish(len(cells) - 1)  # now the views are over
        check_pictures(page)
        over = page.save()
        for index, name in enumerate(VIEWS, FIRST):
            assert {WIDGET} not in kinds_of(over.cells[index]), name
        nbformat.validate(over)
        os.kill(int(page.told(1).rpartition(":")[2]), signal.SIGKILL)
    assert not page.complaints
    nbformat.write(saved, tmp_path / "book.ipynb")
    with notebook(cells, front, tmp_path, again=True) as page:
        check_pictures(page)
        page.finish(1)
    if not sent:
        return
    with notebook(cells, front, tmp_path, outputs=[cell.outputs for cell in saved.cells]) as page:
        for index, name in enumerate(VIEWS, FIRST):
            page.cell(index).locator(".jp-OutputArea-output").first.wait_for(state="attached")
            said = visible(page, index)
            assert SAID[name] in said or page.cell(index).locator("img").count(), (name, said)
            assert "widget" not in said, (name, said)
