"""The base class of live views of references; and a limit for each kind: the view shown longest ago becomes a picture.

Such a view holds facts and weak references, so it keeps no reference alive. It changes when news of a reference arrives
for other reasons.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import ipywidgets
import traitlets

from nbdist.cluster.jupyter.versions import html_style
from nbdist.rpc.references.rref import RRef
from nbdist.views import references
from nbdist.views.cards import Facts, Rows
from nbdist.views.widgets.view import View, queuing


class LiveViews:
    """Keeps the live views of one kind, ``most`` at most, in the order in which they were last shown. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._views: OrderedDict[int, LiveReferences] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, view: LiveReferences) -> None:
        """Keep a view as the one shown last; turn the views shown longest ago into pictures if there are too many."""
        with self._lock:
            self._views[id(view)] = view
            self._views.move_to_end(id(view))
            surplus = list(self._views.values())[: max(0, len(self._views) - self._most)]
        for old in surplus:  # without the lock: `freeze` publishes
            old.freeze()

    def drop(self, view: LiveReferences) -> None:
        """Forget a view; does nothing if it is not kept."""
        with self._lock:
            self._views.pop(id(view), None)

    def leave(self, home: int) -> None:
        """Turn all views of one agent, given by its incarnation, into pictures that say that its cluster has ended."""
        with self._lock:
            own = [view for view in self._views.values() if view.home == home]
        for view in own:
            view.leave()


class LiveReferences(View, ipywidgets.HTML):  # type: ignore[misc]  # ipywidgets has no annotations
    """A live view of references. Subclasses define `kept` and `draw`."""

    kept: LiveViews  # of this kind
    live = traitlets.Bool(True)

    def __init__(self, rows: Rows[RRef[Any]]) -> None:
        gone = queuing(self)
        self.home = rows.items[0][1].holder  # the incarnation of the references' agent
        self._known: Rows[weakref.ref[RRef[Any]]] = rows.each(lambda rref: weakref.ref(rref, gone))
        self._facts: Rows[Facts] = rows.each(references.facts_of)
        if not _looks or any(look.comm is None for look in _looks):
            _looks[:] = ipywidgets.Layout(), html_style()
        layout, style = _looks
        super().__init__(value=self.draw(self._facts), layout=layout, style=style)
        self._ends = [rref.when_changed(self.changed) for _, rref in rows.items]
        if rows.each(references.facts_of) != self._facts:  # news came before `when_changed` was set up
            self.changed()

    def draw(self, facts: Rows[Facts]) -> str:
        """Return these facts about the references as HTML."""
        raise NotImplementedError

    def publish(self) -> None:
        """Show the facts that are known about the references now. If they can never change again, become a picture."""
        if not self.live:  # late news of a view that is a picture already
            return
        self._tell("released")
        if all(facts.standing in references.FINAL_STANDINGS for _, facts in self._facts.items):
            self.freeze()

    def _tell(self, standing: str, *, ended: bool = False) -> None:
        """Update the view; references that were collected get the ``standing``, and with ``ended`` all others, too."""
        items = []
        for (name, known), (_, before) in zip(self._known.items, self._facts.items, strict=True):
            rref = known()
            now = references.facts_of(rref) if rref is not None else before
            items.append((name, references.over(now, standing) if rref is None or ended else now))
        self._facts = Rows(self._facts.kind, items, self._facts.count)
        self.value = self.draw(self._facts)

    def freeze(self) -> None:
        """Become a picture: unsubscribe from news, and close the widget, which stays on the page as it is."""
        for end in self._ends:
            end()
        self.kept.drop(self)
        self.live = False
        self.close()

    def leave(self) -> None:
        """Show that the references' cluster has ended, and become a picture. Called before the cluster ends."""
        self._tell("ended", ended=True)
        self.freeze()


_looks: list[ipywidgets.Widget] = []  # the layout and the style that all these views share, made anew if closed
