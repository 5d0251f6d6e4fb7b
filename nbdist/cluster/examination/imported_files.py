"""Notes the content of the user's files when modules are imported from them, so that a later change can be told.

To import this module starts it, in the zygote of workers, too. So do not import it where no notes are wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from nbdist.code_places import is_users


class ImportedFile(NamedTuple):
    """The file of a module as it was when the module took its code from it."""

    path: str
    digest: str  # SHA-256
    modified: int  # its time of modification in nanoseconds; 0 if unknown


noted: dict[str, ImportedFile] = {}
"""The files of the user's modules, by the names of the modules. Some may not be imported any more."""


def _find(name: str, path: Any = None, target: Any = None) -> Any:
    spec = PathFinder.find_spec(name, path, target)
    # Someone may look for a module that is imported already; only `importlib.reload` gives a target.
    if target is not None or name not in sys.modules:
        _note(name, spec)
    return spec


def _note(name: str, spec: Any) -> None:
    with contextlib.suppress(Exception):  # no spec, or what `is_users` meets in folders of packages: no import may fail
        if spec.name == name and spec.origin.endswith(".py") and is_users(spec.origin):
            noted[name] = ImportedFile(spec.origin, _digest(spec.origin), time_of(spec.origin))


def read_files() -> dict[str, tuple[str, str, bool]]:
    """Return the path and a SHA-256 of the file of each of the user's modules, and whether it has changed since.

    A module that was imported before this one, or by a finder of an editable install, is noted by the first call.
    """
    for name, module in list(sys.modules.items()):
        if name not in noted:
            # Past `__getattr__`, which may import, or raise.
            _note(name, vars(module).get("__spec__") if issubclass(type(module), ModuleType) else None)
    files = {name: noted[name] for name in sorted(noted) if name in sys.modules}
    return {name: (path, digest, _digest(path) not in (digest, "")) for name, (path, digest, _) in files.items()}


def changed_modules() -> list[str]:
    """Return the user's modules whose files have changed since their import. Reads only files with another time."""
    files = [(name, file) for name, file in list(noted.items()) if name in sys.modules]
    later = [(name, file) for name, file in files if time_of(file.path) not in (file.modified, 0)]
    return [name for name, file in later if _digest(file.path) not in (file.digest, "")]


def versions(names: Sequence[str]) -> dict[str, tuple[str, float | None]]:
    """Return the digest of each of these modules that is imported, and how long ago, in seconds, its file changed.

    That is None if the module runs what its file has now.
    """
    changed = changed_modules()
    return {
        name: (noted[name].digest, time.time() - time_of(noted[name].path) / 1e9 if name in changed else None)
        for name in names
        if name in noted and name in sys.modules
    }


def take_as_run(name: str) -> None:
    """Note that a module runs the code that its file has now, as after a change of its functions in place."""
    _note(name, vars(sys.modules[name]).get("__spec__"))


def time_of(path: str) -> int:
    """Return a file's time of modification in nanoseconds; 0 if there is no file."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # gone, or not readable any more
        return ""


read_files()
# Just before Python's own finder, for which it stands in: finders that the user has put before that still come first.
if PathFinder in sys.meta_path:
    sys.meta_path.insert(sys.meta_path.index(PathFinder), SimpleNamespace(find_spec=_find))
