"""Programs written for torch.distributed.rpc, by changing their imports and unchanged; and the README's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes.listening import free_port

PROGRAMS = Path(__file__).parent / "programs"
README = Path(__file__).parent.parent / "README.md"
EXPECTED = {"sync": "tensor([4., 4.])\n", "async": "tensor([5., 5.])\n"}


def run_together(*commands: list[str]) -> list[str]:
    """What the processes of one world print; they meet by env://."""
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank, command in enumerate(commands)
    ]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in done]


@pytest.mark.parametrize("program", ["sync", pytest.param("async", marks=pytest.mark.soak)])
def test_with_only_the_imports_changed(program, tmp_path):
    for rank in (0, 1):
        text = (PROGRAMS / f"{program}_worker{rank}.py").read_text()
        changed = text.replace("import torch.distributed.rpc as rpc", "import nbdist.rpc as rpc")
        assert changed != text
        (tmp_path / f"worker{rank}.py").write_text(changed)
    outputs = run_together(*([sys.executable, str(tmp_path / f"worker{rank}.py")] for rank in (0, 1)))
    assert outputs == [EXPECTED[program], ""]


@pytest.mark.parametrize("program", [pytest.param("sync", marks=pytest.mark.soak), "async"])
def test_unchanged_under_run(program):
    outputs = run_together(
        *([sys.executable, "-m", "nbdist", "run", str(PROGRAMS / f"{program}_worker{rank}.py")] for rank in (0, 1))
    )
    assert outputs == [EXPECTED[program], ""]


AUTOGRAD = {
    "dist_autograd_model": (2, "[True, True, True]\n"),
    "dist_autograd_simple": (1, "each worker's parameters moved\n"),
}
IMPORTS = {
    "torch.distributed.autograd": "nbdist.autograd",
    "torch.distributed.rpc": "nbdist.rpc",
    "from torch.distributed import rpc": "from nbdist import rpc",
    "torch.distributed.optim": "nbdist.optim",
}


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("dist_autograd_model", "run"),
        ("dist_autograd_simple", "imports"),
        pytest.param("dist_autograd_model", "imports", marks=pytest.mark.soak),
        pytest.param("dist_autograd_simple", "run", marks=pytest.mark.soak),
    ],
)
def test_autograd_programs(program, how, tmp_path):
    processes, expected = AUTOGRAD[program]
    path, command = PROGRAMS / f"{program}.py", [sys.executable]
    if how == "imports":
        text = path.read_text()
        for old, new in IMPORTS.items():
            text = text.replace(old, new)
        assert "torch.distributed" not in text
        path = tmp_path / path.name
        path.write_text(text)
    else:
        command += ["-m", "nbdist", "run"]
    outputs = run_together(*([*command, str(path)] for _ in range(processes)))
    assert outputs == [expected, *[""] * (processes - 1)]


def test_the_readmes_first_program(tmp_path):
    found = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README.read_text(), re.DOTALL))
    assert set(found) == {"worker0", "worker1"}
    for name, code in found.items():
        (tmp_path / f"{name}.py").write_text(code)
    output, _ = run_together(*([sys.executable, str(tmp_path / f"{name}.py")] for name in ("worker0", "worker1")))
    assert "tensor([4., 4.])\ntensor([5., 5.])\ntorch.Size([128, 64]) torch.Size([128, 64])" in output
    assert "<RRef to Tensor float32(128, 64) on worker1, confirmed>" in output
    assert "tensor([10., 10.])" in output


def test_the_demo():
    demo = Path(__file__).parent.parent / "examples" / "demo.py"
    done = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in ("ZeroDivisionError: division by zero", "raised on worker1, in divide", "WorkerLost: worker2 died"):
        assert line in done.stdout


TUTORIALS = {
    "pipeline_resnet50": ["--splits", "3", "--batches", "2", "--batch-size", "7", "--image", "64"],
    "batch_parameter_server": ["--trainers", "2", "--batches", "3", "--batch-size", "4"],
    "batch_cartpole": ["--observers", "2", "--mode", "batch", "--episodes", "3", "--steps", "50"],
}


@pytest.mark.soak  # the test below runs such programs on nbdist, and notebooks/ has them with their results
@pytest.mark.parametrize("program", TUTORIALS)
def test_a_tutorials_program_prints_the_same_on_torch_and_on_nbdist(program):
    """Written for torch, with `mp.spawn` and arguments; not a word of it is changed."""
    path = Path(__file__).parent.parent / "notebooks" / "programs" / f"{program}.py"
    printed = []
    for how in ([], ["-m", "nbdist", "run"]):
        command = [sys.executable, *how, str(path), *TUTORIALS[program], "--port", str(free_port())]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) in (2, 3)


FAILING = {
    "batch_parameter_server": ["--trainers", "2", "--batches", "3", "--batch-size", "2", "--fail", "trainer2"],
    "batch_cartpole": ["--observers", "2", "--mode", "batch", "--episodes", "1", "--steps", "20", "--fail", "2"],
}


@pytest.mark.parametrize(
    "how", [pytest.param([], id="torch", marks=pytest.mark.soak), pytest.param(["-m", "nbdist", "run"], id="nbdist")]
)
@pytest.mark.parametrize("program", ["batch_parameter_server", pytest.param("batch_cartpole", marks=pytest.mark.soak)])
def test_where_one_fails_the_others_end_too(program, how):
    """They would wait for ever for a batch that is never complete."""
    path = Path(__file__).parent.parent / "notebooks" / "programs" / f"{program}.py"
    command = [sys.executable, *how, str(path), *FAILING[program], "--port", str(free_port())]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode != 0
    ended = re.findall(r"(\w+\d) ended: (.*)", done.stderr)
    assert len(ended) == 2, done.stderr
    assert "asked to fail" in done.stderr
