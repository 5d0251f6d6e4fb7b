"""Runs torch's autograd cases again and again on a busy machine, and keeps all stacks of one that stands still.

    python -m pytest -m soak tests/conformance/test_stalls.py

``NBDIST_STALL_MINUTES`` says for how long (5), ``NBDIST_STALL_LOAD`` how many processes keep the machine busy (three
for each core), ``NBDIST_STALL_FOLDER`` where the stacks go; with
``NBDIST_STALL_CASES=all`` it is all of `DistAutogradTest`.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.processes.stacks import collect, session
from helpers.processes.torch_suites import Zygote

STANDS_STILL = 15
"""Seconds after which a case has stalled; beside 20 busy processes the slowest of 213 cases took 3.5 s."""

CASES = [
    "DistAutogradTest.test_backward_multiple_round_trips",
    "TensorPipeAgentDistAutogradTest.test_backward_multiple_round_trips_sparse",
    "DistAutogradTest.test_backward_multiple_output_tensors",
    "DistAutogradTest.test_backward_rref_nested",
    "DistAutogradTest.test_nested_backward_accumulate_grads",
    "DistAutogradTest.test_backward_complex_python_udf",
]


def cases():
    """Return the names of the cases to run, in turn."""
    if os.environ.get("NBDIST_STALL_CASES") != "all":
        return CASES
    from torch.testing._internal.distributed.rpc.dist_autograd_test import DistAutogradTest

    return [f"DistAutogradTest.{name}" for name in dir(DistAutogradTest) if name.startswith("test_")]


@contextlib.contextmanager
def busy(count):
    """Keep the machine's cores busy with so many processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def watched(zygote, file):
    """Write the stacks of the processes that run a case to ``file`` if the block takes too long."""
    ended = threading.Event()

    def watch():
        for number in range(1, 4):  # later looks show what moves after all
            if ended.wait(STANDS_STILL):
                return
            pids = [pid for child in children(zygote.process.pid) for pid in session(child)]
            with file.open("a") as out:
                print(f"\n#### {number * STANDS_STILL} s: processes {pids}\n{collect(pids)}", file=out)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def children(pid):
    """Return the processes that ``pid`` has started and that live."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_case_stands_still_on_a_busy_machine(tmp_path):
    minutes = float(os.environ.get("NBDIST_STALL_MINUTES", "5"))
    load = int(os.environ.get("NBDIST_STALL_LOAD", str(3 * (os.cpu_count() or 1))))
    folder = Path(os.environ.get("NBDIST_STALL_FOLDER", str(tmp_path)))
    folder.mkdir(parents=True, exist_ok=True)
    zygote = Zygote(tmp_path / "log")
    stalled, took, chosen, deadline = [], [], cases(), time.monotonic() + minutes * 60
    try:
        with busy(load):
            while time.monotonic() < deadline:
                name = chosen[len(took) % len(chosen)]
                output, file = tmp_path / "output", folder / f"stall-{os.getpid()}-{len(took)}.txt"
                with watched(zygote, file):
                    answer = zygote.run(name, output)
                took.append(answer["seconds"])
                if file.exists():
                    with file.open("a") as out:
                        print(f"\n#### {name}: {answer}\n{output.read_text()}", file=out)
                    stalled.append(f"{name}: {answer}; stacks in {file}")
    finally:
        zygote.close()
        longest = max(took, default=0)
        print(f"{len(took)} cases in {minutes:g} min beside {load} busy processes; the longest took {longest} s")
    assert not stalled, "\n".join(stalled)
