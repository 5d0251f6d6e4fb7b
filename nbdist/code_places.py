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

NBDIST = f"{Path(__file__).parent}/"
"""The folder of nbdist's code, with a slash at its end."""
TORCH = f"{Path(torch.__file__).parent}/"
"""The folder of torch's code, with a slash at its end."""
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
"""The folder of Python's library. Packages may be installed inside of it, too."""
# torch.autograd calls nbdist's engine in place of its own. So each backward pass has a frame of this file, below which
# torch waits in C++ for other workers: it counts as a frame of the file of torch that has called it.
_STANDS_FOR = {f"{NBDIST}autograd/passes/engine.py": f"{TORCH}autograd/graph.py"}
_PACKAGES = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("purelib", "platlib"))
"""The folders into which this Python installs packages."""
_CELL = re.compile(r"/ipykernel_\d+/\d+\.py$")
"""The name under which ipykernel compiles a cell: a digest of the code, in a directory of the process."""
CELLS: dict[str, int] = {}
"""The numbers of cells, by the names of their files: of cells that this process has compiled, and of functions that it
was sent. If the same text has run twice, the last number counts. `nbdist.cluster.jupyter.labels` fills the table.
"""


def is_nbdists(file: str, *packages: str) -> bool:
    """Return whether a file is nbdist's own; with ``packages`` such as "rpc", whether it is in one of these."""
    return file not in _STANDS_FOR and _is_in(NBDIST, packages, file)


def is_torchs(file: str, *packages: str) -> bool:
    """Return whether a file is torch's; with ``packages`` such as "futures", whether it is in one of these."""
    return _is_in(TORCH, packages, _STANDS_FOR.get(file, file))


def is_pythons(file: str) -> bool:
    """Return whether a file belongs to Python itself. Modules that are frozen into the interpreter count, too."""
    return file.startswith((_PYTHON, "<frozen ")) and not _is_in_packages(file)


def is_users(file: str) -> bool:
    """Return whether a file holds the user's code, not Python's, an installed package's, torch's or nbdist's.

    A package may be installed into any folder of `sys.path` (``pip install --target``), beside code of the user's.
    Compiled code, such as Cython's, names its files by relative paths, which count as not the user's.
    """
    if _is_in_packages(file) or not os.path.isabs(file) or file.startswith((NBDIST, TORCH, _PYTHON, *_PACKAGES)):
        return False
    for folder in sys.path:
        if folder and file.startswith(f"{folder}/"):
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
    return f"In[{number}]" if number else "cell" if is_of_cell(file) else Path(file).name


def _is_in(folder: str, packages: tuple[str, ...], file: str) -> bool:
    """Return whether a file is in this folder; with ``packages``, whether it is in one of these subfolders."""
    return file.startswith(tuple(f"{folder}{package}/" for package in packages) if packages else folder)


def _is_in_packages(file: str) -> bool:
    """Return whether a file lies in ``site-packages`` or ``dist-packages`` of some Python, which may be another one."""
    return "/site-packages/" in file or "/dist-packages/" in file


@lru_cache(maxsize=256)
def _installed_into(folder: str) -> frozenset[str]:
    """Return the names of the packages and modules that pip has installed into a folder. It is read once."""
    return frozenset(
        path.parts[0].removesuffix(".py")
        for each in distributions(path=[folder])
        for path in each.files or ()
        if path.parts
    )
