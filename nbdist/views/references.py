"""What can be known of a remote reference without asking, and how it is shown where it is the value of a cell."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from nbdist.rpc.rref import RRef
from nbdist.views import cards
from nbdist.views.cards import Facts
from nbdist.views.shown import Bundle

__all__ = ["OVER", "bundle", "bundle_of_many", "facts_of", "over"]

OVER = frozenset({"failed", "dead", "released", "ended"})
"""The standings after which there is no news."""


def facts_of(rref: RRef[Any]) -> Facts:
    """What is known of it now."""
    references = rref._agent.references
    state = rref.state
    forks = references.forks.forks_of(rref._id) if rref.is_owner() else None
    standing = "here" if rref.is_owner() and rref._hold is not None else rref._standing()
    why = ""
    if standing in ("failed", "dead"):
        try:
            references.check_alive(rref)
        except Exception as error:
            why = str(error)
    return Facts(rref.owner_name(), standing, state, forks, why)


def over(facts: Facts) -> Facts:
    """The same of a reference that has been collected."""
    return dataclasses.replace(facts, standing="released")


def bundle(rref: RRef[Any]) -> Bundle:
    """Return a reference as text and HTML, the same however far it has come."""
    facts = facts_of(rref)
    return {"text/plain": cards.text(facts), "text/html": cards.card(facts, lasting=True)}


def bundle_of_many(value: list[RRef[Any]] | dict[Any, RRef[Any]]) -> Bundle:
    """A list or dict of references, as one table.

    Its text is the shell's own, in which each of them is a line.
    """
    if isinstance(value, dict):
        rows = [(repr(key), facts_of(item)) for key, item in itertools.islice(value.items(), cards.MOST)]
    else:
        rows = [(str(number), facts_of(item)) for number, item in enumerate(value[: cards.MOST])]
    return {"text/html": cards.table(rows, len(value))}
