"""`Spec`: the description of a cluster, which checks itself and gives each worker its device.

GPUs are handed out in turn. With 5 workers and ``gpu_ids=(2, 3)``::

    rank                       0        1        2        3        4
    GPU                        2        3        2        3        2
    CUDA_VISIBLE_DEVICES       2,3      2,3      2,3      2,3      2,3       with ``isolate_gpus``: 2  3  2  3  2
    device in the worker       cuda:0   cuda:1   cuda:0   cuda:1   cuda:0    with ``isolate_gpus``: always cuda:0
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from nbdist import durations
from nbdist.errors import UsageError
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions

DEFAULT_INVITATION = "nbdist-invitation.json"
"""The file of the first invitation, in the working directory, if the spec names none."""
VALID_FOR = 3600.0
"""Seconds for which an invitation is valid, unless the user says otherwise."""

_SET_BY_THE_CLUSTER = ("devices", "host", "init_method", "secret")  # options of RPC that the cluster sets itself
_WIDTH = 108  # characters of a line of help, which stands indented in docstrings of 120
_LARGEST = (1 << 63) - 1  # the largest whole number that is passed to a worker


def default_count(gpu_ids: Sequence[int] | None, backend: str | None) -> int:
    """Return the default number of workers: one for each GPU that they may get, or 2 without GPUs."""
    if gpu_ids:
        return len(gpu_ids)
    return (torch.cuda.device_count() if backend != "gloo" else 0) or 2


def rpc_arguments(options: RpcBackendOptions | None) -> dict[str, Any]:
    """Return the options that differ from the defaults, as arguments of `RpcBackendOptions` that JSON can hold."""
    if options is None:
        return {}
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(f"rpc must be an RpcBackendOptions of nbdist, not {type(options).__name__}")
    plain = vars(type(options)())
    asked = {name: value for name, value in vars(options).items() if value != plain[name]}
    if refused := sorted(asked.keys() & set(_SET_BY_THE_CLUSTER)):
        raise UsageError(f"a cluster sets {', '.join(refused)} of its RPC itself; leave that out of the options")
    for name, value in asked.items():
        # JSON has no infinity, and a worker reads no number of more than 64 bits.
        if isinstance(value, float):
            asked[name] = min(value, durations.LONGEST)
        elif isinstance(value, int):
            asked[name] = min(value, _LARGEST)
    if "device_maps" in asked:
        asked["device_maps"] = options.device_maps_by_name
    return asked


@dataclass(frozen=True)
class Option:
    """The form in which users write a field of `Spec`: as an option of `%dist_init`, and as an argument of `Cluster`.

    From this are made the parser, the usage, the completion and the help of `%dist_init`, and the text of `Cluster`.
    """

    flags: tuple[str, ...]
    value: str
    """The value as the usage shows it, such as ``pack|spread``; words in small letters are completed. "" for none."""
    help: str
    launchers: tuple[str, ...] = ()
    """The launchers that know this option; () for all."""

    @property
    def known_values(self) -> tuple[str, ...]:
        """The values that are completed."""
        return tuple(value for value in self.value.split("|") if value.islower()) if "|" in self.value else ()

    @property
    def is_closed(self) -> bool:
        """Return whether only the known values are possible."""
        return bool(self.value) and self.value == "|".join(self.known_values)


def _option(default: Any, form: str, help: str, launchers: str = "") -> Any:
    """Return a field with an `Option`. ``form`` has its flags and then its value, as in ``-t --timeout SECONDS``."""
    words = form.split()
    flags = tuple(word for word in words if word.startswith("-"))
    option = Option(flags, "".join(words[len(flags) :]), help, tuple(launchers.split()))
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class Spec:
    """The description of a cluster: the arguments of `Cluster` without ``progress``; the options of `%dist_init`."""

    count: int = _option(
        2,
        "-n --num-processes N",
        "How many workers, 1 to 1000. Without it, one for each GPU that they may use, or 2 without GPUs.",
    )
    gpu_ids: tuple[int, ...] | None = _option(
        None,
        "-g --gpu-ids 0,1",
        "The numbers of the GPUs to hand out, in turn, to the workers. Without it, all that torch sees, or "
        "none if the backend is gloo.",
    )
    backend: str | None = _option(
        None,
        "--backend gloo|nccl|none",
        "The backend of the process group: gloo, nccl, or the word none for no process group. Without it, nccl if "
        "every worker has a GPU of its own, else gloo.",
    )
    driver: str | None = _option(
        None,
        "--driver NAME",
        "The name of this process in the RPC world. It then has id 0, and the first worker is worker1. Without it, "
        "this process is called notebook, and the first worker is worker0.",
    )
    seed: int | None = _option(
        None,
        "--seed S",
        "The worker of rank r seeds its random numbers with this number plus r. Without it, they differ in every run.",
    )
    timeout: float = _option(
        120.0,
        "-t --timeout SECONDS",
        "Seconds within which all workers must be ready, at the start and after a restart. Without it, 120.",
    )
    launcher: str = _option(
        "local",
        "--launcher local|join|ray|NAME",
        "Which launcher starts the workers: local, on this host; join, which waits for workers of any host, each "
        "started by ``python -m nbdist worker``; ray, which has Ray choose the hosts; or the name of an installed one, "
        "which is an entry point of the group nbdist.launchers. Without it, local.",
    )
    isolate_gpus: bool = _option(False, "--isolate-gpus", "Let each worker see only its own GPU.")
    preload: tuple[str, ...] = _option(
        (),
        "--preload MODULE,MODULE",
        "Modules to import once, before the workers are forked. All workers then share the memory of these modules, "
        "and none spends time on the import. If one changes, the next cluster imports it again.",
    )
    gpu_memory: float | None = _option(
        None,
        "--gpu-memory PART",
        "The part of its GPU's memory that torch may take in each worker, such as 0.45. Without it, 1.",
    )
    rpc: Mapping[str, Any] = field(default_factory=dict)
    """The options of RPC, as `rpc_arguments` returns them. `%dist_init` takes only device maps."""
    host: str | None = _option(
        None,
        "--host ADDRESS",
        "For workers on other hosts: the address at which they reach this one. With the launcher local, the workers "
        "run here, and others may join them by an invitation (%dist_invite, Cluster.invite). Without it, join takes "
        "NBDIST_HOST, ray this node's address in Ray, and local lets nobody join.",
        "join ray",
    )
    ports: tuple[int, int] | None = _option(
        None,
        "--ports A-B",
        "For workers on other hosts: the first and the last port for the entrance, where workers join, such as "
        "40000-40100. Without it, any. RPC, gloo and NCCL use other ports.",
        "join ray",
    )
    invitation: str | None = _option(
        None,
        "--invitation FILE",
        "With the launcher join: the file for the invitation, which the start writes. Without it, "
        f"{DEFAULT_INVITATION}.",
        "join",
    )
    address: str | None = _option(
        None,
        "--address ADDRESS",
        "With the launcher ray: the address of the Ray cluster. Without it, the Ray that this process has, else "
        "RAY_ADDRESS, else a new Ray on this machine, which ends with the cluster.",
        "ray",
    )
    gpus_per_worker: float | None = _option(
        None,
        "--gpus-per-worker G",
        "With the launcher ray: how many GPUs each worker gets; a part, such as 0.5, for a shared one. Without it, "
        "one GPU each if Ray has enough of them, else none.",
        "ray",
    )
    placement: str = _option(
        "pack",
        "--placement pack|spread",
        "With the launcher ray: pack for few hosts, spread for many. Without it, pack.",
        "ray",
    )
    sync_code: bool = _option(
        False,
        "--sync-code",
        "For workers on other hosts: give each a copy of the Python files of this process's working directory when it "
        "starts, so that it can import them.",
        "join ray",
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Spec:
        """Return the checked description from the arguments of `Cluster`, by name; others are ignored."""
        given = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        if (gpus := given.get("gpu_ids")) is not None:
            given["gpu_ids"] = gpus = tuple(gpus)
        if "preload" in given:
            given["preload"] = (found,) if isinstance(found := given["preload"], str) else tuple(found)
        count = arguments.get("n")
        given["count"] = default_count(gpus, given.get("backend")) if count is None else count
        spec = cls(**{**given, "rpc": rpc_arguments(given.get("rpc"))})
        spec.check()
        return spec

    @property
    def is_remote(self) -> bool:
        """Return whether workers can be on other hosts by nbdist's own launchers, which find the devices there."""
        return self.launcher in ("join", "ray") or self.is_open_local

    @property
    def is_open_local(self) -> bool:
        """Return whether the workers run on this host, and workers of other hosts may join them."""
        return self.launcher == "local" and self.host is not None

    @property
    def may_grow(self) -> bool:
        """Return whether workers may join the running cluster, by invitations."""
        return self.launcher == "join" or self.is_open_local

    def check(self) -> None:
        """Raise UsageError if a value is impossible on any machine, TypeError if the timeout is no number."""
        if not 1 <= self.count <= 1000:
            raise UsageError(f"a cluster has 1 to 1000 workers, not {self.count}")
        if self.backend not in (None, "gloo", "nccl", "none"):
            raise UsageError(f"the backend is gloo, nccl or none, not {self.backend!r}")
        if self.driver is not None and re.fullmatch(r"worker\d+", self.driver):
            raise UsageError(f"{self.driver!r} is a worker's name; give the notebook another, such as master")
        if self.driver is not None:
            WorkerInfo(self.driver, 0)  # raises UsageError if it cannot be a name
        seconds = durations.seconds(self.timeout, "the timeout")
        if not 0 < seconds <= durations.LONGEST:
            raise UsageError(f"the timeout must be more than 0 s, and at most {durations.LONGEST:g} s, not {seconds:g}")
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise UsageError(f"{name!r} is not the name of a module, so it cannot be preloaded")
        if self.gpu_memory is not None and not 0 < self.gpu_memory <= 1:
            raise UsageError(
                f"gpu_memory is the part of a GPU's memory that a worker may take, more than 0 and at most 1, not "
                f"{self.gpu_memory}"
            )
        self._check_hosts()
        first = 0 if self.driver is None else 1
        names = {self.driver or "notebook", *(f"worker{rank + first}" for rank in range(self.count))}
        if unknown := sorted(self.rpc.get("device_maps", {}).keys() - names):
            raise UsageError(f"the device maps name workers that this cluster does not have: {', '.join(unknown)}")
        if self.gpu_ids is not None and (len(set(self.gpu_ids)) < len(self.gpu_ids) or not self.gpu_ids):
            raise UsageError("gpu_ids: name each GPU once, and at least one GPU")

    def _check_hosts(self) -> None:
        """Raise UsageError if an option for other hosts is impossible, or does not belong to the launcher."""
        for name, option in OPTIONS.items():
            launchers = option.launchers
            if self.is_open_local and "join" in launchers and "ray" in launchers:  # it is for other hosts in general
                continue
            if launchers and self.launcher not in launchers and getattr(self, name) != getattr(Spec, name):
                raise UsageError(
                    f"{name} is for the launcher {' or '.join(launchers)}, not for {self.launcher}: leave it out, or "
                    f"name the launcher, as in `--launcher {launchers[0]}`"
                )
        if self.is_remote and (self.gpu_ids is not None or self.isolate_gpus):
            remedy = ", or leave host out" if self.is_open_local else ""
            raise UsageError(
                f"the launcher {self.launcher} gives each worker GPUs of its host: leave gpu_ids and isolate_gpus out"
                f"{remedy}"
            )
        if self.ports is not None and not 1 <= self.ports[0] <= self.ports[1] <= 65535:
            raise UsageError(f"ports are two numbers from 1 to 65535, the smaller first, not {self.ports}")
        if self.gpus_per_worker is not None and not self.gpus_per_worker >= 0:
            raise UsageError(f"gpus_per_worker must be 0 or more, not {self.gpus_per_worker:g}")
        if self.placement not in ("pack", "spread"):
            raise UsageError(f"placement is pack or spread, not {self.placement!r}")

    def same_as(self, other: Spec) -> bool:
        """Return whether two descriptions mean equal clusters, as `%dist_init` asks. Their timeouts may differ."""
        return self.__dict__ | {"timeout": 0} == other.__dict__ | {"timeout": 0}

    def devices(self) -> list[tuple[str, int | None]]:
        """Return for each rank the device, as the worker's torch calls it, and the GPU's number, as users know it."""
        if self.is_remote:  # the launchers find the devices
            return [("cpu", None)] * self.count
        there = torch.cuda.device_count() if self.backend != "gloo" or self.gpu_ids is not None else 0
        if unknown := [gpu for gpu in self.gpu_ids or () if not 0 <= gpu < there]:
            have = f"there are {there}, numbered from 0" if there else "torch sees none here"
            raise UsageError(f"no such GPU: {', '.join(map(str, unknown))}; {have}")
        if self.backend == "nccl" and not there:
            raise UsageError("the backend nccl needs GPUs, and torch sees none here; use the backend gloo")
        if not there:
            return [("cpu", None)] * self.count
        chosen = self._usable_gpus()
        if self.backend == "nccl" and len(chosen) < self.count:
            raise UsageError(
                f"the backend nccl needs a GPU for each of {self.count} workers, and has {len(chosen)}; "
                "start fewer workers, or use --backend gloo -g " + ",".join(map(str, chosen))
            )
        places = [rank % len(chosen) for rank in range(self.count)]
        return [(f"cuda:{0 if self.isolate_gpus else place}", chosen[place]) for place in places]

    def visible_gpus(self, own: int) -> str:
        """Return ``CUDA_VISIBLE_DEVICES`` for the worker whose GPU has the number ``own``."""
        # The variable may be set for this process, too: then its entries are the names of the GPUs that torch counts.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",")] if visible else []
        chosen = [own] if self.isolate_gpus else self._usable_gpus()
        return ",".join(names[gpu] if names else str(gpu) for gpu in chosen)

    def _usable_gpus(self) -> list[int]:
        return list(self.gpu_ids) if self.gpu_ids is not None else list(range(torch.cuda.device_count()))


OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(Spec) if each.metadata}
"""The options of a cluster, by the name of the field of `Spec`."""


def usage() -> str:
    """Return the options as the usage of `%dist_init` shows them, each in brackets."""
    return " ".join(f"[{each.flags[0]}{each.value and ' '}{each.value}]" for each in OPTIONS.values())


def describe_options() -> str:
    """Return a text that describes the options of `%dist_init`."""
    return _lines({f"{', '.join(each.flags):22}": each.help for each in OPTIONS.values()}, 22)


def describe_arguments() -> str:
    """Return a text that describes the arguments of `Cluster` that are fields of `Spec`."""
    return _lines({f"{'n' if name == 'count' else name}: ": each.help for name, each in OPTIONS.items()}, 4)


def _lines(texts: Mapping[str, str], indent: int) -> str:
    """Return the texts, each behind its head, wrapped; all lines of a text but its first are indented."""
    wrap = partial(textwrap.fill, width=_WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(wrap(head + text) for head, text in texts.items())
