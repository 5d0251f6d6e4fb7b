"""Checks a number of seconds that a user gave, and refuses anything else.

============================== ===================== =================== ====================== ===============
given                          `limit` (a call)      `patience` (a wait) `bounded` (a deadline) `positive`
============================== ===================== =================== ====================== ===============
a text, None, a list           TypeError             TypeError           TypeError              TypeError
NaN                            UsageError            UsageError          UsageError             UsageError
less than 0                    as given: the default UsageError          UsageError             UsageError
0                              0: no limit           0: do not wait      0                      UsageError
more than `LONGEST`, infinity  0: no limit           None: no limit      `LONGEST`              `LONGEST`
============================== ===================== =================== ====================== ===============

The errors call the value by its ``name``.
"""

from __future__ import annotations

import math
from typing import Any

from nbdist.errors import UsageError

LONGEST = 1e8
"""Seconds, about three years. Python's locks and torch's stores can wait for that long; more counts as no limit."""


def seconds(value: Any, name: str = "timeout") -> float:
    """Return ``value``, a number of seconds, as a float. A number that is too large for a float becomes infinity.

    Raises TypeError if ``value`` is no number, UsageError if it is NaN.
    """
    try:
        # `float` would read a text such as "5", too.
        found = None if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:
        found = math.inf if value > 0 else -math.inf
    except Exception:  # from the __float__ of a user's class
        found = None
    if found is None:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if math.isnan(found):
        raise UsageError(f"{name} must be a number of seconds, not {found}")
    return found


def limit(value: Any, name: str = "timeout") -> float:
    """Return the time limit of a call, in seconds: 0 for no limit, negative for the default."""
    found = seconds(value, name)
    return 0.0 if found > LONGEST else found


def patience(value: Any, name: str = "timeout") -> float | None:
    """Return the longest time to wait, in seconds: 0 for not at all, None for no limit."""
    found = _from_0(value, name)
    return None if found > LONGEST else found


def bounded(value: Any, name: str = "timeout") -> float:
    """Return a number of seconds from 0 to `LONGEST`, for computing a deadline."""
    return min(_from_0(value, name), LONGEST)


def positive(value: Any, name: str = "timeout") -> float:
    """Return a number of seconds above 0, for computing a deadline."""
    found = seconds(value, name)
    if found <= 0:
        raise UsageError(f"{name} must be more than 0 s, not {found:g}")
    return min(found, LONGEST)


def _from_0(value: Any, name: str) -> float:
    found = seconds(value, name)
    if found < 0:
        raise UsageError(f"{name} must be 0 s or more, not {found:g}")
    return found
