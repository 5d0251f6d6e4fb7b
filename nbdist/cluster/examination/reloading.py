"""Lets this process run the new code of modules that were edited, as IPython's autoreload does.

IPython runs the module again in its old namespace, gives old functions the new code, and old classes the new methods;
objects of an old class become objects of the new one. So functions that other modules have imported run the new code,
and so do calls, which name functions by module and name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from nbdist.cluster.examination.imported_files import changed_modules, noted, time_of
from nbdist.code_places import is_users

_old_objects: dict[Any, Any] = {}  # IPython's weak references to functions and classes, by module and name
_failed: dict[str, int] = {}  # the times of files that `reload_changed` could not run, by module
_reloading = threading.Lock()


class Reload(NamedTuple):
    """The result of running a module again in one process."""

    is_imported: bool = True
    """False if the process has no such module, and so nothing to run again."""
    error: str = ""
    """The traceback of the error that the new code has raised, in the user's files; then the old code stays."""
    old_objects: dict[str, int] = {}  # noqa: RUF012 - a field
    """The number of objects that keep an old class, by the name of the class."""


def reload_module(name: str) -> Reload:
    """Run a module again, with the code that its file has now, even if the file is as before."""
    if (module := sys.modules.get(name)) is None:
        return Reload(is_imported=False)
    with _reloading:
        before = noted.get(name)
        if error := _run_again(module):
            if before is not None:
                noted[name] = before  # else the old code would pass for the new
            return Reload(error=error)
        _failed.pop(name, None)
        return Reload(old_objects=_objects_of_old_classes(module))


def reload_changed(only: Collection[str] | None = None, but: Collection[str] = ()) -> dict[str, str]:
    """Run the modules again whose files have changed; return the errors of those that failed, by module.

    ``only`` and ``but`` name the modules to reload and to leave out. One that fails is left until its file changes.
    """
    errors = {}
    for name in changed_modules():
        modified = time_of(noted[name].path)
        is_wanted = name not in but and (only is None or name in only) and _failed.get(name) != modified
        if is_wanted and (error := reload_module(name).error):
            errors[name], _failed[name] = error, modified
    return errors


def say_failed(name: str, error: str, where: str = "") -> str:
    """Return the text about a module whose new code has raised an error, in the words ``where``."""
    return f"{name} keeps its old code{where}, as the new code raises\n{error}"


def _run_again(module: ModuleType) -> str:
    """Run a module again; return the text of its error, or nothing."""
    # Here, because no process needs this before a file has changed.
    from IPython.extensions.autoreload import superreload, update_generic

    has_run = False

    def run(module: ModuleType) -> ModuleType:
        nonlocal has_run
        module = importlib.reload(module)
        has_run = True
        return module

    old = dict(vars(module))
    try:
        superreload(module, run, _old_objects)
    except Exception as error:
        if not has_run:
            frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
            return "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
        # Objects that cannot take the new class, as with other `__slots__`, end IPython's update at once.
        for name, olds in _olds_of(module):
            for each in olds:
                with contextlib.suppress(Exception):
                    update_generic(each, vars(module)[name])
    except BaseException:  # Ctrl-C: IPython has emptied the module
        if not has_run:
            vars(module).update(old)
        raise
    return ""


def _olds_of(module: ModuleType) -> Iterator[tuple[str, list[Any]]]:
    """Yield the names of functions and classes of a module, with the objects that had the name before."""
    for (owner, name), references in list(_old_objects.items()):
        if owner == module.__name__:
            yield name, [each for each in (reference() for reference in references) if each is not None]


def _objects_of_old_classes(module: ModuleType) -> dict[str, int]:
    """Return how many objects have a class that the module had before and has no more, by the name of the class."""
    olds = ((each, name) for name, olds in _olds_of(module) for each in olds if isinstance(each, type))
    classes = {each: f"{module.__name__}.{name}" for each, name in olds if each is not vars(module).get(name)}
    # One pass over all objects that the garbage collector knows: only here, where somebody has asked for the reload.
    return dict(Counter(classes[type(each)] for each in gc.get_referrers(*classes) if type(each) in classes))
