"""Puts bytes, seconds and numbers of things into words, as ``views/static/amounts.js`` does in a page."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """Return a number of bytes as text, in units of 1000: ``"1.5 MB"``."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Return a measured number of seconds as text: ``"1.50 s"``, ``"12.0 ms"`` or ``"50 µs"``.

    A number that a user has given, such as a timeout, is shown as given instead: ``f"{seconds:g} s"``.
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``"1 block"``, ``"1,200 blocks"``. ``one`` and ``many`` are as for `plural`."""
    return f"{number:,} {plural(number, one, many)}"


def plural(number: int, one: str, many: str = "") -> str:
    """Return ``one`` for the number 1, and ``many`` for any other; ``many`` is ``one`` with an s by default."""
    return one if number == 1 else many or f"{one}s"
