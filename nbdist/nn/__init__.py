"""Modules that live on other workers."""

from __future__ import annotations

from nbdist.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
