"""Draws docs/hang.gif, the README's moving picture: a hang that is found and ended, and a stepped pass.

Run it from the repository, where nbdist, its test and notebook extras and Chromium are installed: ``python
docs/draw_hang.py``. The pictures are of a real page. Where nothing moves for long, the moving picture goes on after two
seconds.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parent.parent
PICTURE = Path(__file__).parent / "hang.gif"
CELLS = (
    "%load_ext nbdist\n%dist_init -n 3 --seed 1",
    "%%remote\n"
    "from torch.nn.parallel import DistributedDataParallel\n\n"
    "model = DistributedDataParallel(torch.nn.Linear(8, 1))\n"
    "for batch in torch.randn(9 if rank == 2 else 10, 4, 8):  # a batch is missing on one rank\n"
    "    model(batch).pow(2).mean().backward()",
    "%%watch --paused -a\n"
    "import torch\n\n"
    'parts = [rpc.remote(f"worker{i}", torch.nn.Linear, args=(8, 8)) for i in range(3)]\n'
    "with dist_autograd.context() as context_id:\n"
    "    x = torch.randn(4, 8)\n"
    "    for part in parts:\n"
    "        x = part.rpc_sync().forward(x)\n"
    "    dist_autograd.backward(context_id, [x.sum()])",
)
HANG, WATCHED = 1, 2
"""The cells that the picture shows."""

WIDTH = 980
FRAME, LONGEST, LAST = 0.2, 2.0, 3.0
"""Seconds between two pictures of the hang, how long one stands at most, and how long the last of a cell stands."""

STEP, STEPS = 0.8, 6
"""How long a picture of the pass stands, in seconds, and how many nodes are stepped."""


class Film:
    """Pictures of a part of the page, and the seconds that each stands."""

    def __init__(self) -> None:
        self.frames: list[Image.Image] = []
        self.seconds: list[float] = []

    def add(self, png: bytes, seconds: float = FRAME, height: int | None = None) -> None:
        """Add the upper part of a picture; one that equals the last lets that one stand longer."""
        frame = Image.open(io.BytesIO(png)).convert("RGB")
        frame = frame.crop((0, 0, frame.width, height or frame.height))
        if self.frames and frame.size == self.frames[-1].size and frame.tobytes() == self.frames[-1].tobytes():
            self.seconds[-1] = min(LONGEST, self.seconds[-1] + seconds)
        else:
            self.frames.append(frame)
            self.seconds.append(seconds)

    def write(self, path: Path) -> None:
        """Write the pictures as a moving one, all as high as the highest."""
        height = max(frame.height for frame in self.frames)
        sheets = []
        for frame in self.frames:
            sheet = Image.new("RGB", (WIDTH, height), "white")
            sheet.paste(frame)
            sheets.append(sheet.quantize(64, dither=Image.Dither.NONE))
        durations = [round(seconds * 1000) for seconds in self.seconds]
        sheets[0].save(path, save_all=True, append_images=sheets[1:], duration=durations, loop=0, optimize=True)


def film(page: Any) -> Film:
    """Run the cells, and take pictures of the two that matter."""
    made = Film()
    page.page.set_viewport_size({"width": WIDTH + 20, "height": 1100})
    page.finish(0)
    page.run(HANG)
    waits = page.cell(HANG).locator(".jp-OutputArea").first
    for _ in shots(page, HANG, made, 20):
        if re.search("waits? in", waits.text_content() or ""):
            break
    else:
        raise SystemExit("The line that says who waits has not come.")
    for _ in shots(page, HANG, made, LONGEST):
        pass
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("i")
    page.page.keyboard.press("i")
    page.ended(HANG)
    for _ in shots(page, HANG, made, LONGEST):
        pass
    made.seconds[-1] = LAST
    page.finish(WATCHED)
    cell = page.cell(WATCHED)
    for done in range(STEPS + 1):
        if done:
            cell.get_by_text("Step", exact=True).click()
        page.expect(cell.locator(".nbdist-status")).to_contain_text(f"{done} of ")
        graph_ends = cell.locator("details").first.bounding_box()["y"] - cell.bounding_box()["y"]
        made.add(cell.screenshot(), STEP, round(graph_ends))
    made.seconds[-1] = LAST
    return made


def shots(page: Any, index: int, made: Film, seconds: float) -> Iterator[None]:
    """Take a picture of a cell every ``FRAME`` seconds."""
    for _ in range(round(seconds / FRAME)):
        made.add(page.cell(index).screenshot())
        yield
        page.page.wait_for_timeout(FRAME * 1000)


def main() -> None:
    """Draw it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.notebook.browser import notebook

    with tempfile.TemporaryDirectory() as folder, notebook(CELLS, "notebook", Path(folder)) as page:
        film(page).write(PICTURE)
    print(f"{PICTURE} is drawn, {PICTURE.stat().st_size / 1e6:.2f} MB.")


if __name__ == "__main__":
    main()
