"""Stands for torch.distributed.autograd, of which nbdist has nothing yet.

It must be replaced all the same: torch's own would record nothing of calls that nbdist makes, and would give
gradients without the remote part instead of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from nbdist.errors import UsageError

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether there is a ``torch.distributed.autograd``; its functions can be named, not yet called."""
    return True


def _refuse() -> NoReturn:
    raise UsageError("nbdist does not have distributed autograd yet")


class context:
    """Would record one iteration across workers."""

    def __enter__(self) -> int:
        _refuse()

    def __exit__(self, *exception: object) -> None:
        _refuse()


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Would run the backward pass of a context."""
    _refuse()


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Would return the gradients that a context has gathered on this worker."""
    _refuse()


def _init(worker_id: int) -> None:
    """Nothing has to be prepared."""


def _get_debug_info() -> dict[str, str]:
    return {"num_autograd_contexts": "0", "num_current_backward_passes": "0"}


def _is_valid_context(worker_id: int) -> bool:
    return False


def _new_context() -> Any:
    _refuse()


def _current_context() -> Any:
    _refuse()


def _retrieve_context(context_id: int) -> Any:
    _refuse()


def _release_context(context_id: int) -> None:
    _refuse()


def _get_max_id() -> int:
    _refuse()
