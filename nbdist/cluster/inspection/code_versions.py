"""Lets workers follow the notebook's own `%autoreload`, and tells whose code is another version than its callers'.

Neither is on the way of a call: `follow` runs before each cell of the notebook, and `differing` after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nbdist.amounts import duration
from nbdist.autograd.api import recorder
from nbdist.cluster.examination.imported_files import changed_modules, code_in_use, noted, take_as_run
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.output.arranger import say_names
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method

_WORKERS_RELOAD_WITHIN = 10.0  # seconds; what a module runs on its import may take long
_VERSIONS_ARRIVE_WITHIN = 0.3  # seconds: else the next cell that makes calls asks again


def send_code(launcher: Any) -> None:
    """Send the notebook's files to workers of other hosts, if their launcher was told to: with ``--sync-code``."""
    if (send := getattr(launcher, "send_code", None)) is not None:
        send()


def follow(agent: Agent, workers: Sequence[Worker], launcher: Any, reloader: Any) -> None:
    """Let workers reload what has changed, as IPython's ``reloader`` does here; busy ones before their next cell."""
    send_code(launcher)
    only = None if reloader.check_all else sorted(reloader.modules)
    arguments = "follow", only, sorted(reloader.skip_modules)
    ready = [worker for worker in workers if worker.alive and worker.step == "ready"]
    # What they run for the notebook may hold the GIL.
    busy = {each.name for each in ready if each.cells or agent.pending.to(each.incarnation or 0)}
    with recorder().contexts.outside():
        for name in busy:
            agent.at(name, "code").cast(*arguments)
        asked = {worker.name: ("code", *arguments) for worker in ready if worker.name not in busy}
        ask_each(agent, call_method, asked, timeout=_WORKERS_RELOAD_WITHIN, label="code.follow")
    # IPython may have patched functions, without an import.
    for name in changed_modules():
        if reloader.modules_mtimes.get(name) == os.path.getmtime(noted[name][0]):
            take_as_run(name)


class Versions:
    """Compares the versions of the modules of which calls of the notebook or of a worker have named functions."""

    def __init__(self) -> None:
        self._known: object = None  # how many messages this agent had sent, and what workers ran, at a comparison
        self._told: set[tuple[str, frozenset[str]]] = set()

    def differing(self, agent: Agent, workers: Sequence[Worker]) -> Iterator[str]:
        """Yield a line for each such module that is another version on workers, once for each two versions.

        Asks idle workers, if this process has made calls since it last asked, or if a worker's last cell has imported a
        module or named one in a call for the first time.
        """
        told = [worker.code for worker in workers]
        if (agent.links.traffic()[0], told) == self._known:
            return
        idle = [worker.name for worker in workers if worker.alive and not worker.cells]
        with recorder().contexts.outside():
            answers = ask_each(agent, code_in_use, dict.fromkeys(idle, ()), timeout=_VERSIONS_ARRIVE_WITHIN).values
        self._known = agent.links.traffic()[0], told
        callers = {"here": code_in_use()} | {f"on {worker}": answer for worker, answer in answers.items()}
        for caller, (own, named) in callers.items():
            for name in named:
                found = {worker: modules.get(name, own[name]) for worker, (modules, _) in answers.items()}
                pairs = {worker: (name, frozenset((own[name], digest))) for worker, digest in found.items()}
                apart = [each for each in found if found[each] != own[name] and pairs[each] not in self._told]
                self._told.update(pairs.values())
                if apart:
                    since = _say_age(noted[name][0]) if name in noted else ""
                    yield f"{name} is another version on {say_names(apart)} than {caller}{since}: %dist_reload {name}"


def _say_age(path: str) -> str:
    ago = duration(max(0.0, time.time() - os.path.getmtime(path))) if os.path.exists(path) else "long"
    return f" ({os.path.basename(path)} changed {ago} ago)"
