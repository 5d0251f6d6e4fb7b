"""`Policy`: what a swarm's client does, as the user of `serve` has asked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, SupportsIndex, cast, get_args

from nbdist import durations
from nbdist.errors import UsageError

Recover = Literal["exact", "fast"]  # how a session continues on another server: see `serve`


@dataclass(frozen=True)
class Policy:
    """The arguments of `nbdist.swarm.serve` that concern its own process. `serve` describes them."""

    recover: Recover = "exact"
    step_timeout: float = 60.0
    cache_timeout: float = 60.0
    route_timeout: float = 0.0
    chunk: int | None = None
    micro_batch: int | None = None
    room: int | None = None
    spend: Callable[[str, int], float] = lambda kind, tokens: 0.0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Policy:
        """Check the arguments of `serve` that are fields here; raise UsageError and TypeError as `serve` does."""
        given = {each.name: arguments[each.name] for each in fields(cls)}
        check_count("chunk", given["chunk"])
        check_count("micro_batch", given["micro_batch"])
        check_amount("room", given["room"])
        check_function("spend", given["spend"])
        check_recover(given["recover"])
        given["step_timeout"] = durations.positive(given["step_timeout"], "step_timeout")
        for name in ("cache_timeout", "route_timeout"):
            given[name] = durations.bounded(given[name], name)
        return cls(**given)


def check_count(name: str, count: Any) -> None:
    """Raise UsageError if an argument is neither None nor a whole number of at least 1."""
    if count is not None and not (isinstance(count, SupportsIndex) and operator.index(count) >= 1):
        raise UsageError(f"{name} must be a whole number of at least 1, or None, not {count!r}")


def check_amount(name: str, amount: Any) -> None:
    """Raise UsageError if an argument is neither None nor a number of at least 0, such as ``4e9``."""
    if amount is not None and not (isinstance(amount, Real) and float(amount) >= 0):
        raise UsageError(f"{name} must be a number of at least 0, or None, not {amount!r}")


def check_function(name: str, value: Any) -> None:
    """Raise UsageError if an argument cannot be called."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, not {value!r}")


def check_recover(value: Any) -> Recover:
    """Return ``value``, a user's argument ``recover``; raise UsageError if it is not one of `Recover`."""
    if not isinstance(value, str) or value not in get_args(Recover):
        raise UsageError(f'recover must be "exact" or "fast", not {value!r}')
    return cast("Recover", value)
