"""Runs Python in processes of their own, because what compat does to a process cannot be undone."""

import os
import subprocess
import sys

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def python(*arguments, check=True, **environment):
    """Run an interpreter with those arguments; what it did."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
