"""The oldest ipykernel that is supported, in a folder of its own."""

import os
import subprocess
import sys

import pytest

OLDEST = "ipykernel==7.3.0"


def install(folder):
    """Put it there; the test is skipped where it cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), OLDEST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"{OLDEST} cannot be had: {done.stderr.strip()[-200:]}")


def environment(folder):
    """What has a process run on it."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
