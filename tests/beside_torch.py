"""Runs pytorch/examples' RPC programs, unmodified, on torch's own RPC and on nbdist, and prints a table of both.

The programs are not ours and not in this repository. ``NBDIST_PROGRAMS`` names the folder that has them, which is
``distributed/rpc`` of a checkout of github.com/pytorch/examples:

    NBDIST_PROGRAMS=examples/distributed/rpc python tests/beside_torch.py --write docs/programs.md

Each program runs with its own command line, first by ``python``, then by ``python -m nbdist run``, in a session of its
own, which is killed when the time is over. The exit code is 1 if a program ends on torch and not on nbdist. Modules
and devices that this machine lacks are stood in for by `stand_ins/`, for both, and named in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers.processes import stacks
from helpers.suite.python_path import python_path

from nbdist import __version__

VARIABLE = "NBDIST_PROGRAMS"
HOW = {"torch": (), "nbdist": ("-m", "nbdist", "run")}
"""What stands between ``python`` and the program."""

STAND_INS = Path(__file__).parent / "stand_ins"
_LONGEST_LINE = 70
_GRACE = 5.0
"""Seconds after the program's end in which its children may end."""


@dataclass(frozen=True)
class Program:
    """A program, and how it is run."""

    path: str
    commands: tuple[str, ...] = ("",)
    """The command line of each process that a person would start, all at once."""
    needs: tuple[str, ...] = ()
    """What else it needs: names of `LACKS`."""


PROGRAMS = (
    Program("rnn/main.py"),
    Program("rl/main.py", needs=("low_threshold",)),
    Program("batch/parameter_server.py", needs=("torchvision", "two_gpus")),
    Program("batch/reinforce.py", ("--num-episode 3",), needs=("two_gpus",)),
    Program(
        "parameter_server/rpc_parameter_server.py",
        ("--world_size 2 --rank 0", "--world_size 2 --rank 1"),
        needs=("torchvision",),
    ),
    Program("ddp_rpc/main.py", needs=("two_gpus",)),
    Program("pipeline/main.py", needs=("torchvision", "two_gpus")),
)

LACKS = {
    "low_threshold": lambda: True,
    "torchvision": lambda: importlib.util.find_spec("torchvision") is None,
    "two_gpus": lambda: torch.accelerator.device_count() < 2,
}
"""Whether this machine lacks it. What is lacking is stood in for by the folder of that name in `STAND_INS`."""


@dataclass(frozen=True)
class Run:
    """How one run of a program went."""

    ended: str
    """``"yes"``, the exit codes that were not 0, or that it was killed."""
    seconds: float
    last_line: str
    """The last line that the program printed; of its errors, where it failed."""

    @property
    def good(self) -> bool:
        """Whether the program came to its end."""
        return self.ended == "yes"


def run(folder: Path, program: Program, how: tuple[str, ...], limit: float) -> Run:
    """Run a program once, for at most ``limit`` seconds; none of its processes outlives the call."""
    path = (folder / program.path).resolve()
    stand_ins = [STAND_INS / name for name in stood_in(program)]
    environment = {**os.environ, **python_path(*stand_ins), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # it would hide the modules beside the program
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as files:
        began = time.monotonic()
        processes, outputs = [], []
        for number, command in enumerate(program.commands):
            output, errors = (Path(place, f"{kind}{number}") for kind in ("output", "errors"))
            outputs.append((output, errors))
            processes.append(
                subprocess.Popen(
                    [sys.executable, *how, str(path), *command.split()],
                    cwd=place,
                    env=environment,
                    stdout=files.enter_context(output.open("w")),
                    stderr=files.enter_context(errors.open("w")),
                    start_new_session=True,
                )
            )
        ended = _wait(processes, began + limit)
        seconds = time.monotonic() - began
        left = _end(processes)
        if ended == "yes" and left:
            ended = "yes, but processes were left"
        last = _last_line([output for output, _ in outputs])
        if ended.startswith("exit code"):
            last = _last_line([errors for _, errors in outputs]) or last
    return Run(ended, seconds, last)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until all have ended, or one has failed, or the deadline is over; return how it went, in words."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return f"exit code {failed[0]}"
        if None not in codes:
            return "yes"
        if time.monotonic() > deadline:
            return "no, killed"
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Kill what is left of the processes' sessions; return whether anything was left `_GRACE` seconds after the end."""
    deadline = time.monotonic() + (_GRACE if all(process.poll() == 0 for process in processes) else 0)
    while (living := _living(processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = bool(living)
    while living:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        living = _living(processes)
    for process in processes:
        process.wait()
    return left


def _living(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the processes of these sessions that have not ended; a zombie has, whoever fails to reap it."""
    return [pid for process in processes for pid in stacks.session(process.pid) if not stacks.has_ended(pid)]


def _last_line(files: list[Path]) -> str:
    lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def stood_in(program: Program) -> list[str]:
    """Return what this machine lacks of what a program needs."""
    return [name for name in program.needs if LACKS[name]()]


def table(folder: Path, programs: list[Program], limit: float) -> tuple[list[str], bool]:
    """Run the programs; return the table's lines, and whether nbdist ended all that torch ended."""
    lines = ["| program | on | ended | seconds | last line | stand-ins |", "| --- | --- | --- | --- | --- | --- |"]
    print(*lines, sep="\n")
    fine = True
    for program in programs:
        if not (folder / program.path).exists():
            print(f"{program.path} is not in {folder}, the folder that {VARIABLE} names", flush=True)
            fine = False
            continue
        command = f"{program.path} {'; '.join(program.commands)}".strip()
        stand_ins = ", ".join(stood_in(program)) or "none"
        runs = {}
        for name, how in HOW.items():
            runs[name] = done = run(folder, program, how, limit)
            last = done.last_line[:_LONGEST_LINE].replace("|", "\\|")
            lines.append(f"| `{command}` | {name} | {done.ended} | {done.seconds:.1f} | `{last}` | {stand_ins} |")
            print(lines[-1], flush=True)
        fine = fine and (runs["nbdist"].good or not runs["torch"].good)
    return lines, fine


_PAGE = """# Programs of pytorch/examples, on torch's RPC and on nbdist

The programs in `distributed/rpc` of [pytorch/examples](https://github.com/pytorch/examples), unmodified: by `python`,
which means torch's own RPC, and by `python -m nbdist run`. `tests/beside_torch.py` ran them and wrote this page, with
torch {torch} and nbdist {nbdist}, on {cores} cores, one program at a time, {limit:.0f} s at most for each. Write this
page anew with:

    NBDIST_PROGRAMS=examples/distributed/rpc python tests/beside_torch.py --write docs/programs.md

A stand-in takes the place of what the machine lacked, or of time. `tests/stand_ins` has them, and both runs get the
same: random pictures for MNIST and a ResNet with less arithmetic (torchvision), the CPU for two GPUs (two_gpus), a
reward of 40 at which CartPole counts as solved, not 475 (low_threshold). The models learn little; processes, calls,
references, passes and collectives are the program's.

Seconds are of one run, on a machine that others used as well: they show that a program ends, not which side is faster.
torch runs first and fills the compiler's cache. pipeline/main.py on nbdist then uses this cache, which makes it faster.

{table}
"""


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a program ended on torch and not on nbdist."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one run may take (300)")
    parser.add_argument("--only", default="", help="run the programs whose path contains this")
    parser.add_argument("--write", type=Path, help="write a page with the table to this file")
    given = parser.parse_args(arguments)
    folder = os.environ.get(VARIABLE)
    if not folder:
        print(f"SKIPPED: {VARIABLE} is not set; it names distributed/rpc of a checkout of pytorch/examples")
        return 0
    lines, fine = table(Path(folder), [program for program in PROGRAMS if given.only in program.path], given.limit)
    if given.write is not None:
        versions = {"torch": torch.__version__, "nbdist": __version__, "cores": os.cpu_count(), "limit": given.limit}
        given.write.write_text(_PAGE.format(table="\n".join(lines), **versions))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
