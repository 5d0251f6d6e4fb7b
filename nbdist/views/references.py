"""What can be known of a remote reference without asking, and how it is shown where it is the value of a cell."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from nbdist.rpc.describing import error_line
from nbdist.rpc.rref import RRef
from nbdist.views import cards
from nbdist.views.cards import Facts, Rows
from nbdist.views.shown import Bundle
from nbdist.wire.messages import State

__all__ = [
    "OVER",
    "Many",
    "are_references",
    "bundle",
    "bundle_of_many",
    "bundle_of_rows",
    "facts_of",
    "over",
    "rows_of",
]

OVER = frozenset({"failed", "dead", "released", "ended"})
"""The standings after which there is no news."""


def facts_of(rref: RRef[Any]) -> Facts:
    """Return what is known of a reference now; nobody is asked."""
    state, standing = rref.state, rref._standing()
    forks = rref.forks_out()
    if standing == "here" and state is None:
        standing = "pending"
    return Facts(rref.owner_name(), standing, state, forks, _why(rref, standing, state))


def _why(rref: RRef[Any], standing: str, state: State | None) -> str:
    """Return what went wrong, in one line; nothing if nothing did."""
    if state is not None and state.error is not None:
        return error_line(state.qualname, state.error)
    if standing not in ("failed", "dead"):
        return ""
    creation = rref._creation
    error = creation.exception() if standing == "failed" and creation is not None and creation.done() else None
    if error is None:
        try:
            rref.check_alive()
        except Exception as found:
            error = found
    return error_line(type(error).__name__, str(error)) if error is not None else ""


def over(facts: Facts, standing: str = "released") -> Facts:
    """Return the facts of a reference that has been collected, or of whose cluster nothing is left ("ended")."""
    return facts if facts.standing in OVER else dataclasses.replace(facts, standing=standing)


def bundle(rref: RRef[Any]) -> Bundle:
    """Return a reference as text and HTML, the same however far it has come."""
    facts = facts_of(rref)
    return {"text/plain": cards.text(facts), "text/html": cards.card(facts, lasting=True)}


Many = list[RRef[Any]] | tuple[RRef[Any], ...] | dict[Any, RRef[Any]]
"""References that are shown together."""


def are_references(value: Any) -> bool:
    """Return whether this is a list, tuple or dict of references, and nothing else."""
    if type(value) not in (list, tuple, dict) or not value:
        return False
    return all(isinstance(item, RRef) for item in (value.values() if isinstance(value, dict) else value))


def rows_of(value: Many) -> Rows[RRef[Any]]:
    """Return the rows of a table of references: the first `cards.MOST`, each with what it is called."""
    if isinstance(value, dict):
        first = itertools.islice(value.items(), cards.MOST)
        return Rows(type(value), [(repr(key), rref) for key, rref in first], len(value))
    return Rows(type(value), [(str(number), rref) for number, rref in enumerate(value[: cards.MOST])], len(value))


def bundle_of_many(value: Many) -> Bundle:
    """Return a list, tuple or dict of references as one table, and as the text that the shell would print."""
    return bundle_of_rows(rows_of(value).each(facts_of))


def bundle_of_rows(rows: Rows[Facts]) -> Bundle:
    """Return the same of what is known of them."""
    return {"text/plain": cards.text_of_many(rows), "text/html": cards.table(rows)}
