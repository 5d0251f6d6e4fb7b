"""Lets code that was written for ``torchrun`` run in the cells of a worker: its ``init_process_group`` works there.

==========================================  ===================================================================
``init_process_group`` in a cluster         what it does
==========================================  ===================================================================
with a group, which is there                returns, and prints a line that says so
with a group, after                         forms it again, with the other workers, which must call it, too
``destroy_process_group``
with a group, for other workers             raises UsageError
``--backend none``, for all workers         forms the group, by nbdist's store: torch's own may hang where the same
                                            processes form a group twice at one address
``--backend none``, with a store, or for    is torch's own
other workers
==========================================  ===================================================================

A cell that leaves its worker without a group lets the notebook form it again, once all workers are idle.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import Backend, BackendConfig, destroy_process_group, init_process_group

from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.cluster.worker.collectives import Collectives, destroy
from nbdist.errors import UsageError
from nbdist.torch_private import set_group_timeout

# The modules that have these functions. A search through all modules would copy memory that workers share: 9 MB.
HOMES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")

dist: Any = torch.distributed  # Any: torch does not declare what this module exports


def install(shell: Any, setup: Callable[[], WorkerSetup], collectives: Collectives) -> None:
    """Replace torch's functions in this process, and follow the cells of its shell. Call once.

    ``setup`` returns the present setup of this worker, ``collectives`` form its process group.
    """
    signature = inspect.signature(init_process_group)

    @functools.wraps(init_process_group)
    def form(*args: Any, **kwargs: Any) -> None:
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        if not _form(asked.arguments, setup(), collectives):
            init_process_group(*args, **kwargs)

    _replace(init_process_group, form)
    _replace(destroy_process_group, functools.wraps(destroy_process_group)(destroy))
    shell.events.register("pre_run_cell", lambda _: collectives.leave_broken())
    shell.events.register("post_run_cell", lambda _: collectives.ask_for_group())


def _replace(function: Callable[..., Any], ours: Callable[..., Any]) -> None:
    for name in HOMES:
        if (module := sys.modules.get(name)) is not None and hasattr(module, function.__name__):
            setattr(module, function.__name__, ours)


def _form(asked: Mapping[str, Any], told: WorkerSetup, collectives: Collectives) -> bool:
    """Form the group that ``init_process_group`` asks for; return False if torch's own function must do that."""
    has_group = told.backend != "none"
    rank, size = (
        int(os.environ.get(name.upper(), getattr(told, name))) if asked[name] == -1 else asked[name]
        for name in ("rank", "world_size")
    )
    is_same = (rank, size) == (told.rank, told.world_size)
    backend = asked["backend"]
    if has_group:
        own = collectives.backend()
        if not (is_same and (backend is None or _is_same_backend(backend, own, told.device))):
            raise UsageError(
                f"init_process_group asks for {backend or own}, rank {rank} of {size}, but this cluster's process "
                f"group is {own}, and this worker is rank {told.rank} of {told.world_size}: ask for these, or start "
                "the workers with `%dist_init --backend none`, which leaves process groups to your code"
            )
        if dist.is_initialized():
            if asked["timeout"] is not None:
                set_group_timeout(asked["timeout"])
            print(f"init_process_group: the process group is there already: {own}, {told.world_size} workers")
            return True
    # torch's own function raises the error of a group that is there, and forms the others.
    elif dist.is_initialized() or asked["store"] or not is_same or str(asked["init_method"]).startswith("file:"):
        return False
    # What is left of torch's arguments: nbdist gives store, rank and size.
    options = {name: asked[name] for name in ("timeout", "pg_options", "device_id") if asked[name] is not None}
    collectives.form_in_cell(told, None if has_group else backend or "undefined", **options)
    return True


def _is_same_backend(asked: str, own: str, device: str) -> bool:
    """Return whether the backend ``own`` does what ``asked`` would, on the CPU and this worker's device."""
    theirs, ours = (BackendConfig(Backend(each)).get_device_backend_map() for each in (asked, own))
    named = {"cpu", device.partition(":")[0]} & theirs.keys()  # a backend for another device makes no difference here
    return bool(named) and all(ours.get(each) == theirs[each] for each in named)
