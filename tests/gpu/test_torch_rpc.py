"""torch's own tests of RPC on GPUs, unmodified, out of the installed wheel, on nbdist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.suite.python_path import python_path

HERE = Path(__file__).parent


def listed():
    """The tests with the number of GPUs that each needs: those below ``-- 2 GPUs`` need two."""
    needed = 0
    for line in (HERE / "torch_rpc.txt").read_text().splitlines():
        if found := re.match(r"# -- (\d+) GPUs?$", line):
            needed = int(found[1])
        elif line and not line.startswith("#"):
            yield pytest.param(line, needed, id=line)


@pytest.mark.parametrize(("name", "needed"), listed())
def test_suite(name, needed):
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, and torch sees {torch.cuda.device_count()} here")
    # The tests of DDP call a trainer as soon as the caller's own process group is there; see tests/conformance.
    environment = {
        **os.environ,
        **python_path(HERE, HERE.parent),
        "OMP_NUM_THREADS": "1",
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", f"torch_suites_on_gpus.{name}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
        timeout=200,
    )
    if ran.returncode or "skipped" in ran.stdout:
        pytest.fail(f"{name} failed (exit code {ran.returncode})\n{ran.stdout}", pytrace=False)
