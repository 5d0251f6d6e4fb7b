"""Installing nbdist where people have notebooks already changes none of their packages; it only adds some.

A resolver says so: with the packages of Colab or Kaggle as constraints, it finds an answer for each set of extras.
"""

import re
import subprocess
import sys
from pathlib import Path

import older
import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "swarm", "notebook")


def python_of(name):
    """The Python that an environment has, by its list's last line of comments."""
    return re.findall(r"^# Python (.*)", (older.LISTS / f"{name}.txt").read_text(), re.MULTILINE)[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The path of nbdist's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, timeout=200)
    [made] = folder.glob("nbdist-*.whl")
    return made


TOO_OLD = pytest.mark.xfail(
    strict=True,
    reason="Kaggle has torch 2.10, with which tests of autograd fail, and transformers 5.0, whose layers the swarm "
    "cannot stand in for",
)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", ["colab", pytest.param("kaggle", marks=TOO_OLD)])
def test_a_resolver_keeps_all_packages(name, extra, built, tmp_path):
    """For the environment's own Python, which need not be here."""
    listed = [pin for pin in older.pins(name) if pin.partition("==")[0] not in ("pip", "setuptools")]
    (tmp_path / "constraints.txt").write_text("\n".join(listed))
    (tmp_path / "wanted.txt").write_text(f"nbdist{f'[{extra}]' if extra else ''} @ {built.as_uri()}\n")
    command = [*older.UV, "compile", "--quiet", "--no-annotate", "--no-header", "--python-platform", "linux"]
    command += ["--python-version", python_of(name), "-c", "constraints.txt", "wanted.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    if "error sending request" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip(f"the index of packages cannot be reached: {done.stderr}")
    assert done.returncode == 0, done.stderr  # the resolver's own words name the package that would be changed
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    assert found["torch"] == dict(pin.split("==") for pin in listed)["torch"]
