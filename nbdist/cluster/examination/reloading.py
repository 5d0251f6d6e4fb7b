"""Lets this process run the new code of modules that were edited, as IPython's autoreload does.

IPython runs the module again in its old namespace, gives old functions the new code, and old classes the new methods;
objects of an old class become objects of the new one. So functions that other modules have imported run the new code,
and so do calls, which name functions by module and name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Collection
from types import ModuleType
from typing import Any

from nbdist.amounts import counted, plural
from nbdist.cluster.examination.imported_files import changed_modules, noted
from nbdist.code_places import is_users

_old_objects: dict[Any, Any] = {}  # IPython's weak references to functions and classes, by module and name
_failed: dict[str, float] = {}  # the times of files that `reload_changed` could not run, by module
_reloading = threading.Lock()


def reload_module(name: str) -> tuple[bool, str] | None:
    """Run a module again, with the code that its file has now, even if the file is as before.

    Returns None if this process has no such module, else whether it has the new code, and a text for after that: which
    objects keep an old class, or the traceback of the error that the new code has raised, in the user's files.
    """
    if (module := sys.modules.get(name)) is None:
        return None
    with _reloading:
        before = {each: file for each, file in noted.items() if each == name}
        if error := _run_again(module):
            noted.update(before)  # else the old code would pass for the new
            return False, f"\n{error}"
        return True, _say_old_objects(module)


def reload_changed(only: Collection[str] | None = None, but: Collection[str] = ()) -> None:
    """Run the modules again whose files have changed; print a line about each that fails, once for each edit.

    ``only`` and ``but`` name the modules to reload and to leave out.
    """
    for name in changed_modules():
        if name not in but and (only is None or name in only):
            edited = os.path.getmtime(noted[name][0])
            done = reload_module(name) if _failed.get(name) != edited else None
            if done is not None and not done[0]:
                _failed[name] = edited
                error = done[1].rpartition("\n")[2]
                print(f"%autoreload: {name} keeps its old code, as the new code raises {error}", file=sys.stderr)


def _run_again(module: ModuleType) -> str:
    """Run a module again; return the text of its error, or nothing."""
    # Here, because no process needs this before a file has changed.
    from IPython.extensions.autoreload import superreload, update_generic

    has_run, old = False, dict(vars(module))

    def run(module: ModuleType) -> ModuleType:
        nonlocal has_run
        vars(module).update({**old, **vars(module)})  # IPython has emptied it, and calls may run its functions now
        module, has_run = importlib.reload(module), True
        return module

    try:
        superreload(module, run, _old_objects)
    except BaseException as error:
        if not has_run:
            vars(module).update(old)  # IPython has emptied the module, and leaves it so after Ctrl-C
            if isinstance(error, KeyboardInterrupt):
                raise
            frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
            return "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
        # An object cannot take the new class, as with other `__slots__`, which ends IPython's update at once.
        for name, old_object in _olds_of(module):
            with contextlib.suppress(Exception):
                update_generic(old_object, vars(module)[name])
    return ""


def _olds_of(module: ModuleType) -> list[tuple[str, Any]]:
    """Return the functions and classes that a module had before its last runs, each with its name."""
    olds = [(name, each()) for (owner, name), olds in _old_objects.items() if owner == module.__name__ for each in olds]
    return [(name, each) for name, each in olds if each is not None]


def _say_old_objects(module: ModuleType) -> str:
    """Return how many objects have a class that the module had before and has no more, in words."""
    olds = [(each, name) for name, each in _olds_of(module) if isinstance(each, type)]
    names = {each: f"{module.__name__}.{name}" for each, name in olds if each is not vars(module).get(name)}
    # One pass over all objects that the garbage collector knows.
    kept = Counter(names[type(each)] for each in gc.get_referrers(*names) if type(each) in names)
    told = ((counted(n, "instance"), name, plural(n, "keeps", "keep")) for name, n in kept.items())
    return "".join(f"; {count} of {name} {keep} the old class" for count, name, keep in told)
