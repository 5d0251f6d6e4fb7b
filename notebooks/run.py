"""Runs notebooks without a browser, and says of each cell whether it did what it is there for.

    python notebooks/run.py [--write] [--html FILE] [NOTEBOOK ...]

Without a name, all notebooks of this folder run, each in a kernel of its own, which is this Python. A cell passes if

- it raised nothing, or it is tagged ``raises-exception`` and did raise;
- its value is True, if it is tagged ``verdict``;
- it did not fail in silence: a reply that says ``error`` has an output that says so too. A front end, nbval and a
  reader see only outputs; without one they would take a broken cell for a good one.

A notebook is given up at a cell that raised and should not have; a verdict that is not True does not keep the rest
from running. The exit status is 1 if any cell did not pass.

``--write`` puts the outputs into the notebooks, as they are committed: nothing in them tells when, where, or by which
process they were made. ``--html`` makes one page of a notebook, which needs no network to be read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent
CELL_TIMEOUT = 300
"""Seconds: a cell that starts Ray takes 40 on a quiet machine, and several times that on a busy one."""
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL | re.IGNORECASE)


class Runner:
    """One notebook on its way through a kernel; ``failed`` names the cells that did not pass."""

    def __init__(self, path: Path, *, say: Any = print) -> None:
        self.path = path
        self.notebook = nbformat.read(path, as_version=4)
        self.failed: list[str] = []
        self._say = say
        self._reply: dict[str, Any] = {}

    def run(self) -> bool:
        """Run it; whether all its cells passed."""
        manager = AsyncKernelManager(kernel_name="python3")
        manager.kernel_spec.argv[0] = sys.executable  # whatever Python a kernelspec of this machine names
        manager.transport_encryption = "auto"  # where it can be had; ipykernel warns without
        client = NotebookClient(
            self.notebook,
            km=manager,
            timeout=CELL_TIMEOUT,
            allow_errors=True,  # what may fail is judged here
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": str(self.path.parent)}},
        )
        client.on_cell_executed = self._on_reply
        self._say(f"{self.path.name}")
        start = time.monotonic()
        with client.setup_kernel(cleanup_kc=True):
            for index, cell in enumerate(self.notebook.cells):
                if cell.cell_type == "code" and cell.source.strip() and not self._run_cell(client, cell, index):
                    self._say("  the rest was not run")
                    break
        bad = f"{len(self.failed)} did not pass" if self.failed else "all passed"
        self._say(f"  {bad}, {time.monotonic() - start:.0f} s")
        return not self.failed

    def _on_reply(self, execute_reply: dict[str, Any], **_: Any) -> None:
        self._reply = execute_reply["content"]

    def _run_cell(self, client: NotebookClient, cell: Any, index: int) -> bool:
        """Run a cell and say what came of it; whether the next one makes sense."""
        start = time.monotonic()
        self._reply = {"status": "none"}
        try:
            client.execute_cell(cell, index)
            passed, word, go_on = judge(cell, self._reply)
        except CellTimeoutError:
            passed, word, go_on = False, f"NOT DONE after {CELL_TIMEOUT} s", False
        except DeadKernelError:
            passed, word, go_on = False, "THE KERNEL DIED", False
        label = f"In[{cell.execution_count or '?'}]"
        first = next((line for line in cell.source.splitlines() if line.strip()), "")
        self._say(f"  {label:>6}  {time.monotonic() - start:5.1f} s  {word:<24}  {first[:70]}".rstrip())
        if not passed:
            self.failed.append(label)
            for line in _what_it_said(cell, self._reply):
                self._say(f"{'':18}| {line}")
        return go_on


def judge(cell: Any, reply: dict[str, Any]) -> tuple[bool, str, bool]:
    """Of a cell that has run: whether it passes, in a few words why, and whether the next one makes sense."""
    tags = cell.metadata.get("tags", [])
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if reply["status"] != "ok" and not errors:
        return False, f"FAILED IN SILENCE: {reply.get('ename', reply['status'])}", False
    if errors:
        expected = "raises-exception" in tags
        return expected, f"{'raised' if expected else 'RAISED'} {errors[-1].ename}", expected
    if "raises-exception" in tags:
        return False, "SHOULD HAVE RAISED", True
    if "verdict" in tags:
        results = [output for output in cell.outputs if output.output_type == "execute_result"]
        value = results[-1].data.get("text/plain") if results else None
        return value == "True", f"verdict {value}", True
    return True, "ok", True


def _what_it_said(cell: Any, reply: dict[str, Any]) -> list[str]:
    """The end of what a cell put out, for the reader of a log."""
    said = []
    for output in cell.outputs:
        if output.output_type == "stream":
            said.append(output.text)
        elif output.output_type == "error":
            said += output.traceback
        else:
            said.append(output.data.get("text/plain", ""))
    said = said or list(reply.get("traceback", []))
    return _COLOUR.sub("", "\n".join(said)).splitlines()[-30:]


def clean(notebook: Any) -> None:
    """Leave nothing in a notebook that differs from one machine, or one run, to the next, but its outputs."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key == "tags"})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


def write_html(notebook: Any, title: str, target: Path) -> None:
    """One page with everything in it: no style, script or picture is fetched from elsewhere."""
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook, resources={"metadata": {"name": title}})
    page = _SCRIPT.sub("", page)  # they typeset formulas and draw diagrams, with libraries from elsewhere
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")


def main() -> int:
    """As the module's text says."""
    parser = argparse.ArgumentParser(description="Run notebooks without a browser and judge their cells.")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--write", action="store_true", help="put the outputs into the notebooks")
    parser.add_argument("--html", type=Path, metavar="FILE", help="make a page of the notebook, outputs and all")
    options = parser.parse_args()
    paths = options.notebooks or sorted(HERE.glob("*.ipynb"))
    if options.html and len(paths) != 1:
        parser.error("--html is for one notebook; name it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
    passed = True
    for path in paths:
        runner = Runner(path)
        passed = runner.run() and passed
        if options.html:
            write_html(runner.notebook, path.stem, options.html)
            print(f"  {options.html} has the outputs and the pictures; any browser shows it")
        if options.write:
            clean(runner.notebook)
            nbformat.write(runner.notebook, path)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
