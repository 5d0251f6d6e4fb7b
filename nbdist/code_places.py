"""Tells by a file's name whose code the file holds. Names are ``frame.f_code.co_filename`` or ``module.__file__``.

==================== ======================================================================================
function             True for a file of
==================== ======================================================================================
`is_nbdists`         nbdist, or one of its packages; not of its engine
`is_torchs`          torch, or one of its packages, or nbdist's engine; not of torchvision, which is another package
`is_pythons`         Python itself, without the packages that are installed inside of its library
`is_users`           the user: of none of the above, and of no installed package
`is_of_cell`         a cell of a notebook
==================== ======================================================================================

Code that looks at the frames of every operation compares names with `NBDIST` and `TORCH` itself, which is quicker.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

import torch

NBDIST = f"{Path(__file__).parent}/"  # the slash keeps nbdist_experiments/ beside it apart
TORCH = f"{Path(torch.__file__).parent}/"
# Packages may be installed inside of the folder of Python's library, too.
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
# torch.autograd calls nbdist's engine in place of its own. So each backward pass has a frame of this file, below which
# torch waits in C++ for other workers: it counts as a frame of the file of torch that has called it.
_STANDS_FOR = {f"{NBDIST}autograd/passes/engine.py": f"{TORCH}autograd/graph.py"}
BACKWARD = frozenset([*_STANDS_FOR, *_STANDS_FOR.values()])
"""The files of the innermost frames of Python while a backward pass runs in C++."""
_PACKAGES = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("purelib", "platlib"))
# ipykernel compiles a cell under a digest of its code, in a directory of the process.
_CELL = re.compile(r"/ipykernel_\d+/\d+\.py$")
CELLS: dict[str, int] = {}
"""The numbers of cells, by the names of their files: of cells that this process has compiled, of functions that it was
sent, and, in the notebook, of cells whose frames a worker has told. If the same text has run twice, the last number
counts. `nbdist.cluster.jupyter.labels` fills the table.
"""


def is_nbdists(file: str, *packages: str) -> bool:
    """Return whether a file is nbdist's; with ``packages`` such as "rpc", whether it is in one of these."""
    return file not in _STANDS_FOR and _is_in(NBDIST, packages, file)


def is_torchs(file: str, *packages: str) -> bool:
    """Return whether a file is torch's; with ``packages`` such as "futures", whether it is in one of these."""
    return _is_in(TORCH, packages, _STANDS_FOR.get(file, file))


def is_pythons(file: str) -> bool:
    """Return whether a file belongs to Python, or is a module that is frozen into the interpreter."""
    return file.startswith((_PYTHON, "<frozen ")) and not _is_in_packages(file)


def is_users(file: str) -> bool:
    """Return whether a file holds the user's code: see the table above."""
    # Compiled code, such as Cython's, names its files by relative paths.
    if _is_in_packages(file) or not os.path.isabs(file) or file.startswith((NBDIST, TORCH, _PYTHON, *_PACKAGES)):
        return False
    # ``pip install --target`` puts packages into a folder of `sys.path` that may hold the user's code, too.
    for folder in sys.path:
        if folder and file.startswith(f"{folder}/"):  # the entry "" would fit each absolute path
            first = file[len(folder) + 1 :].partition("/")[0]
            if first.removesuffix(".py") in _installed_into(folder):
                return False
    return True


def is_of_cell(file: str) -> bool:
    """Return whether ``file`` is a name under which ipykernel has compiled a cell of the notebook."""
    return _CELL.search(file) is not None


def shown_name(file: str) -> str:
    """Return the name by which a reader knows a file: ``In[3]`` or ``cell`` for a cell, else without its folder."""
    number = CELLS.get(file)
    return f"In[{number}]" if number else "cell" if is_of_cell(file) else file.rpartition("/")[2]


def _is_in(folder: str, packages: tuple[str, ...], file: str) -> bool:
    return file.startswith(tuple(f"{folder}{package}/" for package in packages) if packages else folder)


def _is_in_packages(file: str) -> bool:
    # Not `_PACKAGES`: the file may belong to another Python.
    return "/site-packages/" in file or "/dist-packages/" in file


# Once a folder: `is_users` is asked of each frame of a stack, and this reads the folder.
@lru_cache(maxsize=256)
def _installed_into(folder: str) -> frozenset[str]:
    return frozenset(
        path.parts[0].removesuffix(".py")
        for each in distributions(path=[folder])
        for path in each.files or ()
        if path.parts
    )
