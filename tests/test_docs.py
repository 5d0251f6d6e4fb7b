"""What docs/a_call.md names is there: files, classes and their methods."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import nbdist.rpc
import nbdist.wire

ROOT = Path(__file__).parents[1]
PAGE = ROOT.joinpath("docs", "a_call.md").read_text(encoding="utf-8")


def classes() -> dict[str, type]:
    """The classes of rpc, wire and the watch of processes, by name."""
    found: dict[str, type] = {}
    for package in (nbdist.rpc, nbdist.wire):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found |= {
                name: thing
                for name, thing in vars(importlib.import_module(module.name)).items()
                if isinstance(thing, type) and thing.__module__.startswith("nbdist.")
            }
    return found


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:nbdist|tests)/[\w/]+\.py)`", PAGE))))
def test_the_files_are_there(path):
    assert ROOT.joinpath(path).is_file()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b[A-Z][a-z][A-Za-z]+\.\w+", PAGE))))
def test_the_methods_are_there(name):
    cls, method = name.split(".")
    assert hasattr(classes()[cls], method), f"{cls} has no {method}"


def test_the_page_names_something():
    assert len(re.findall(r"\b[A-Z][a-z][A-Za-z]+\.\w+", PAGE)) > 20
