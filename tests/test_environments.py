"""Installing nbdist where people have notebooks already changes none of their packages; it only adds some.

A resolver says so: with the packages of Colab or Kaggle as constraints, it finds an answer for each set of extras.
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.notebook import older_packages

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "swarm", "notebook")
PLACES = ("colab", "kaggle", "kaggle-now")


def python_of(name):
    """The Python that an environment has, by its list's last line of comments."""
    return re.findall(r"^# Python (.*)", (older_packages.LISTS / f"{name}.txt").read_text(), re.MULTILINE)[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The path of nbdist's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, timeout=200)
    [made] = folder.glob("nbdist-*.whl")
    return made


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        # The others would find the same, as a rule.
        pytest.param(name, extra, marks=[] if (name, extra) == ("colab", "swarm") else pytest.mark.soak)
        for name in PLACES
        for extra in EXTRAS
    ],
)
def test_a_resolver_keeps_all_packages(name, extra, built, tmp_path):
    """For the environment's own Python, which need not be here."""
    listed = [pin for pin in older_packages.pins(name) if pin.partition("==")[0] not in ("pip", "setuptools")]
    (tmp_path / "constraints.txt").write_text("\n".join(listed))
    (tmp_path / "wanted.txt").write_text(f"nbdist{f'[{extra}]' if extra else ''} @ {built.as_uri()}\n")
    command = [*older_packages.UV, "compile", "--quiet", "--no-annotate", "--no-header", "--python-platform", "linux"]
    command += ["--python-version", python_of(name), "-c", "constraints.txt", "wanted.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    if "error sending request" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip(f"the index of packages cannot be reached: {done.stderr}")
    assert done.returncode == 0, done.stderr  # the resolver's own words name the package that would be changed
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    assert found["torch"] == dict(pin.split("==") for pin in listed)["torch"]


def empty_package(name, version, folder):
    """Write a wheel with nothing in it but its name and version, for a package of which only these are asked."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: nbdist\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in texts.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*texts, f"{info}/RECORD"]))
    return path


@pytest.fixture
def place(name, tmp_path):
    """Return the Python of an environment with a place's packages; torch is there by its name only."""
    python = tmp_path / "place" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "place"], check=True, timeout=100)
    listed = dict(pin.split("==") for pin in older_packages.pins(name))
    torch = empty_package("torch", listed["torch"], tmp_path)
    wanted = [f"{package}=={version}" for package, version in listed.items() if package not in older_packages.SHARED]
    command = [*older_packages.UV, "install", "--quiet", "--no-deps", "--python", python, *wanted, torch]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the packages of {name} cannot be had: {done.stderr.strip()[-300:]}")
    return python


def packages(python):
    """Return the packages of an environment, as "name==version"."""
    command = [python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def install(python, *arguments):
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", PLACES)
def test_pip_changes_no_package(name, extra, built, place):
    """pip itself, on this Python."""
    before = packages(place)
    install(place, f"nbdist{f'[{extra}]' if extra else ''} @ {built.as_uri()}")
    after = packages(place)
    assert before <= after
    added = {each.partition("==")[0] for each in after - before}
    assert {"nbdist", "msgspec"} <= added
    print(name, extra, "adds", sorted(added))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["kaggle", "kaggle-now"])
def test_two_wheels_are_enough_without_a_network(name, built, place, tmp_path):
    """As notebooks of Kaggle's competitions install it, from a folder that was uploaded."""
    folder = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, built, "msgspec"]
    subprocess.run(command, check=True, timeout=300)
    before = packages(place)
    install(place, "--no-index", "--find-links", folder, "nbdist")
    assert {each.partition("==")[0] for each in packages(place) - before} == {"nbdist", "msgspec"}
