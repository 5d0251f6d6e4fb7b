"""Makes references show themselves where they are the value of a cell; registered with a shell, and taken back.

Who looks at a page sees a live card. Where nobody does (nbval, nbconvert), and on paper, it is a picture: that waits a
moment for what is on its way anyway, so that it is the same each time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

from nbdist.autograd.watching import Watch
from nbdist.cluster.sinks import current_sink
from nbdist.rpc.rref import RRef
from nbdist.views import cards, report
from nbdist.views.map import Mapped
from nbdist.views.map import as_html as map_as_html
from nbdist.views.panel import Panel
from nbdist.views.references import Bundle, bundle, bundle_of_many, facts_of
from nbdist.views.watching import Watcher

__all__ = ["register", "unregister"]

_PATIENCE = 1.0
_HOW = '.step(3), .run(), .run(until="nan"), .pause(), .wait()'
_MOST = 8
"""So many views of passes, panels and swarms are live; older ones are pictures."""
_SWARM = "nbdist.swarm.swarm.Swarm"
"""By name, for its module needs transformers."""
_before: list[tuple[Any, type | str, Any]] = []
"""What showed things before."""
_views: deque[Any] = deque()


def register(shell: Any) -> None:
    """Have a shell show references, and lists and dicts of them."""
    bundles = shell.display_formatter.mimebundle_formatter
    printers: dict[type | str, Any] = {
        RRef: _show,
        Watcher: _show_watched,
        Watch: _show_watch,
        Panel: _show_panel,
        _SWARM: _show_swarm,
        list: _show_many,
        dict: _show_many,
    }
    _before[:] = [(bundles, kind, bundles.for_type(kind, printer)) for kind, printer in printers.items()]
    if getattr(shell, "kernel", None) is not None:  # a terminal shows text only, and as much as is known
        texts = shell.display_formatter.formatters["text/plain"]
        _before.append((texts, RRef, texts.for_type(RRef, _print)))
    # It takes a tenth of a second to import, and the first reference is to be shown in a thousandth.
    threading.Thread(target=_prepare, name="views", daemon=True).start()


def unregister(shell: Any) -> None:
    """Leave them to the shell again."""
    for formatter, kind, before in _before:
        if before is None:
            formatter.pop(kind, None)
        else:
            formatter.for_type(kind, before)
    _before.clear()


def _prepare() -> None:
    import nbdist.views.widgets.backward
    import nbdist.views.widgets.card
    import nbdist.views.widgets.map
    import nbdist.views.widgets.panel  # noqa: F401


def _print(rref: RRef[Any], printer: Any, _: bool) -> None:
    printer.text(cards.text(facts_of(rref)))


def _show(rref: RRef[Any]) -> Bundle:
    if current_sink().interactive:
        return bundle(rref, _live)
    _await([rref])
    return bundle(rref, lambda _: {})


def _show_many(value: list[Any] | dict[Any, Any]) -> Any:
    if type(value) not in (list, dict):  # a class of the user's, which may have its own way
        own = getattr(value, "_repr_mimebundle_", None)
        return own(include=None, exclude=None) if own is not None else None
    items = value.values() if isinstance(value, dict) else value
    if not value or not all(isinstance(item, RRef) for item in items):
        return None
    if not current_sink().interactive:
        _await(list(items))
    return bundle_of_many(value)


def _live(rref: RRef[Any]) -> Bundle:
    from nbdist.views.widgets.card import card_of

    return _widget(card_of(rref))


def _widget(view: Any) -> Bundle:
    """A live view for the page, if it is one still."""
    found = view._repr_mimebundle_()
    return {kind: told for kind, told in found[0].items() if kind != "text/plain"} if found is not None else {}


def _show_watched(watcher: Watcher) -> Bundle:
    """The view; where the value of the cell is the handle on a view that is there already, what can be done with it."""
    if watcher.shown:
        return {"text/plain": f"<the pass above; {_HOW}>"}
    found = watcher.backward
    told = report.as_html(found, watcher.told()) if found is not None else escape(watcher.told())
    shown: Bundle = {"text/plain": repr(watcher), "text/html": told}
    if current_sink().interactive or watcher.view is not None:
        shown |= _view_of(watcher)
    return shown


def _show_watch(watch: Watch) -> Bundle:
    """The same for a watch that is the user's own."""
    if watch.view is None:
        watch.view = Watcher.of(watch)
    return {**_show_watched(watch.view), "text/plain": repr(watch)}


def _view_of(watcher: Watcher) -> Bundle:
    from nbdist.views.widgets.backward import BackwardView

    if watcher.view is None or watcher.view.comm is None:
        watcher.view = _keep(BackwardView(watcher))
    return _widget(watcher.view)


def _show_panel(panel: Panel) -> Bundle:
    shown: Bundle = {"text/plain": repr(panel), "text/html": panel._repr_html_()}
    if current_sink().interactive:
        from nbdist.views.widgets.panel import PanelView

        shown |= _widget(_keep(PanelView(panel)))
    return shown


def _show_swarm(swarm: Mapped) -> Bundle:
    watched = current_sink().interactive
    shown: Bundle = {"text/plain": repr(swarm), "text/html": map_as_html(swarm.snapshot(), lasting=not watched)}
    if watched:
        from nbdist.views.widgets.map import MapView

        shown |= _widget(_keep(MapView(swarm)))
    return shown


def _keep(view: Any) -> Any:
    """A view that is live, until some more have come."""
    _views.append(view)
    while len(_views) > _MOST:
        _views.popleft().close()
    return view


def _await(rrefs: Sequence[RRef[Any]]) -> None:
    """Wait until it is known what they refer to, if that takes no longer than a moment for all of them."""
    deadline = time.monotonic() + _PATIENCE
    for rref in rrefs:
        if rref.is_owner():
            continue
        known = threading.Event()
        end = rref._agent.references.when_changed(rref, partial(_look, rref, known))
        try:
            _look(rref, known)
            known.wait(max(0.0, deadline - time.monotonic()))
        finally:
            end()


def _look(rref: RRef[Any], known: threading.Event) -> None:
    if rref.state is not None or rref._standing() not in ("pending", "confirmed"):
        known.set()
