"""Collects the facts that this process knows about a remote reference, and shows them as a cell's value."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from nbdist.rpc.references.describing import error_line
from nbdist.rpc.references.rref import RRef
from nbdist.views import cards
from nbdist.views.cards import Facts, Rows
from nbdist.views.shown import Bundle
from nbdist.wire.messages import State

FINAL_STANDINGS = frozenset({"failed", "dead", "released", "ended"})  # never change again


def facts_of(rref: RRef[Any]) -> Facts:
    """Return the facts that this process knows about a reference now. Does not ask the owner."""
    state, standing = rref.state, rref.standing
    forks = rref.forks_out()
    if standing == "here" and state is None:  # the value is still being made here
        standing = "pending"
    return Facts(rref.owner_name(), standing, state, forks, _error_in_one_line(rref, standing, state))


def _error_in_one_line(rref: RRef[Any], standing: str, state: State | None) -> str:
    """Return the error in one line: of the value, of the call that should have made it, or of the loss of its owner."""
    if state is not None and state.error is not None:
        return error_line(state.qualname, state.error)
    if standing not in ("failed", "dead"):
        return ""
    error = rref.creation_failure() if standing == "failed" else None
    if error is None:
        try:
            rref.check_alive()
        except Exception as found:  # whatever `check_alive` raises is what became of the reference
            error = found
    return error_line(type(error).__name__, str(error)) if error is not None else ""


def over(facts: Facts, standing: str = "released") -> Facts:
    """Return facts about a reference that is gone: "released" by garbage collection, or "ended" with its cluster."""
    return facts if facts.standing in FINAL_STANDINGS else dataclasses.replace(facts, standing=standing)


def bundle(rref: RRef[Any]) -> Bundle:
    """Return a reference as text and HTML, by MIME type, for a saved notebook."""
    facts = facts_of(rref)
    return {"text/plain": cards.text(facts), "text/html": cards.card(facts, lasting=True)}


Many = list[RRef[Any]] | tuple[RRef[Any], ...] | dict[Any, RRef[Any]]  # shown in one table


def are_references(value: Any) -> bool:
    """Return whether a value is a list, tuple or dict, not empty, that has only references as items."""
    if type(value) not in (list, tuple, dict) or not value:  # a subclass may show itself
        return False
    return all(isinstance(item, RRef) for item in (value.values() if isinstance(value, dict) else value))


def rows_of(value: Many) -> Rows[RRef[Any]]:
    """Return the first `cards.ROWS_SHOWN` references, each with its key or number as the name of its row."""
    named: Iterable[tuple[Any, RRef[Any]]] = value.items() if isinstance(value, dict) else enumerate(value)
    first = itertools.islice(named, cards.ROWS_SHOWN)
    return Rows(type(value), [(repr(key), rref) for key, rref in first], len(value))


def bundle_of_rows(rows: Rows[Facts]) -> Bundle:
    """Return facts about several references by MIME type: an HTML table, and text as IPython prints the container."""
    return {"text/plain": cards.text_of_many(rows), "text/html": cards.table(rows)}
