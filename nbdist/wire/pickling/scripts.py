"""Recognises code of TorchScript, without importing `torch.jit`: a process that has such code has loaded it."""

from __future__ import annotations

import sys
from typing import Any


def is_script_module(value: object) -> bool:
    """Return whether ``value`` is a module of TorchScript."""
    return isinstance(value, getattr(_jit(), "ScriptModule", ()))


def is_script_function(value: object) -> bool:
    """Return whether ``value`` is a function of TorchScript."""
    return isinstance(value, getattr(_jit(), "ScriptFunction", ()))


def is_tracing() -> bool:
    """Return whether ``torch.jit.trace`` runs in the calling thread."""
    jit = _jit()
    return jit is not None and jit.is_tracing()


def _jit() -> Any:
    return sys.modules.get("torch.jit")
