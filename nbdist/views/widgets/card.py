"""The card of a remote reference.

It is made at the first display of a reference, never before, and there is one for each, however often that is shown.
It holds what is known, not the reference, which it must not keep alive; and it asks for nothing: it changes when news
of the reference has come anyway.
"""

from __future__ import annotations

import threading
import weakref
from html import escape
from typing import Any

import ipywidgets
import traitlets
from ipywidgets.widgets.widget_string import HTMLStyle

from nbdist.pictures import themed
from nbdist.rpc.rref import RRef
from nbdist.views import cards, references
from nbdist.views.shown import Bundle
from nbdist.views.widgets.live import Live
from nbdist.views.widgets.view import View, identity, script, style

__all__ = ["LIVE", "MOST", "RRefCard", "card_of", "looks"]

MOST = 64
"""So many are live; one that was shown before these is a picture from then on."""


class RRefCard(View, ipywidgets.HTML):  # type: ignore[misc]  # ipywidgets has no annotations
    """What is known of one reference, and buttons to ask for more, or to let go of it."""

    _anywidget_id = identity("nbdist.card")
    _esm = script("buttons.js", "card.js")
    _css = style("common.css")
    peeked = traitlets.Unicode("").tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, rref: RRef[Any]) -> None:
        self.home = rref._home.references.me
        self._known = weakref.ref(rref)
        self._facts = references.facts_of(rref)
        layout, style = looks()
        super().__init__(value=cards.card(self._facts), layout=layout, style=style)
        self._end = rref.when_changed(self.changed)
        self._gone = weakref.finalize(rref, _news, weakref.ref(self))
        self._gone.atexit = False
        if references.facts_of(rref) != self._facts:  # there was news before anybody listened
            self.changed()

    def picture(self) -> Bundle:
        """Return what the card shows, as text and HTML."""
        return {"text/plain": cards.text(self._facts), "text/html": cards.card(self._facts) + self.peeked}

    def publish(self) -> None:
        """Show what is known now; if the reference is no more, for the last time."""
        if not self.live:  # its news came late
            return
        rref = self._known()
        self._tell(references.facts_of(rref) if rref is not None else references.over(self._facts))
        if rref is None or self._facts.standing in references.OVER:
            self.freeze()

    def _tell(self, facts: cards.Facts) -> None:
        self._facts = facts
        self.value = cards.card(facts)

    def press(self, message: dict[str, Any]) -> None:
        """Peek, or release."""
        rref = self._known()
        if rref is None:
            raise LookupError("the reference is gone")
        if message.get("press") == "peek":
            before = self.peeked
            self.peeked = themed(f"{escape(rref.owner_name())} is asked what the value looks like …")
            try:
                self.peeked = cards.peek_html(rref.peek())
            except BaseException:
                self.peeked = before
                raise
        elif message.get("press") == "release":
            rref.release()
            self.changed()

    def freeze(self) -> None:
        """Be a picture from now on."""
        self._end()
        self._gone.detach()
        LIVE.drop(self)
        self.live = False
        self.close()

    def leave(self) -> None:
        """Be a picture from now on, of a reference whose cluster has ended."""
        rref = self._known()
        self._tell(references.over(references.facts_of(rref) if rref is not None else self._facts, "ended"))
        self.freeze()


def _news(known: weakref.ref[RRefCard]) -> None:
    """In a finaliser, which must do no more than this."""
    card = known()
    if card is not None:
        card.changed()


LIVE = Live(MOST)
_lock = threading.RLock()
_by_rref: weakref.WeakKeyDictionary[RRef[Any], weakref.ref[RRefCard]] = weakref.WeakKeyDictionary()
_looks: list[ipywidgets.Widget] = []


def card_of(rref: RRef[Any]) -> RRefCard:
    """Return the card of a reference; a new one where it has none that is live."""
    with _lock:
        known = _by_rref.get(rref)
        found = known() if known is not None else None
        if found is None or found.comm is None:
            found = RRefCard(rref)
            _by_rref[rref] = weakref.ref(found)
    LIVE.keep(found)
    return found


def looks() -> list[ipywidgets.Widget]:
    """Return the layout and style that all cards and tables of references have in common."""
    if not _looks or any(look.comm is None for look in _looks):
        _looks[:] = ipywidgets.Layout(), HTMLStyle()
    return _looks
