"""Whose code a file holds, wherever packages are installed."""

import json
import os
import sys
import threading

import pytest
import torch

import nbdist
from nbdist import code_places
from nbdist.code_places import (
    CELLS,
    NBDIST,
    TORCH,
    _installed_into,
    is_nbdists,
    is_of_cell,
    is_pythons,
    is_torchs,
    is_users,
    shown_name,
)

CELL = "/tmp/ipykernel_12/3456.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a package that pip has installed there, and a module of the user's."""
    _installed_into.cache_clear()
    info = tmp_path / "wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: wheel\nVersion: 1.0\n")
    (info / "RECORD").write_text("wheel/__init__.py,,\nwheel_extra.py,,\nwheel-1.0.dist-info/METADATA,,\n")
    (tmp_path / "wheel").mkdir()
    for name in ("wheel/__init__.py", "wheel_extra.py"):  # Python 3.12 on leaves files out that are not there
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_packages_of_pip_are_not_the_users_wherever_they_are(folder):
    assert not is_users(f"{folder}/wheel/__init__.py")
    assert not is_users(f"{folder}/wheel/deep/down.py")
    assert not is_users(f"{folder}/wheel_extra.py")
    assert is_users(f"{folder}/mine.py")
    assert is_users(f"{folder}/wheels/mine.py")
    assert is_users(CELL)


@pytest.mark.parametrize(
    "file", [json.__file__, pytest.__file__, torch.__file__, nbdist.__file__, os.__file__, "_cython.pyx", "<string>"]
)
def test_what_is_pythons_installed_torchs_or_ours(file):
    assert not is_users(file)


def test_a_folder_that_is_gone_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "/nowhere", *sys.path])
    assert is_users("/nowhere/mine.py")


def test_a_checkout_of_torch_is_torchs_and_not_the_users(monkeypatch):
    monkeypatch.setattr(code_places, "TORCH", "/home/me/pytorch/torch/")
    file = "/home/me/pytorch/torch/distributed/distributed_c10d.py"
    assert is_torchs(file, "distributed")
    assert not is_users(file)
    assert is_users("/home/me/pytorch/mine.py")


def test_a_folder_whose_name_only_begins_alike_is_another_one(monkeypatch):
    monkeypatch.setattr(code_places, "NBDIST", "/home/me/nbdist/")
    assert not is_nbdists("/home/me/nbdist_experiments/train.py")
    assert is_users("/home/me/nbdist_experiments/train.py")
    assert is_nbdists("/home/me/nbdist/rpc/api.py", "rpc")
    assert not is_nbdists("/home/me/nbdist/rpc_of_mine.py", "rpc")
    assert not is_torchs(f"{TORCH[:-1]}vision/models/resnet.py")


def test_nbdists_engine_counts_as_the_file_of_torch_that_calls_it():
    file = nbdist.autograd.passes.engine.__file__
    assert is_torchs(file, "autograd")
    assert not is_torchs(file, "distributed")
    assert not is_nbdists(file)
    assert not is_users(file)


def test_packages_of_nbdist_and_torch():
    assert is_nbdists(nbdist.rpc.api.__file__)
    assert is_nbdists(nbdist.rpc.api.__file__, "nn", "rpc")
    assert not is_nbdists(nbdist.rpc.api.__file__, "nn")
    assert not is_nbdists(f"{NBDIST[:-1]}.py")
    assert is_torchs(torch.futures.__file__, "futures")
    assert not is_torchs(torch.nn.__file__, "futures")


def test_python_is_not_what_is_installed_inside_of_it():
    assert is_pythons(threading.__file__)
    assert is_pythons(json.__file__)
    assert is_pythons("<frozen importlib._bootstrap>")
    assert not is_pythons(f"{os.path.dirname(threading.__file__)}/site-packages/model.py")
    assert not is_pythons(torch.__file__)
    assert not is_pythons(CELL)


def test_files_of_cells_and_their_names(monkeypatch):
    assert is_of_cell(CELL)
    assert not is_of_cell("/home/me/ipykernel_tests/model.py")
    assert shown_name(CELL) == "cell"
    monkeypatch.setitem(CELLS, CELL, 12)
    assert shown_name(CELL) == "In[12]"
    assert shown_name("/home/me/ipykernel/model.py") == "model.py"
