"""The script that runs public programs beside torch, tried with small programs of our own."""

import beside_torch
import pytest
from beside_torch import Program, main
from helpers.processes.stacks import has_ended

pytestmark = pytest.mark.soak  # only the soak runs the script

GOOD = """
import os, sys
import torch, torchvision
import helper
import torch.distributed.rpc as rpc
from torchvision.models.resnet import Bottleneck

on_nbdist = rpc.init_rpc.__module__.startswith("nbdist")
here = torch.ones(1)
for there in (here.to("cuda:1"), here.cuda(), here.to(0), torch.nn.Linear(1, 1).to(1).cuda().bias):
    assert there.device.type == "cpu" and there.data_ptr() != here.data_ptr()
assert torchvision.models.resnet50(num_classes=3)(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
assert next(iter(torchvision.datasets.MNIST(".", train=False)))[0].shape == (1, 28, 28)
rpc.init_rpc("me", rank=0, world_size=1)
rpc.shutdown()
print(helper.WORD, sys.argv[1:], "nbdist" if on_nbdist else "torch")
"""
FAILS_ON_NBDIST = """
import torch.distributed.rpc as rpc
if rpc.init_rpc.__module__.startswith("nbdist"):
    raise ValueError("not on this one")
"""
CHILD_STAYS = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
"""
STAYS = CHILD_STAYS + "import time; time.sleep(600)"


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Runs the script with one program; its exit code and the table's rows, as lists."""

    def show(code, limit="60", **options):
        (tmp_path / "program.py").write_text(code)
        (tmp_path / "helper.py").write_text("WORD = 'beside'")
        monkeypatch.setattr(beside_torch, "PROGRAMS", (Program("program.py", **options),))
        monkeypatch.setenv("NBDIST_PROGRAMS", str(tmp_path))
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "0")
        code = main(["--limit", limit, "--write", str(tmp_path / "page.md")])
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert "\n".join(rows) in (tmp_path / "page.md").read_text()
        return code, [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]

    return show


def test_a_program_runs_on_both_with_its_arguments_and_what_stands_in(shown, monkeypatch):
    for name in ("torchvision", "two_gpus"):
        monkeypatch.setitem(beside_torch.LACKS, name, lambda: True)
    code, rows = shown(GOOD, commands=("--some 1",), needs=("torchvision", "two_gpus"))
    assert code == 0
    for row, on in zip(rows, ("torch", "nbdist"), strict=True):
        last = f"`beside ['--some', '1'] {on}`"
        assert [*row[:3], *row[4:]] == ["`program.py --some 1`", on, "yes", last, "torchvision, two_gpus"]
        assert 0 < float(row[3]) < 60


def test_a_program_that_fails_on_nbdist_alone_fails_the_script(shown):
    code, rows = shown(FAILS_ON_NBDIST)
    assert code == 1
    assert [row[2] for row in rows] == ["yes", "exit code 1"]
    assert rows[1][4] == "`ValueError: not on this one`"


@pytest.mark.parametrize(
    ("program", "limit", "ended"), [(STAYS, "2", "no, killed"), (CHILD_STAYS, "60", "yes, but processes were left")]
)
def test_what_does_not_end_is_killed_with_its_children(shown, monkeypatch, program, limit, ended):
    monkeypatch.setattr(beside_torch, "_GRACE", 0.5)
    _, rows = shown(program, limit)
    for row in rows:
        assert row[2] == ended
        assert has_ended(int(row[4].strip("`")))


def test_without_the_folder_it_says_that_it_skips(monkeypatch, capsys):
    monkeypatch.delenv("NBDIST_PROGRAMS", raising=False)
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED: NBDIST_PROGRAMS is not set")


def test_a_program_that_the_folder_lacks_is_named_and_fails_the_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NBDIST_PROGRAMS", str(tmp_path))
    assert main(["--only", "rnn"]) == 1
    assert "rnn/main.py is not in" in capsys.readouterr().out
