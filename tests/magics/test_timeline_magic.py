"""`%%timeline` above a cell: the cell is what it would be without, and the picture comes with it."""

import json

from helpers.notebook.frontend import Notebook


def test_timeline_shows_what_workers_did_while_the_cell_ran(tmp_path):
    path = tmp_path / "told.json"
    notebook = Notebook()
    try:
        notebook.run("%dist_init -n 2 --backend none\nimport torch")
        cell = notebook.run(
            f"%%timeline {path}\nx = rpc.rpc_sync('worker1', torch.add, args=(torch.ones(2), 1))\nx.tolist()"
        )
        assert cell.result == "[2.0, 2.0]"
        (shown,) = cell.displays
        assert "worker1: 1 call" in shown["text/plain"]
        assert "<img" in shown["text/html"]
        assert "call of a function" in shown["text/html"]  # the legend
        events = json.loads(path.read_text())["traceEvents"]
        assert [event["name"] for event in events if event["ph"] == "X"] == ["add"]
        cell = notebook.run("%%timeline\ny = x.sum();")
        assert cell.result is None
        (shown,) = cell.displays
        assert "nothing to show. A timeline shows cells of workers, calls (RPCs), backward" in shown["text/plain"]
        assert "nothing to show. A timeline shows cells of workers, calls (RPCs), backward" in shown["text/html"]
        assert "<img" not in shown["text/html"]
        cell = notebook.run("%%timeline\n%%remote 1\ntorch.ones(2, requires_grad=True).sum().backward()")
        assert "worker1: 1 cell, 1 local backward pass; busy" in cell.displays[0]["text/plain"]
        assert f"local backward pass ({cell.name}:3)" in cell.displays[0]["text/html"]
        assert notebook.run("y.item()").result == "4.0"
        failed = notebook.run("%%timeline\n1 / 0", check=False)
        assert failed.error["ename"] == "ZeroDivisionError"
        assert "1 / 0" in failed.traceback
        assert len(failed.displays) == 1
    finally:
        notebook.close()
