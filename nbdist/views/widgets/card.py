"""The live card of a remote reference, with buttons that peek at the value and release the reference.

A card is made when its reference is first displayed, and later displays show the same card.
"""

from __future__ import annotations

import threading
import weakref
from html import escape
from typing import Any

import traitlets

from nbdist.rpc.references.rref import RRef
from nbdist.views import cards
from nbdist.views.cards import Facts, Rows
from nbdist.views.drawing.pictures import themed
from nbdist.views.shown import Bundle
from nbdist.views.widgets.live import LiveReferences, LiveViews
from nbdist.views.widgets.view import identity, script, style

LIVE = LiveViews(64)  # if there are more, the card shown longest ago becomes a picture


class RRefCard(LiveReferences):
    """The live card of one reference."""

    _anywidget_id = identity("nbdist.card")
    _esm = script("buttons.js", "card.js")
    _css = style("common.css")
    kept = LIVE
    peeked = traitlets.Unicode("").tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, rref: RRef[Any]) -> None:
        super().__init__(Rows(list, [("", rref)], 1))

    def draw(self, facts: Rows[Facts]) -> str:
        """Return the card as HTML."""
        return cards.card(facts.items[0][1])

    def picture(self) -> Bundle:
        """Return the card's content as text and HTML."""
        facts = self._facts.items[0][1]
        return {"text/plain": cards.text(facts), "text/html": cards.card(facts) + self.peeked}

    def press(self, message: dict[str, Any]) -> None:
        """Peek at the value and show the result, or release the reference; the view shows what this raises."""
        if (rref := self._known.items[0][1]()) is None:
            raise LookupError(
                "the reference is gone, because no variable holds it any more: show another reference to the value"
            )
        if message.get("press") == "peek":
            before = self.peeked
            self.peeked = themed(f"{escape(rref.owner_name())} is asked what the value looks like …")
            try:
                self.peeked = cards.peek_html(rref.peek())
            except BaseException:  # whatever the value's owner raises: the card must not say for ever that it asks
                self.peeked = before
                raise
        elif message.get("press") == "release":
            rref.release()
            self.changed()


_lock = threading.RLock()
# Weak at both ends: a card keeps no reference alive, and is itself kept by `LIVE` alone.
_by_rref: weakref.WeakKeyDictionary[RRef[Any], weakref.ref[RRefCard]] = weakref.WeakKeyDictionary()


def card_of(rref: RRef[Any]) -> RRefCard:
    """Return the live card of a reference; make one if there is none, or if the last has become a picture."""
    with _lock:
        known = _by_rref.get(rref)
        found = known() if known is not None else None
        if found is None or found.comm is None:  # without a comm, it is a picture
            found = RRefCard(rref)
            _by_rref[rref] = weakref.ref(found)
    LIVE.keep(found)
    return found
