"""``python -m nbdist``: what is done from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nbdist import __version__
from nbdist.errors import NbdistError

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nbdist", description="Distributed PyTorch over ZeroMQ.")
    parser.add_argument("--version", action="version", version=f"nbdist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        usage="python -m nbdist run [-h] [-m] program [arguments ...]",
        help="run a program in which torch.distributed.rpc means nbdist",
        description="Runs a program as `python` would; in it, and in every Python process that it starts, "
        "torch.distributed.rpc means nbdist.",
    )
    run.add_argument("-m", action="store_true", dest="is_module", help="program is the name of a module")
    run.add_argument("program", help="a script, or a module with -m; what follows it is the program's")
    commands.add_parser(
        "doctor",
        help="show what this installation has to work with",
        description="Shows versions, what this machine offers, and which agents of yours run on it.",
    )
    return parser


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What is ours, and what the program to run is given: that is never looked into."""
    if arguments[:1] != ["run"]:
        return arguments, []
    end = 1
    while end < len(arguments) and arguments[end].startswith("-"):
        end += 1
    return arguments[: end + 1], arguments[end + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit code."""
    ours, programs = _split(sys.argv[1:] if arguments is None else list(arguments))
    given = _parser().parse_args(ours)
    try:
        if given.command == "run":
            from nbdist.compat.run import run

            run([*(["-m"] if given.is_module else []), given.program, *programs])
        from nbdist.doctor import examine

        return examine()
    except NbdistError as error:
        print(f"nbdist: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
