"""``python -m nbdist run``: a program as it is, and all Python processes that it starts, on nbdist.

The program replaces this process, so that nothing stands between it and its terminal, its signals and its
exit code. What carries nbdist into it is the directory ``site`` on PYTHONPATH; its children inherit that,
however they are started, unless they are given another environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nbdist.errors import UsageError

__all__ = ["run"]

SITE = Path(__file__).with_name("site")


def run(arguments: Sequence[str]) -> NoReturn:
    """Become ``python *arguments``, with nbdist in the place of torch's RPC."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError("run works through PYTHONPATH and site; leave out Python's flags -E, -I and -S")
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(SITE), *(inherited.split(os.pathsep) if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.stdout.flush()
    sys.stderr.flush()
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing
    os.execv(sys.executable, [sys.executable, *flags, *arguments])
