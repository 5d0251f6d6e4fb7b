"""What a cluster is asked to be, and which device each of its workers has."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from nbdist import durations
from nbdist.errors import UsageError
from nbdist.rpc.membership import WorkerInfo

__all__ = ["Spec"]


@dataclass(frozen=True)
class Spec:
    """What a cluster is asked to be."""

    count: int = 2
    gpu_ids: tuple[int, ...] | None = None
    backend: str | None = None
    driver: str | None = None
    seed: int | None = None
    timeout: float = 120.0
    launcher: str = "local"
    isolate_gpus: bool = False
    preload: tuple[str, ...] = ()
    """Modules that are imported before workers start, once for all."""

    def check(self) -> None:
        """Refuse what cannot be."""
        if not 1 <= self.count <= 1000:
            raise UsageError(f"a cluster has 1 to 1000 workers, not {self.count}")
        if self.backend not in (None, "gloo", "nccl", "none"):
            raise UsageError(f"the backend is gloo, nccl or none, not {self.backend!r}")
        if self.driver is not None and re.fullmatch(r"worker\d+", self.driver):
            raise UsageError(f"{self.driver!r} is a worker's name; give the notebook another, such as master")
        if self.driver is not None:
            WorkerInfo(self.driver, 0)  # raises for a bad name
        seconds = durations.seconds(self.timeout, "the timeout")
        if not 0 < seconds <= durations.LONGEST:
            raise UsageError(f"the timeout must be more than 0 s, and at most {durations.LONGEST:g} s, not {seconds:g}")
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise UsageError(f"{name!r} is not the name of a module to preload")
        if self.gpu_ids is not None and (len(set(self.gpu_ids)) < len(self.gpu_ids) or not self.gpu_ids):
            raise UsageError("name each GPU once")

    def same_as(self, other: Spec) -> bool:
        """Whether both describe one cluster; how long to wait for it does not matter."""
        return self.__dict__ | {"timeout": 0} == other.__dict__ | {"timeout": 0}

    def devices(self) -> list[tuple[str, int | None]]:
        """The device of each rank, as its torch will call it, and the number of its GPU as the user knows it."""
        there = torch.cuda.device_count() if self.backend != "gloo" or self.gpu_ids is not None else 0
        if self.gpu_ids is not None:
            unknown = [gpu for gpu in self.gpu_ids if not 0 <= gpu < there]
            if unknown:
                have = f"there are {there}, numbered from 0" if there else "torch sees none here"
                raise UsageError(f"no such GPU: {', '.join(map(str, unknown))}; {have}")
        if self.backend == "nccl" and not there:
            raise UsageError("the backend nccl needs GPUs, and torch sees none here; take --backend gloo")
        if not there:
            return [("cpu", None)] * self.count
        chosen = self._chosen()
        if self.backend == "nccl" and len(chosen) < self.count:
            raise UsageError(
                f"the backend nccl needs a GPU for each of {self.count} workers, and has {len(chosen)}; "
                "start fewer, or take --backend gloo -g " + ",".join(map(str, chosen))
            )
        places = [rank % len(chosen) for rank in range(self.count)]
        return [(f"cuda:{0 if self.isolate_gpus else place}", chosen[place]) for place in places]

    def visible_gpus(self, own: int) -> str:
        """CUDA_VISIBLE_DEVICES of the worker with GPU ``own``."""
        # This process, too, may see only some of the GPUs, under other numbers than the driver's.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",")] if visible else []
        chosen = [own] if self.isolate_gpus else self._chosen()
        return ",".join(names[gpu] if names else str(gpu) for gpu in chosen)

    def _chosen(self) -> list[int]:
        return list(self.gpu_ids) if self.gpu_ids is not None else list(range(torch.cuda.device_count()))
