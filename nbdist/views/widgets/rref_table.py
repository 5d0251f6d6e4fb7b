"""The live table of a list, tuple or dict of references: a row changes when news of its reference arrives.

The table holds facts and weak references, so it keeps no reference alive. It asks the owners for nothing.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import ipywidgets
import traitlets

from nbdist.rpc.references.rref import RRef
from nbdist.views import cards, references
from nbdist.views.cards import Facts, Rows
from nbdist.views.shown import Bundle
from nbdist.views.widgets.card import looks
from nbdist.views.widgets.live import LiveViews
from nbdist.views.widgets.view import View, identity, script, style

__all__ = ["LIVE", "MOST", "RRefTable"]

MOST = 16
"""The most live tables; if there are more, the table shown longest ago becomes a picture."""
LIVE = LiveViews(MOST)
"""The tables that are live."""


class RRefTable(View, ipywidgets.HTML):  # type: ignore[misc]  # ipywidgets has no annotations
    """The live table of several references."""

    _anywidget_id = identity("nbdist.references")
    _esm = script("buttons.js", "table.js")
    _css = style("common.css")
    live = traitlets.Bool(True)

    def __init__(self, value: references.Many) -> None:
        rows = references.rows_of(value)
        gone = partial(_queue_table, weakref.ref(self))
        self.home = rows.items[0][1].holder
        self._known: Rows[weakref.ref[RRef[Any]]] = rows.each(lambda rref: weakref.ref(rref, gone))
        self._facts: Rows[Facts] = rows.each(references.facts_of)
        layout, look = looks()
        super().__init__(value=cards.table(self._facts), layout=layout, style=look)
        self._ends = [rref.when_changed(self.changed) for _, rref in rows.items]
        if rows.each(references.facts_of) != self._facts:  # news came before `when_changed` was set up
            self.changed()

    def picture(self) -> Bundle:
        """Return the table's content as text and HTML."""
        return references.bundle_of_rows(self._facts)

    def publish(self) -> None:
        """Show the facts that are known about the references now. If they can never change again, become a picture.

        The thread that publishes all views calls this after a change. Does nothing if the table is a picture already.
        """
        if not self.live:  # late news of a table that is a picture already
            return
        self._tell("released")
        if all(facts.standing in references.FINAL_STANDINGS for _, facts in self._facts.items):
            self.freeze()

    def _tell(self, standing: str, *, ended: bool = False) -> None:
        """Update the table with the facts that are known about each reference now.

        References that were garbage-collected get the ``standing``, "released" or "ended". With ``ended``, all others
        get it, too, unless they have failed, were lost or were released.
        """
        items = []
        for (name, known), (_, before) in zip(self._known.items, self._facts.items, strict=True):
            rref = known()
            now = references.facts_of(rref) if rref is not None else before
            items.append((name, references.over(now, standing) if rref is None or ended else now))
        self._facts = Rows(self._facts.kind, items, self._facts.count)
        self.value = cards.table(self._facts)

    def freeze(self) -> None:
        """Become a picture: unsubscribe from news, and close the widget.

        The table stays on the page as it is, and gets no more news.
        """
        for end in self._ends:
            end()
        LIVE.drop(self)
        self.live = False
        self.close()

    def leave(self) -> None:
        """Show that the references' cluster has ended, and close the widget; the table stays on the page as a picture.

        Called before the cluster ends.
        """
        self._tell("ended", ended=True)
        self.freeze()


def _queue_table(known: weakref.ref[RRefTable], _: object) -> None:
    """Queue the table for publishing, because one of its references was collected.

    Runs in a finaliser, so it must not take locks or publish by itself.
    """
    table = known()
    if table is not None:
        table.changed()
