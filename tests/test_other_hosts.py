"""A host of tests sees nothing of the machine below /tmp but Python and the tests, wherever these are."""

import subprocess

import pytest
from helpers.hosts import other_hosts
from helpers.hosts.other_hosts import can_make_hosts, hosts

_LOOK = "import os, sys; print(os.path.exists(sys.argv[1]), os.listdir(sys.argv[2]), os.getcwd())"


@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
@pytest.mark.parametrize("name", ["clone", "a clone's place", "c" * 150])
def test_a_clone_below_tmp_is_seen_and_nothing_else_there(tmp_path, monkeypatch, name):
    clone, hidden = tmp_path / name, tmp_path / "hidden"
    clone.mkdir()
    hidden.mkdir()
    (clone / "file").touch()
    monkeypatch.setattr(other_hosts, "__file__", str(clone / "tests" / "helpers" / "hosts" / "other_hosts.py"))
    with hosts(1) as (_, [other]):
        process = other.start("-c", _LOOK, str(clone / "file"), str(tmp_path), stdout=subprocess.PIPE)
        with process.stdout:
            seen = process.stdout.read()
    assert seen.decode().strip() == f"True {[name]} /"
    assert hidden.exists()
