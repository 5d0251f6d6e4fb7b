"""Lets members of a cluster run the code that was edited, and tells whose code is another version than the notebook's.

::

    `reload_on`         `%dist_reload`: a module runs again
    `follow`            the notebook's own `%autoreload`: before each cell, all idle workers reload what has changed
    `Versions.differ`   after each cell: a module is another version on a worker, and a call has named a function of it
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from nbdist.amounts import counted, duration
from nbdist.autograd.api import recorder
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.examination.imported_files import changed_modules, noted, take_as_run, time_of, versions
from nbdist.cluster.examination.reloading import Reload, reload_module, say_failed
from nbdist.cluster.output.arranger import grouped, say_members, say_names
from nbdist.errors import UsageError
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method
from nbdist.wire.pickling.names import named_modules

_WORKERS_RELOAD_WITHIN = 10.0  # seconds; what a module runs on its import may take long
_VERSIONS_ARRIVE_WITHIN = 0.3  # seconds: the next cell asks again


def reload_on(cluster: Cluster, module: str, workers: Sequence[str], *, here: bool) -> str:
    """Run a module again on these workers, after the cells that they were sent before, and in the notebook if ``here``.

    Returns a text that says where the module has run, and which objects keep an old class.

    Raises:
        UsageError: The new code has raised an error somewhere, or nobody has imported the module.
    """
    _send_code(cluster)
    code = f"__import__({reload_module.__module__!r}, fromlist=['_']).reload_module({module!r})"
    found: dict[str, Reload] = {cluster.agent.me.name: reload_module(module)} if here else {}
    found |= zip(workers, cluster.evaluate(code, list(workers)), strict=True)
    imported = [name for name, reload in found.items() if reload.is_imported]
    if not imported:
        asked = say_members(list(found))
        raise UsageError(
            f"none of {asked} has imported {module}: `import {module}` on a worker takes the file as it is"
        )
    lines = []
    if well := [name for name in imported if not found[name].error]:
        lines.append(f"{module} reloaded on {say_members(well)}")
    kept = [(name, *each) for name in well for each in found[name].old_objects.items()]
    for (name, count), each in grouped(kept, lambda kept: kept[1:]).items():
        where = say_members([member for member, *_ in each])
        lines.append(
            f"{counted(count, 'instance')} of {name} {'keep' if count > 1 else 'keeps'} the old class on {where}"
        )
    errors = _say_failed(module, {name: found[name].error for name in imported if found[name].error})
    if errors:
        raise UsageError("\n".join([*errors, *lines]))
    return "\n".join(lines)


def follow(cluster: Cluster, reloader: Any) -> list[str]:
    """Let all workers reload what has changed, as IPython's autoreloader does here; busy ones before a cell.

    Returns a text for each module that has failed.
    """
    _send_code(cluster)
    only = None if reloader.check_all else sorted(reloader.modules)
    ready = [worker.name for worker in cluster.workers if worker.alive and worker.step == "ready"]
    asked = dict.fromkeys(ready, ("code", "follow", only, sorted(reloader.skip_modules)))
    with recorder().contexts.outside():
        answers = ask_each(
            cluster.agent, call_method, asked, timeout=_WORKERS_RELOAD_WITHIN, label="code.follow"
        ).values
    names = sorted({name for errors in answers.values() for name in errors})
    failed = {name: {worker: errors[name] for worker, errors in answers.items() if name in errors} for name in names}
    return [text for name in names for text in _say_failed(name, failed[name])]


def _say_failed(module: str, errors: dict[str, str]) -> list[str]:
    members = grouped(errors, errors.__getitem__)
    return [say_failed(module, error, f" on {say_members(names)}") for error, names in members.items()]


def _send_code(cluster: Cluster) -> None:
    if cluster.spec.sync_code:
        launcher: Any = cluster.lifecycle.launcher  # a `RemoteLauncher`: no other takes the option
        launcher.send_code()


class Versions:
    """The versions of modules that have been compared with the workers'."""

    def __init__(self) -> None:
        self._compared: dict[tuple[str, int | None], tuple[str, int]] = {}  # the version here, by module and worker
        self._told: set[tuple[object, ...]] = set()
        self._reloaded: dict[str, float] = {}  # the times of files that IPython's autoreloader had seen before
        self._failed: Collection[str] = ()  # the files whose new code has failed here: which version runs is unknown
        self._sent = 0  # how many messages this agent had sent, as after a comparison

    def note_autoreloaded(self, reloader: Any) -> None:
        """Note which modules of this process run new code: IPython often patches functions, and imports nothing."""
        times = {name: reloader.modules_mtimes.get(name) for name in noted}
        for name in changed_modules():
            path, seen = noted[name].path, times[name]
            # IPython does not reload what has changed before it first saw it.
            if seen == os.stat(path).st_mtime != self._reloaded.get(name, seen) and path not in reloader.failed:
                take_as_run(name)
        self._reloaded = {name: time for name, time in times.items() if time is not None}
        self._failed = reloader.failed

    def differ(self, cluster: Cluster) -> Iterator[str]:
        """Yield a line for each module of which calls name functions and which is another version on workers.

        Asks idle workers only: after calls, once a module was first named or its file has changed, until all that have
        imported the module run what the file has.
        """
        agent = cluster.agent
        modules = {name: noted[name] for name in named_modules() & noted.keys()}
        modules = {name: file for name, file in modules.items() if file.path not in self._failed}
        if not modules or agent.links.traffic()[0] == self._sent:
            return
        ages = versions(list(modules))
        here = {name: (file.digest, time_of(file.path)) for name, file in modules.items()}
        life = {each.name: each.incarnation for each in cluster.workers if each.alive and not each.cells}
        open = {each: [name for name in here if self._compared.get((name, life[each])) != here[name]] for each in life}
        with recorder().contexts.outside():
            asked = {worker: (names,) for worker, names in open.items() if names}
            answers = ask_each(agent, versions, asked, timeout=_VERSIONS_ARRIVE_WITHIN).values
        self._sent = agent.links.traffic()[0]
        apart: dict[str, dict[str, float | None]] = {}  # how long each worker's version is old, by module
        for worker, found in answers.items():
            for name, (digest, age) in found.items():
                if age is None and ages[name][1] is None:
                    self._compared[name, life[worker]] = here[name]
                key = name, life[worker], digest, modules[name].digest
                if digest != modules[name].digest and key not in self._told:
                    self._told.add(key)
                    apart.setdefault(name, {})[worker] = age
        for name, old in apart.items():
            why = _why({"the notebook": ages[name][1], **old})
            yield f"{name} is another version on {say_names(list(old))} than here{why} %dist_reload {name}"


def _why(ages: dict[str, float | None]) -> str:
    """Return whose version is older than its file, in words that end before what to do."""
    old = {member: age for member, age in ages.items() if age is not None}
    if not old:
        return ", from another file: %dist_diff --code shows which. With the same file everywhere, use"
    return f" ({say_members(list(old))} imported it before its file changed, {duration(max(old.values()))} ago):"
