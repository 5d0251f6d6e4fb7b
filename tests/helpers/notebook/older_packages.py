"""Kernels with older packages than those that are installed here, each set of them in a folder of its own.

Notebook and workers run with a folder first on their path; torch, nbdist and what the folder lacks are those of the
environment that runs the tests.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from helpers.suite.python_path import TESTS

LISTS = TESTS / "environments"
SHARED = ("torch", "pip", "setuptools", "ray")
"""Packages that stay those of the environment that runs the tests; it has no ray, and nothing here needs it."""
UV = (sys.executable, "-m", "uv", "pip")
COMM = 'raise ImportError("there is no comm, as on Colab")\n'


def pins(name):
    """The lines of a list in `environments`, such as "numpy==2.1.3". "-r LIST.txt" begins one that changes another."""
    found = {}
    for line in (LISTS / f"{name}.txt").read_text().splitlines():
        if line.startswith("-r "):
            found = {pin.partition("==")[0]: pin for pin in pins(line[3:].removesuffix(".txt"))}
        elif line and not line.startswith("#"):
            found[line.partition("==")[0]] = line
    return list(found.values())


def _is_here(pin):
    package, _, wanted = pin.partition("==")
    try:
        return version(package) == wanted
    except PackageNotFoundError:
        return False


def install(name, folder):
    """Put the packages of a list there that differ from those here; the test is skipped where they cannot be had."""
    wanted = [pin for pin in pins(name) if pin.partition("==")[0] not in SHARED and not _is_here(pin)]
    folder.mkdir(exist_ok=True)
    command = [*UV, "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode:
        pytest.skip(f"the packages of {name} cannot be had: {done.stderr.strip()[-200:]}")
    if not any(pin.startswith("comm==") for pin in pins(name)):
        (folder / "comm.py").write_text(COMM)
