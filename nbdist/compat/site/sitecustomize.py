"""Replaces torch's RPC by nbdist in this process, as soon as it imports torch.

Python imports a module of this name when it starts. ``python -m nbdist run`` puts this folder on PYTHONPATH, so that
the program's process and all Python processes that it starts import this module. Importing it must be quick, because
most processes never import torch; so nbdist is imported only after torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(MetaPathFinder):
    """Finds torch as the usual finders do, and calls `_install` once torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return torch's spec, with a loader that calls `_install` afterwards; None for any other module."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)  # the search asks all finders
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # until torch is imported: a program may only look whether there is a torch
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            sys.meta_path.remove(self)
            execute(module)
            _install()

        loader.exec_module = exec_module
        return spec


def _install() -> None:
    """Call `nbdist.compat.install`. If nbdist cannot be imported, say so on standard error and do nothing."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
    installed = os.path.basename(root) in ("site-packages", "dist-packages")
    checkout = not installed and importlib.util.find_spec("nbdist") is None
    if checkout:  # a child's Python may lack nbdist; site-packages would bring in all of their packages
        sys.path.append(root)
    try:
        from nbdist import compat
    except ImportError as error:
        print(
            f"python -m nbdist run: {sys.executable} cannot import nbdist ({error}), so this process uses "
            "torch's own torch.distributed.rpc",
            file=sys.stderr,
        )
    else:
        compat.install()
    finally:
        if checkout:
            sys.path.remove(root)


def _run_the_other() -> None:
    """Import the ``sitecustomize`` of this system or environment, which this module hides, if there is one."""
    others = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTorch())
_run_the_other()
