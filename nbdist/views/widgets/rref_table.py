"""The live table of a list, tuple or dict of references: a row changes when news of its reference arrives."""

from __future__ import annotations

from nbdist.views import cards, references
from nbdist.views.cards import Facts, Rows
from nbdist.views.shown import Bundle
from nbdist.views.widgets.live import LiveReferences, LiveViews
from nbdist.views.widgets.view import identity, script, style

LIVE = LiveViews(16)  # if there are more, the table shown longest ago becomes a picture


class RRefTable(LiveReferences):
    """The live table of several references."""

    _anywidget_id = identity("nbdist.references")
    _esm = script("buttons.js", "table.js")
    _css = style("common.css")
    kept = LIVE

    def draw(self, facts: Rows[Facts]) -> str:
        """Return the table as HTML."""
        return cards.table(facts)

    def picture(self) -> Bundle:
        """Return the table's content as text and HTML."""
        return references.bundle_of_rows(self._facts)
