"""Makes references show themselves where they are the value of a cell; registered with a shell, and taken back.

Who looks at a page sees a live card. Where nobody does (nbval, nbconvert), and on paper, it is a picture: that waits a
moment for what is on its way anyway, so that it is the same each time.
"""

from __future__ import annotations

import threading
import weakref
from html import escape
from typing import Any

from nbdist.cluster.sinks import current_sink
from nbdist.rpc.rref import RRef
from nbdist.views import cards, report
from nbdist.views.references import Bundle, bundle, bundle_of_many, facts_of
from nbdist.views.watching import Watcher

__all__ = ["register", "unregister"]

_PATIENCE = 1.0
_HOW = '.step(3), .run(), .run(until="nan"), .pause(), .wait()'
_views: weakref.WeakKeyDictionary[Watcher, Any] = weakref.WeakKeyDictionary()


def register(shell: Any) -> None:
    """Have a shell show references, and lists and dicts of them."""
    formatter = shell.display_formatter.mimebundle_formatter
    formatter.for_type(RRef, _show)
    formatter.for_type(Watcher, _show_watched)
    for kind in (list, dict):
        formatter.for_type(kind, _show_many)
    if getattr(shell, "kernel", None) is not None:  # a terminal shows text only, and as much as is known
        shell.display_formatter.formatters["text/plain"].for_type(RRef, _print)
    # It takes a tenth of a second to import, and the first reference is to be shown in a thousandth.
    threading.Thread(target=_prepare, name="views", daemon=True).start()


def unregister(shell: Any) -> None:
    """Leave them to the shell again."""
    formatter = shell.display_formatter.mimebundle_formatter
    for kind in (RRef, Watcher, list, dict):
        formatter.pop(kind, None)
    shell.display_formatter.formatters["text/plain"].pop(RRef, None)


def _prepare() -> None:
    import nbdist.views.widgets.backward
    import nbdist.views.widgets.card  # noqa: F401


def _print(rref: RRef[Any], printer: Any, _: bool) -> None:
    printer.text(cards.text(facts_of(rref)))


def _show(rref: RRef[Any]) -> Bundle:
    if current_sink().interactive:
        return bundle(rref, _live)
    _await(rref)
    return bundle(rref, lambda _: {})


def _show_many(value: list[Any] | dict[Any, Any]) -> Bundle | None:
    if not current_sink().interactive:
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, RRef):
                _await(each)
    return bundle_of_many(value)


def _live(rref: RRef[Any]) -> Bundle:
    from nbdist.views.widgets.card import card_of

    found: Any = card_of(rref)._repr_mimebundle_()
    return {kind: told for kind, told in found[0].items() if kind != "text/plain"}


def _show_watched(watcher: Watcher) -> Bundle:
    """The view; where the value of the cell is the handle on a view that is there already, what can be done with it."""
    if watcher.shown:
        return {"text/plain": f"<the pass above; {_HOW}>"}
    found = watcher.backward
    told = report.as_html(found, watcher.told()) if found is not None else escape(watcher.told())
    shown: Bundle = {"text/plain": repr(watcher), "text/html": told}
    if current_sink().interactive or watcher in _views:
        shown |= _view_of(watcher)
    return shown


def _view_of(watcher: Watcher) -> Bundle:
    from nbdist.views.widgets.backward import BackwardView

    view = _views.get(watcher)
    if view is None:
        view = _views[watcher] = BackwardView(watcher)
    found: Any = view._repr_mimebundle_()
    return {kind: told for kind, told in found[0].items() if kind != "text/plain"}


def _await(rref: RRef[Any]) -> None:
    """Wait until it is known what it refers to, if that takes no longer than a moment."""
    known = threading.Event()

    def look() -> None:
        if rref.state is not None or rref._standing() not in ("pending", "confirmed"):
            known.set()

    if rref.is_owner():
        return
    end = rref._agent.references.when_changed(rref, look)
    try:
        look()
        known.wait(_PATIENCE)
    finally:
        end()
