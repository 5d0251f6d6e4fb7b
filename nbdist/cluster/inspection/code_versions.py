"""Lets workers follow the notebook's own `%autoreload`, and tells whose code is another version than the notebook's.

Neither is on the way of a call: `follow` runs before each cell of the notebook, and `differing` after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nbdist.amounts import duration
from nbdist.autograd.api import recorder
from nbdist.cluster.examination.imported_files import changed_modules, noted, take_as_run, versions
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.output.arranger import say_names
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method
from nbdist.wire.pickling.names import named_modules

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
    """Compares the versions of the modules of which calls have named functions."""

    def __init__(self) -> None:
        self._sent = 0  # how many messages this agent had sent, as after a comparison
        self._told: set[tuple[str, str, str, str]] = set()

    def differing(self, agent: Agent, workers: Sequence[Worker]) -> Iterator[str]:
        """Yield a line for each such module that is another version on workers, once for each two versions.

        Asks idle workers, if this process has made calls since it last asked.
        """
        here = versions(named_modules())
        if not here or agent.links.traffic()[0] == self._sent:
            return
        idle = [worker.name for worker in workers if worker.alive and not worker.cells]
        with recorder().contexts.outside():
            asked = dict.fromkeys(idle, (list(here),))
            answers = ask_each(agent, versions, asked, timeout=_VERSIONS_ARRIVE_WITHIN).values
        self._sent = agent.links.traffic()[0]
        for name, own in here.items():
            keys = {worker: (name, worker, own, found.get(name, own)) for worker, found in answers.items()}
            apart = [worker for worker, key in keys.items() if key[3] != own and key not in self._told]
            self._told.update(keys.values())
            if apart:
                path = noted[name][0]
                ago = duration(max(0.0, time.time() - os.path.getmtime(path))) if os.path.exists(path) else "long"
                told = f"{os.path.basename(path)} changed {ago} ago"
                yield f"{name} is another version on {say_names(apart)} than here ({told}): %dist_reload {name}"
