"""The command line: ``python -m nbdist run``, ``worker``, ``doctor`` and ``swarm serve``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Sequence

from nbdist import __version__
from nbdist.durations import LONGEST
from nbdist.errors import NbdistError, UsageError


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
    run.add_argument("program", help="a script, or a module with -m; what follows belongs to the program")
    worker = commands.add_parser(
        "worker",
        help="run workers on this host for a notebook on any host",
        description="Joins the cluster of a notebook that has started it with `%%dist_init --launcher join` or "
        "`%%dist_init --host ADDRESS`, and runs workers for it until the cluster ends, or the notebook is lost. A "
        "cluster that runs grows by these workers, unless lost workers wait for a place. With --serve, they load the "
        "blocks of the notebook's swarms that no worker has, or the fewest or slowest.",
    )
    worker.add_argument(
        "--connect", required=True, metavar="FILE", help="the file of the invitation; - for standard input"
    )
    worker.add_argument("-n", "--workers", type=int, default=1, metavar="N", help="how many workers to run (1)")
    worker.add_argument("--host", metavar="ADDRESS", help="the address at which others reach this host")
    worker.add_argument(
        "--serve", action="store_true", help="serve the notebook's swarms: load the blocks that need a server most"
    )
    worker.add_argument("--with-parent", action="store_true", help="end when the process that started this one ends")
    doctor = commands.add_parser(
        "doctor",
        help="show what this installation can use",
        description="Shows versions, what this machine offers, what is wrong with it and what to do about that, and "
        "which agents of yours run on it.",
    )
    doctor.add_argument(
        "--connect",
        metavar="FILE",
        help="an invitation: say whether a worker of this host could join, and try the way to the notebook",
    )
    serve = commands.add_parser(
        "swarm",
        help="serve a language model over HTTP, without a notebook",
        description="Starts workers on this host, loads a model on them, and serves it to clients of OpenAI's API "
        "until Ctrl-C. Prints the address, the key, and a command to try them. Texts go on when a worker dies.",
    )
    serve.add_argument("action", choices=["serve"])
    serve.add_argument("model", help="a folder with a model of transformers, or smollm2")
    serve.add_argument("-n", "--workers", type=int, default=2, metavar="N", help="how many workers to start (2)")
    serve.add_argument("--http", type=int, default=0, metavar="PORT", help="the port (a free one)")
    serve.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="the address to listen at (127.0.0.1)")
    serve.add_argument(
        "--invite",
        metavar="FILE",
        help="write an invitation, valid as long as this runs, with which workers of this host and of others that "
        "reach the address of --host join: `python -m nbdist worker --connect FILE --serve`",
    )
    serve.add_argument("--no-key", action="store_true", help="ask for no key: any user of this host may use the model")
    return parser


def _serve(given: argparse.Namespace) -> int:
    import nbdist

    try:
        from nbdist.swarm.http.endpoint import listen

        listen(given.host, given.http, key=not given.no_key).close()  # an error comes now, before the model is loaded
    except (ImportError, OSError) as error:
        print(f"nbdist: {error}", file=sys.stderr)
        return 2
    host = given.host if given.invite else None
    with nbdist.Cluster(given.workers, backend="none", preload=["nbdist.swarm"], host=host) as cluster:
        if given.invite:
            cluster.on_joined = functools.partial(print, flush=True)
            cluster.invite(given.invite, uses=1000, expires=LONGEST)
        swarm = nbdist.swarm.serve(given.model, workers=range(given.workers))
        endpoint = swarm.http(given.http, given.host, key=not given.no_key)
        # A script that starts this with `&` has SIGINT ignored, and systemd and Docker send SIGTERM.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        print(f"{swarm}\n{endpoint}\nCtrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            endpoint.wait()
        endpoint.close()
        swarm.close()
    return 0


def _volunteer() -> str:
    try:
        from nbdist.swarm.placer import VOLUNTEER  # the workers, which are forked, have these imports, too
    except ImportError as error:  # it says what to install
        raise UsageError(str(error)) from error
    return VOLUNTEER


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the arguments into nbdist's own and those of the program of ``run``, which nbdist does not read."""
    if arguments[:1] != ["run"]:
        return arguments, []
    # The first word that is not an option is the program. argparse would take the program's options, such as -h, for
    # nbdist's own.
    end = next((at for at, word in enumerate(arguments[1:], 1) if not word.startswith("-")), len(arguments))
    return arguments[: end + 1], arguments[end + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; after an error of nbdist, print the error to stderr and return 2.

    ``run`` replaces this process by the program, and does not return. ``arguments`` are the words after ``python -m
    nbdist``; None for this process's own command line.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        nbdist 0.1.0
    """
    ours, programs = _split(sys.argv[1:] if arguments is None else list(arguments))
    given = _parser().parse_args(ours)
    try:
        if given.command == "run":
            from nbdist.compat.run import run

            run([*(["-m"] if given.is_module else []), given.program, *programs])  # does not return
        if given.command == "worker":
            from nbdist.cluster.processes.zygote import frozen_imports

            with frozen_imports():  # the imports are most of what this process does
                from nbdist.cluster.hosts.joining import join

                if given.serve:
                    os.environ[_volunteer()] = "1"  # its workers inherit it

            return join(given.connect, given.workers, given.host, given.with_parent)
        if given.command == "swarm":
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C while the model is loaded
                return _serve(given)
            return 130
        from nbdist.doctor import examine

        return examine(given.connect)
    except NbdistError as error:
        print(f"nbdist: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
