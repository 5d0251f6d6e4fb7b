"""Names the part of a model for which DDP or FSDP2 has called a collective, or that DDP's error gives as numbers."""

from __future__ import annotations

import math
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from nbdist.code_places import is_torchs
from nbdist.thread_frames import outwards

# Bytes after which DDP begins its second bucket of gradients; for the others, the user sets the number.
_FIRST_BUCKET = 1 << 20
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def owner(innermost: FrameType | None, main: FrameType | None, entry: Mapping[str, Any]) -> str:
    """Return the module or the gradients that a collective belongs to, in words; "" if it belongs to none.

    ``innermost`` is the frame of the thread that called it, ``main`` of the main thread, in which a forward pass waits.
    """
    for frame in (*outwards(innermost), *outwards(main)):
        known = frame.f_locals.get("self") if is_torchs(frame.f_code.co_filename, "distributed/fsdp") else None
        if (name := getattr(known, "_module_fqn", None)) is not None:  # a group of parameters of FSDP2
            return f"module {name}" if name else "the root module"
    for model in _models(outwards(main)):
        if said := _gradients(model, entry):
            return said
    return ""


def explain(error: BaseException | None) -> None:
    """Add the names of the parameters to DDP's error that some, which it numbers, got no gradient."""
    if not (isinstance(error, RuntimeError) and (found := _WITHOUT_GRADIENT.search(str(error)))):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if (model := next(_models(reversed(frames)), None)) is not None:
        names = [name for name, each in model.module.named_parameters() if each.requires_grad]
        names = [name for name in names if name not in model.parameters_to_ignore]
        given = [names[int(number)] for number in found[1].split() if int(number) < len(names)]
        if (note := f"these parameters got no gradient: {', '.join(given)}") not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _models(frames: Iterable[FrameType]) -> Iterator[Any]:
    """Yield the models in DDP that variables of these frames hold, or attributes of their ``self``."""
    ddp = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    for frame in frames:
        found = frame.f_locals
        for value in (*found.values(), *getattr(found.get("self"), "__dict__", {}).values()):
            if isinstance(value, ddp):
                yield value


def _gradients(model: Any, entry: Mapping[str, Any]) -> str:
    """Return the parameters whose gradients an ``all_reduce`` of DDP averages; "" if that is not certain."""
    is_of_model = entry["process_group"][0] == model.process_group.group_name
    if not (is_of_model and entry["profiling_name"].endswith("all_reduce")):
        return ""
    size = sum(math.prod(each) for each in entry["input_sizes"])
    fitting = [held for held in _buckets(model) if sum(each.numel() for _, each in held) == size]
    if len(fitting) != 1:
        return ""
    first, last = fitting[0][0][0], fitting[0][-1][0]
    return f"the gradient of {first}" if first == last else f"the gradients of {first} to {last}"


def _buckets(model: Any) -> list[list[tuple[str, Any]]]:
    """Return the parameters whose gradients DDP averages together: each bucket, and all together for the first pass."""
    # DDP's own list cannot be read while it waits: it holds a lock. It fills the buckets in the order in which
    # gradients come, usually the parameters' order reversed.
    parameters = [each for each in model.module.named_parameters() if each[1].requires_grad][::-1]
    buckets: list[list[tuple[str, Any]]] = [[]]
    for name, parameter in parameters:
        limit = _FIRST_BUCKET if len(buckets) == 1 else model.bucket_bytes_cap
        if sum(each.nbytes for _, each in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append((name, parameter))
    return buckets if len(buckets) == 1 else [*buckets, parameters]
