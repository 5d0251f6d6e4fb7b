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
from nbdist.wire.pickling.names import named_modules

noted: dict[str, tuple[str, str]] = {}
"""The path and the digest of the file of each of the user's modules, by the module's name, as of its last import."""


def _find(name: str, path: Any = None, target: Any = None) -> Any:
    spec = PathFinder.find_spec(name, path, target)
    # Someone may look for a module that is imported already; only `importlib.reload` gives a target.
    if target is not None or name not in sys.modules:
        _note(name, spec)
    return spec


def _note(name: str, spec: Any) -> None:
    with contextlib.suppress(Exception):  # no spec, or what `is_users` meets in folders of packages: no import may fail
        if spec.name == name and spec.origin.endswith(".py") and is_users(spec.origin):
            noted[name] = spec.origin, _digest(spec.origin)


def read_files() -> dict[str, tuple[str, str, bool]]:
    """Return the path and a SHA-256 of the file of each of the user's modules, and whether it has changed since.

    A module that was imported before this one, or by a finder of an editable install, is noted by the first call.
    """
    for name, module in list(sys.modules.items()):
        if name not in noted:
            # Past `__getattr__`, which may import, or raise.
            _note(name, vars(module).get("__spec__") if issubclass(type(module), ModuleType) else None)
    found = {name: noted[name] for name in sorted(noted) if name in sys.modules}
    return {name: (path, digest, _digest(path) not in (digest, "")) for name, (path, digest) in found.items()}


def changed_modules() -> list[str]:
    """Return the noted modules whose files have changed since. Touches no other module, whose memory workers share."""
    files = [(name, *file) for name, file in list(noted.items()) if name in sys.modules]
    return [name for name, path, digest in files if _digest(path) not in (digest, "")]


def take_as_run(name: str) -> None:
    """Note that a module runs the code that its file has now, without an import."""
    path, _ = noted[name]
    noted[name] = path, _digest(path)


def code_in_use() -> tuple[dict[str, str], list[str]]:
    """Return the digest of each of the user's modules, and those whose functions calls of this process have named."""
    digests = {name: digest for name, (_, digest) in list(noted.items()) if name in sys.modules}
    return digests, sorted(named_modules() & digests.keys())


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # gone, or not readable any more
        return ""


read_files()
# Just before Python's own finder, for which it stands in: finders that the user has put before that still come first.
if PathFinder in sys.meta_path:
    sys.meta_path.insert(sys.meta_path.index(PathFinder), SimpleNamespace(find_spec=_find))
