"""Which files hold the user's code, wherever packages are installed."""

import json
import os
import sys

import pytest

import nbdist
from nbdist.cluster.users_code import _installed_into, is_users


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a package that pip has installed there, and a module of the user's."""
    _installed_into.cache_clear()
    info = tmp_path / "wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: wheel\nVersion: 1.0\n")
    (info / "RECORD").write_text("wheel/__init__.py,,\nwheel_extra.py,,\nwheel-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_packages_of_pip_are_not_the_users_wherever_they_are(folder):
    assert not is_users(f"{folder}/wheel/__init__.py")
    assert not is_users(f"{folder}/wheel/deep/down.py")
    assert not is_users(f"{folder}/wheel_extra.py")
    assert is_users(f"{folder}/mine.py")
    assert is_users(f"{folder}/wheels/mine.py")
    assert is_users("/tmp/ipykernel_12/3456.py")


@pytest.mark.parametrize(
    "file", [json.__file__, pytest.__file__, nbdist.__file__, os.__file__, "_cython.pyx", "<string>"]
)
def test_what_is_pythons_installed_or_ours(file):
    assert not is_users(file)


def test_a_folder_that_is_gone_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "/nowhere", *sys.path])
    assert is_users("/nowhere/mine.py")
