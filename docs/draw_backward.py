"""Draws docs/backward.png, the docs' picture of `%%watch`: a pass over three workers, held after six nodes.

Run it from the repository, where nbdist, its test extra and Chromium are installed: ``python docs/draw_backward.py``.
The picture goes into notebooks/03_watch_backward.ipynb as well. With another path it goes there only, from a page of
another width or in the dark if that is asked for: ``python docs/draw_backward.py build/narrow.png --width 700 --dark``.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
CELLS = (
    "%load_ext nbdist\n%dist_init -n 3 --backend none --seed 1\nimport torch",
    "%%remote\nfrom torch import nn\n\n"
    "class Part(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.fc = nn.Linear(256, 256)\n\n"
    "    def forward(self, x):\n"
    "        return self.fc(x).relu()\n\n"
    "part = Part()",
    "def through(x):\n    import __main__\n    return __main__.part(x)",
    "%%watch --paused -a -o handle\n"
    "with dist_autograd.context() as context_id:\n"
    "    x = torch.randn(64, 256)\n"
    '    for worker in ("worker0", "worker1", "worker2"):\n'
    "        x = rpc.rpc_sync(worker, through, args=(x,))\n"
    "    loss = torch.nn.functional.mse_loss(x, torch.zeros(64, 256))\n"
    "    dist_autograd.backward(context_id, [loss])",
    "_ = handle.step(6)",
)
PICTURE = Path(__file__).parent / "backward.png"
NOTEBOOK = ROOT / "notebooks" / "03_watch_backward.ipynb"
WATCHED = 3
"""The cell of the view."""


def main() -> None:
    """Draw it."""
    options = argparse.ArgumentParser()
    options.add_argument("path", nargs="?", type=Path, default=PICTURE)
    options.add_argument("--width", type=int, default=1050)
    options.add_argument("--dark", action="store_true")
    given = options.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.notebook.browser import notebook

    theme = "JupyterLab Dark" if given.dark else None
    with tempfile.TemporaryDirectory() as folder, notebook(CELLS, "notebook", Path(folder), theme=theme) as page:
        page.page.set_viewport_size({"width": given.width, "height": 1200})
        for index in range(len(CELLS)):
            page.finish(index)
        view = page.cell(WATCHED).locator(".nbdist-view")
        done = "(view) => view.querySelectorAll('.node.done').length === 6"
        page.page.wait_for_function(done, arg=view.element_handle())
        view.locator(".node.halted").first.click()
        page.page.wait_for_timeout(1000)  # until the distribution of its gradients has come
        view.screenshot(path=str(given.path))
    if given.path == PICTURE:
        attach()


def attach() -> None:
    """Put the picture into the notebook that shows it."""
    book = nbformat.read(NOTEBOOK, 4)
    (cell,) = (cell for cell in book.cells if PICTURE.name in cell.get("attachments", {}))
    cell.attachments[PICTURE.name]["image/png"] = base64.b64encode(PICTURE.read_bytes()).decode()
    nbformat.write(book, NOTEBOOK)


if __name__ == "__main__":
    main()
