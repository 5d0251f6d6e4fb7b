"""What repo2docker, and so Binder, makes of the folder binder/; asked through its Python API, without Docker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from repo2docker.app import Repo2Docker
from repo2docker.buildpacks import PythonBuildPack

ROOT = Path(__file__).parent.parent
BINDER = ROOT / "binder"


@pytest.fixture
def pack(monkeypatch):
    """The build pack that Binder takes for this repository, chosen as it chooses."""
    monkeypatch.chdir(ROOT)
    app = Repo2Docker()
    packs = (kind(base_image=app.base_image) for kind in app.buildpacks)
    found = next(pack for pack in packs if pack.detect())
    found.platform = "linux/amd64"  # what mybinder.org builds on
    return found


def requirements() -> list[Requirement]:
    lines = (line.partition(" #")[0].strip() for line in (BINDER / "requirements.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


def test_it_is_a_python_repository(pack):
    assert type(pack) is PythonBuildPack
    assert pack.binder_dir == "binder"


def test_the_python_is_one_that_the_package_supports(pack):
    assert pack.python_version == "3.11"
    assert not pack.separate_kernel_env  # else what postBuild installs would not reach the kernel
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Requirement(f"python{project['requires-python']}").specifier.contains(pack.python_version)


def test_the_package_is_installed_after_the_copy(pack):
    assert pack.get_post_build_scripts() == ["binder/postBuild"]
    assert re.search(r"^python -m pip install .* \.$", (BINDER / "postBuild").read_text(), re.MULTILINE)
    steps = pack.render().splitlines()

    def at(pattern: str) -> int:
        return next(number for number, step in enumerate(steps) if re.search(pattern, step))

    # torch, the large download, comes before the copy: a change of the package does not bring it anew.
    assert (
        at(r"RUN .*pip install .*binder/requirements\.txt") < at(r"^COPY .* src/ \$") < at(r"^RUN \./binder/postBuild")
    )


def test_the_scripts_can_be_executed():
    for script in (BINDER / "postBuild", BINDER / "start"):
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


def test_sessions_start_with_thread_limits(pack):
    assert pack.get_start_script() == "${REPO_DIR}/binder/start"
    shown = "import os; print([os.environ[f'{name}_NUM_THREADS'] for name in ('OMP', 'MKL', 'OPENBLAS', 'NUMEXPR')])"
    done = subprocess.run([BINDER / "start", sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout == "['1', '1', '1', '1']\n"


def test_no_cuda_is_brought_in():
    wanted = {requirement.name: requirement for requirement in requirements()}
    assert not [name for name in wanted if name.startswith(("nvidia", "cuda", "triton"))]
    (exact,) = wanted["torch"].specifier
    assert exact.operator == "=="
    assert exact.version.endswith("+cpu")
    # Installing the package finds this torch good enough, and leaves it.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = next(found for found in map(Requirement, project["dependencies"]) if found.name == "torch")
    assert own.specifier.contains(exact.version)


def test_what_the_notebooks_import_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {"nbdist", *sys.stdlib_module_names, *(wanted.name.replace("-", "_") for wanted in requirements())}
    there |= {Requirement(dependency).name for dependency in project["dependencies"]}
    there |= {"IPython"}  # as `ipython` calls its package
    there |= {path.parent.name for path in (ROOT / "notebooks").glob("*/__init__.py")}
    imported = set()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code":
                imported |= set(re.findall(r"^\s*(?:import|from) (\w+)", "".join(cell["source"]), re.MULTILINE))
    assert imported <= there
