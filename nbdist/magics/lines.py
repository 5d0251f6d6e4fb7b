"""Reads the lines of magics: pure, a line in, options out. A bad line is an error that says how to write it."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from typing import Any, NoReturn

from nbdist.cluster.spec import Spec
from nbdist.errors import UsageError

__all__ = ["CELL_OPTIONS", "INIT_OPTIONS", "CellLine", "ValueLine", "parse_cell", "parse_init", "parse_value", "reader"]


class _Reader(argparse.ArgumentParser):
    def __init__(self, usage: str) -> None:
        super().__init__(prog=usage.split()[0], usage=usage, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; write: {self.usage}")

    def read(self, line: str) -> argparse.Namespace:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{line.strip()!r}: {error}; write: {self.usage}") from None
        # A word such as -1 is a target, not an option.
        return self.parse_args([f" {word}" if re.fullmatch(r"-\d.*", word) else word for word in words])


reader = _Reader


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if value <= 0:
        raise argparse.ArgumentTypeError("the time must be more than 0 s")
    return value


# -- %%remote -----------------------------------------------------------------------------------

CELL_OPTIONS = ("-a", "--noblock", "-o", "--out", "-t", "--timeout", "--group-outputs", "--local")


@dataclass(frozen=True)
class CellLine:
    """The first line of a remote cell."""

    targets: str | None
    noblock: bool
    out: str | None
    timeout: float | None
    group_outputs: bool
    local: bool


def parse_cell(line: str, usage: str) -> CellLine:
    """Read ``[TARGET] [-a] [-o NAME] [-t SECONDS] [--group-outputs] [--local]``."""
    reader = _Reader(usage)
    reader.add_argument("targets", nargs="*")
    reader.add_argument("-a", "--noblock", action="store_true")
    reader.add_argument("-o", "--out")
    reader.add_argument("-t", "--timeout", type=_seconds)
    reader.add_argument("--group-outputs", action="store_true")
    reader.add_argument("--local", action="store_true")
    found = reader.read(line)
    if found.out is not None and not found.out.isidentifier():
        raise UsageError(f"-o needs the name of a variable, not {found.out!r}")
    targets = "".join(word.strip() for word in found.targets) or None
    return CellLine(targets, found.noblock, found.out, found.timeout, found.group_outputs, found.local)


_VALUE = re.compile(r"\s*(?:(?:-t|--timeout)(?:\s+|=)(\S+)\s+)?((?:\[[^\]]*\]|[^\s\[])+)\s+(.*\S)\s*", re.DOTALL)


@dataclass(frozen=True)
class ValueLine:
    """``%remote TARGET expression``."""

    targets: str
    expression: str
    timeout: float | None


def parse_value(line: str) -> ValueLine:
    """Read ``[-t SECONDS] TARGET expression``."""
    match = _VALUE.fullmatch(line)
    if match is None:
        raise UsageError(
            "write: %remote TARGET expression, for instance: %remote worker1 x.shape; a cell that runs on workers "
            "begins with %%remote"
        )
    try:
        timeout = _seconds(match[1]) if match[1] is not None else None
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"-t: {error}") from None
    return ValueLine(match[2], match[3], timeout)


# -- %dist_init ---------------------------------------------------------------------------------

INIT_OPTIONS = (
    "-n",
    "--num-processes",
    "-g",
    "--gpu-ids",
    "--backend",
    "--driver",
    "--seed",
    "-t",
    "--timeout",
    "--launcher",
    "--isolate-gpus",
)

_INIT_USAGE = (
    "%dist_init [-n N] [-g 0,1] [--backend gloo|nccl|none] [--driver NAME] [--seed S] [-t SECONDS] "
    "[--launcher NAME] [--isolate-gpus]"
)


def parse_init(line: str) -> Spec:
    """Read the line of ``%dist_init``."""
    reader = _Reader(_INIT_USAGE)
    reader.add_argument("-n", "--num-processes", type=int)
    reader.add_argument("-g", "--gpu-ids", type=_numbers)
    reader.add_argument("--backend", choices=("gloo", "nccl", "none"))
    reader.add_argument("--driver")
    reader.add_argument("--seed", type=int)
    reader.add_argument("-t", "--timeout", type=_seconds, default=120.0)
    reader.add_argument("--launcher", default="local")
    reader.add_argument("--isolate-gpus", action="store_true")
    found: Any = reader.read(line)
    count = found.num_processes
    if count is None:
        count = len(found.gpu_ids) if found.gpu_ids else 2
    spec = Spec(
        count,
        found.gpu_ids,
        found.backend,
        found.driver,
        found.seed,
        found.timeout,
        found.launcher,
        found.isolate_gpus,
    )
    spec.check()
    return spec


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip("[]").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1") from None
