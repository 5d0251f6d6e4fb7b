"""The sdist that is published has all that `make check` and the tests need."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONE_OF_EACH = (
    "tests/autograd/test_ordering.py",
    "tests/channel/test_gate.py",
    "tests/cluster/test_spec.py",
    "tests/compat/test_run.py",
    "tests/magics/test_lines.py",
    "tests/nn/test_cutting.py",
    "tests/optim/test_state.py",
    "tests/rpc/test_calls.py",
    "tests/swarm/test_routing.py",
    "tests/views/test_remarks.py",
    "tests/wire/test_messages.py",
)


@pytest.mark.parametrize("file", ONE_OF_EACH)
def test_the_files_are_there(file):
    assert ROOT.joinpath(file).is_file()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_unpacked_sdist_passes(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], check=True, cwd=ROOT
    )
    (packed,) = tmp_path.glob("nbdist-*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / packed.name.removesuffix(".tar.gz")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    subprocess.run(["make", "check"], check=True, cwd=folder, env=environment)
    subprocess.run(["make", "test", f"ARGS={' '.join(ONE_OF_EACH)}"], check=True, cwd=folder, env=environment)
