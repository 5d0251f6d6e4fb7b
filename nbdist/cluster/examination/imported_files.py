"""Notes the content of the user's files when modules are imported from them, so that a later change can be told.

To import this module starts it, in the zygote of workers, too. So do not import it where no notes are wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from nbdist.code_places import is_users

_noted: dict[str, tuple[str, str]] = {}  # the path and the digest of a module's file, by the module's name


def _find(name: str, path: Any = None, target: Any = None) -> Any:
    spec = PathFinder.find_spec(name, path, target)
    # Someone may look for a module that is imported already; only `importlib.reload` gives a target.
    if target is not None or name not in sys.modules:
        _note(name, spec)
    return spec


def _note(name: str, spec: Any) -> None:
    with contextlib.suppress(Exception):  # no spec, or what `is_users` meets in folders of packages: no import may fail
        if spec.name == name and spec.origin.endswith(".py") and is_users(spec.origin):
            _noted[name] = spec.origin, _digest(spec.origin)


def read_files() -> dict[str, tuple[str, str, bool]]:
    """Return the path and a SHA-256 of the file of each of the user's modules, and whether it has changed since.

    A module that was imported before this one, or by a finder of an editable install, is noted by the first call.
    """
    for name, module in list(sys.modules.items()):
        if name not in _noted:
            # Past `__getattr__`, which may import, or raise.
            _note(name, vars(module).get("__spec__") if issubclass(type(module), ModuleType) else None)
    noted = {name: _noted[name] for name in sorted(_noted) if name in sys.modules}
    return {name: (path, digest, _digest(path) not in (digest, "")) for name, (path, digest) in noted.items()}


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # gone, or not readable any more
        return ""


read_files()
# Just before Python's own finder, for which it stands in: finders that the user has put before that still come first.
if PathFinder in sys.meta_path:
    sys.meta_path.insert(sys.meta_path.index(PathFinder), SimpleNamespace(find_spec=_find))
