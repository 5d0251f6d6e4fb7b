"""Implements ``python -m nbdist run``: runs a program, and all Python processes that it starts, with nbdist.

The program replaces this process, so it has the same terminal, signals and exit code as without nbdist. This module
adds the folder ``site`` to PYTHONPATH; Python then imports ``site/sitecustomize.py`` whenever it starts. Child
processes inherit PYTHONPATH, unless the program gives them another environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nbdist.errors import UsageError

SITE = Path(__file__).with_name("site")


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``python *arguments``, in which torch's RPC is replaced by nbdist. Never returns.

    Raises UsageError if Python's flags keep it from reading PYTHONPATH or from importing ``sitecustomize``.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError("`python -m nbdist run` needs PYTHONPATH and site: leave out Python's flags -E, -I and -S")
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(SITE), *(inherited.split(os.pathsep) if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.stdout.flush()  # exec would drop what is buffered
    sys.stderr.flush()
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing
    os.execv(sys.executable, [sys.executable, *flags, *arguments])
