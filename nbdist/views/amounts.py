"""Formats numbers of bytes and seconds for people."""

from __future__ import annotations

__all__ = ["duration", "size"]


def size(nbytes: int) -> str:
    """Return a number of bytes as text, in units of 1000: ``"1.5 MB"``."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Return a number of seconds as text: ``"1.50 s"``, or below a second ``"12.0 ms"``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
