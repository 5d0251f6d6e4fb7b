"""The live card of a remote reference, with buttons that peek at the value and release the reference.

A card is made when its reference is first displayed, and later displays show the same card. It holds facts and a weak
reference, so it does not keep the reference alive. Apart from its buttons, it asks the owner for nothing: it changes
when news of the reference arrives for other reasons.
"""

from __future__ import annotations

import threading
import weakref
from html import escape
from typing import Any

import ipywidgets
import traitlets

from nbdist.cluster.jupyter.versions import html_style
from nbdist.rpc.references.rref import RRef
from nbdist.views import cards, references
from nbdist.views.drawing.pictures import themed
from nbdist.views.shown import Bundle
from nbdist.views.widgets.live import LiveViews
from nbdist.views.widgets.view import View, identity, script, style

__all__ = ["LIVE", "MOST", "RRefCard", "card_of", "looks"]

MOST = 64
"""The most live cards; if there are more, the card shown longest ago becomes a picture."""


class RRefCard(View, ipywidgets.HTML):  # type: ignore[misc]  # ipywidgets has no annotations
    """The live card of one reference."""

    _anywidget_id = identity("nbdist.card")
    _esm = script("buttons.js", "card.js")
    _css = style("common.css")
    peeked = traitlets.Unicode("").tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, rref: RRef[Any]) -> None:
        self.home = rref.holder
        self._known = weakref.ref(rref)
        self._facts = references.facts_of(rref)
        layout, style = looks()
        super().__init__(value=cards.card(self._facts), layout=layout, style=style)
        self._end = rref.when_changed(self.changed)
        self._gone = weakref.finalize(rref, _queue_card, weakref.ref(self))
        self._gone.atexit = False
        if references.facts_of(rref) != self._facts:  # news came before `when_changed` was set up
            self.changed()

    def picture(self) -> Bundle:
        """Return the card's content as text and HTML."""
        return {"text/plain": cards.text(self._facts), "text/html": cards.card(self._facts) + self.peeked}

    def publish(self) -> None:
        """Show the facts that are known about the reference now. If they can never change again, become a picture.

        The thread that publishes all views calls this after a change. Does nothing if the card is a picture already.
        """
        if not self.live:  # late news of a card that is a picture already
            return
        rref = self._known()
        self._tell(references.facts_of(rref) if rref is not None else references.over(self._facts))
        if rref is None or self._facts.standing in references.FINAL_STANDINGS:
            self.freeze()

    def _tell(self, facts: cards.Facts) -> None:
        self._facts = facts
        self.value = cards.card(facts)

    def press(self, message: dict[str, Any]) -> None:
        """Peek at the value and show the result, or release the reference.

        ``message["press"]`` is "peek" or "release"; anything else is ignored. A thread of its own calls this. Raises
        LookupError if the reference is gone, and otherwise what `RRef.peek` and `RRef.release` raise.
        """
        rref = self._known()
        if rref is None:
            raise LookupError(
                "the reference is gone, because no variable holds it any more: show another reference to the value"
            )
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
        """Become a picture: unsubscribe from news, and close the widget.

        The card stays on the page as it is, and gets no more news.
        """
        self._end()
        self._gone.detach()
        LIVE.drop(self)
        self.live = False
        self.close()

    def leave(self) -> None:
        """Show that the reference's cluster has ended, and close the widget; the card stays on the page as a picture.

        Called before the cluster ends.
        """
        rref = self._known()
        self._tell(references.over(references.facts_of(rref) if rref is not None else self._facts, "ended"))
        self.freeze()


def _queue_card(known: weakref.ref[RRefCard]) -> None:
    """Queue the card for publishing, because its reference was collected.

    Runs in a finaliser, so it must not take locks or publish by itself.
    """
    card = known()
    if card is not None:
        card.changed()


LIVE = LiveViews(MOST)
"""The cards that are live."""
_lock = threading.RLock()
_by_rref: weakref.WeakKeyDictionary[RRef[Any], weakref.ref[RRefCard]] = weakref.WeakKeyDictionary()
_looks: list[ipywidgets.Widget] = []


def card_of(rref: RRef[Any]) -> RRefCard:
    """Return the live card of a reference; make one if there is none, or if the last has become a picture."""
    with _lock:
        known = _by_rref.get(rref)
        found = known() if known is not None else None
        if found is None or found.comm is None:
            found = RRefCard(rref)
            _by_rref[rref] = weakref.ref(found)
    LIVE.keep(found)
    return found


def looks() -> list[ipywidgets.Widget]:
    """Return the two widgets, layout and style, that all cards and tables of references share; new ones if closed."""
    if not _looks or any(look.comm is None for look in _looks):
        _looks[:] = ipywidgets.Layout(), html_style()
    return _looks
