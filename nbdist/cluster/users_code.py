"""Tells files with the user's code from those of Python, of installed packages and of nbdist."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

__all__ = ["is_users"]

_INNER = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")} | {str(Path(__file__).parents[1])}
)
"""The folders of code that is not the user's: Python's library, installed packages, and nbdist."""


def is_users(file: str) -> bool:
    """Return whether a file holds the user's code, not Python's, an installed package's or nbdist's.

    A package may be installed into any folder of `sys.path` (``pip install --target``), beside code of the user's.
    Compiled code, such as Cython's, names its files by relative paths, which count as not the user's.
    """
    installed = "/site-packages/" in file or "/dist-packages/" in file  # even those of another environment
    if installed or not os.path.isabs(file) or file.startswith(_INNER):
        return False
    for folder in sys.path:
        if folder and file.startswith(f"{folder}/"):
            first = file[len(folder) + 1 :].partition("/")[0]
            if first.removesuffix(".py") in _installed_into(folder):
                return False
    return True


@lru_cache(maxsize=256)
def _installed_into(folder: str) -> frozenset[str]:
    """Return the names of the packages and modules that pip has installed into a folder. It is read once."""
    return frozenset(
        path.parts[0].removesuffix(".py")
        for each in distributions(path=[folder])
        for path in each.files or ()
        if path.parts
    )
