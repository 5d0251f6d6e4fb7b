"""A worker's GPU: makes it the device of the worker, and says in words why it cannot be used or is full."""

from __future__ import annotations

import torch

from nbdist.amounts import size
from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.errors import UsageError
from nbdist.gpus.support import is_supported, lacks_convolutions

_NOTE = "GPU "  # the beginning of the note that `explain` adds

_own: WorkerSetup | None = None  # this worker's setup, if it has a GPU


def prepare(told: WorkerSetup) -> None:
    """Make the worker's GPU torch's current device, and let torch take only the worker's share of its memory."""
    global _own
    if told.gpu is None:
        return
    _own = told
    torch.cuda.set_device(told.device)
    if told.gpu_memory is not None:
        torch.cuda.set_per_process_memory_fraction(told.gpu_memory, told.device)


def check(told: WorkerSetup) -> None:
    """Raise UsageError if the installed torch has no code for the worker's GPU: its first use would fail."""
    if told.gpu is None:
        return
    capability, built = torch.cuda.get_device_capability(told.device), torch.cuda.get_arch_list()
    if not is_supported(capability, built):
        raise UsageError(
            f"torch {torch.__version__} has no code for GPU {told.gpu}, a {torch.cuda.get_device_name(told.device)} of "
            f"compute capability {capability[0]}.{capability[1]}; it is built for {', '.join(built)}. Choose other "
            "GPUs with -g, none with --backend gloo, or install a torch that is built for it"
        )


def identity(told: WorkerSetup) -> str:
    """Return a text that is the same for two workers, of any host, if they have one GPU; empty without a GPU."""
    return "" if told.gpu is None else str(torch.cuda.get_device_properties(told.device).uuid)


def own_lacks_convolutions() -> str:
    """Return what `lacks_convolutions` says of this worker's GPU. The notebook calls this."""
    return "" if _own is None else lacks_convolutions(_own.device)


def explain(error: BaseException | None) -> None:
    """Add a note to torch's error that a GPU's memory is full: whose GPU it is, and what shows who takes the memory."""
    if _own is None or not isinstance(error, torch.OutOfMemoryError):
        return
    if any(str(note).startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    free, whole = torch.cuda.mem_get_info()
    error.add_note(
        f"{_NOTE}{_own.gpu}, of {_own.name}: torch has taken {size(torch.cuda.memory_reserved())} here, of which "
        f"tensors need {size(torch.cuda.memory_allocated())}; {size(free)} of {size(whole)} are free. "
        "%dist_memory shows what takes the memory of each worker, and %dist_init --gpu-memory 0.45 bounds what each "
        "may take"
    )
