"""A saved notebook that is not trusted, opened where its kernel is not: every view has a form that is still there."""

import nbformat
import pytest
from helpers.notebook.browser import needs_browser, notebook
from helpers.notebook.frontend import Notebook
from helpers.simulated import swarm_double

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

CELLS = {
    "card": "rref = rpc.remote('worker1', torch.ones, args=(3,))\nrref",
    "cards": "rref.to_here(); [rref, rref]",
    "pass": "%%watch\nx = torch.ones(3, requires_grad=True)\nwith dist_autograd.context() as context_id:\n"
    "    dist_autograd.backward(context_id, [rpc.rpc_sync('worker1', torch.exp, args=(x,)).sum()])",
    "panel": "%dist_panel",
    "difference": "%dist_diff 1 + rank",
    "memory": "%dist_memory",
    "status": "%dist_status",
    "trace": "with dist_autograd.context() as context_id:\n    y = rpc.rpc_sync('worker1', torch.exp, args=(x,))\n"
    "    display(dist_autograd.trace(context_id))",
    "timeline": "%%timeline\nrpc.rpc_sync('worker1', torch.exp, args=(x,)).sum().item();",
    "map": f"exec(open({swarm_double.__file__!r}).read())\nthree()",
}
SAID = {
    "card": "RRef on worker1",
    "cards": "Tensor float32(3,)",
    "pass": "critical path",
    "panel": "idle",
    "difference": "differs: 1 of 1 parts",
    "memory": ", rref",
    "status": "idle",
    "trace": "",
    "timeline": "call",
    "map": "nobody has blocks 10-19",
}
DRAWN = {"pass", "trace", "timeline", "map"}


@pytest.fixture(scope="module")
def saved():
    with Notebook() as running:
        running.run("%dist_init -n 2 --backend none\nimport torch")
        return [outputs_of(running.run(cell)) for cell in CELLS.values()]


def outputs_of(cell):
    """What a front end saves of it."""
    outputs = []
    for message in cell.messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "update_display_data":
            outputs[-1]["data"] = content["data"]
        elif kind in ("display_data", "execute_result"):
            number = {"execution_count": 1} if kind == "execute_result" else {}
            outputs.append(nbformat.v4.new_output(kind, data=content["data"], **number))
    return outputs


@pytest.mark.parametrize("front", ["lab", pytest.param("notebook", marks=pytest.mark.soak)])
def test_every_view_has_its_static_form(front, saved, tmp_path):
    with notebook(list(CELLS.values()), front, tmp_path, outputs=saved) as page:
        for index, name in enumerate(CELLS):
            output = page.cell(index).locator(".jp-OutputArea-output").first
            output.wait_for(state="attached")
            text = output.text_content()
            assert SAID[name] in text, (name, text)
            assert "widget" not in text, (name, text)
            page.expect(output.locator("img")).to_have_count(int(name in DRAWN))
            for picture in output.locator("img").all():
                assert picture.evaluate("async (image) => { await image.decode(); return image.naturalWidth; }") > 100
        told = page.page.locator("span[title*='ExpBackward0']")  # what a drawing tells where one points
        page.expect(told).to_have_count(2)
        assert not page.strangers
