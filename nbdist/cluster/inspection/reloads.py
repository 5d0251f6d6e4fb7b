"""Runs an edited module again on workers, and in the notebook: `%dist_reload`."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.examination.reloading import reload_module
from nbdist.cluster.inspection.code_versions import send_code
from nbdist.cluster.output.arranger import grouped, say_members
from nbdist.errors import UsageError


def reload_on(cluster: Cluster, module: str, workers: Sequence[str], *, here: bool) -> str:
    """Run a module again on these workers, after the cells that they were sent before, and in the notebook if ``here``.

    Returns a text that says where the module has run, and which objects keep an old class.

    Raises:
        UsageError: The new code has raised an error somewhere, or nobody has imported the module.
    """
    send_code(cluster.lifecycle.launcher)
    code = f"__import__({reload_module.__module__!r}, fromlist=['_']).reload_module({module!r})"
    done = {cluster.agent.me.name: reload_module(module)} if here else {}
    done |= zip(workers, cluster.evaluate(code, list(workers)), strict=True)
    imported = {name: outcome for name, outcome in done.items() if outcome is not None}
    if not imported:
        asked = say_members(list(done))
        raise UsageError(
            f"none of {asked} has imported {module}: `import {module}` on a worker takes the file as it is"
        )
    outcomes = grouped(imported, imported.__getitem__)
    texts = {True: "{} reloaded on {}{}", False: "{} keeps its old code on {}, as the new code raises{}"}
    told = [texts[is_new].format(module, say_members(names), text) for (is_new, text), names in outcomes.items()]
    if not all(is_new for is_new, _ in outcomes):
        raise UsageError("\n".join(told))
    return "\n".join(told)
