"""Registers with IPython how references, passes, panels and swarms show themselves as values of cells.

In a notebook that a user may be watching, they are live views, each with a picture behind it for the saved notebook
(`Shown`). Where nobody watches (nbval, nbconvert), they are pictures only. Pictures of references are drawn after a
short wait for news that is under way, so that the output is the same each time. On a terminal they are text.

IPython tries a type's ``_live…`` function first. The function raises NotImplementedError if a live view is not
possible; then IPython uses the type's ``_show…`` function, which returns a picture.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from nbdist.autograd.watching.watcher import Watch
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.output.sinks import PlainSink, Sink, current_sink
from nbdist.rpc.references.rref import RRef
from nbdist.views import cards
from nbdist.views import map as swarm_map
from nbdist.views.passes import report
from nbdist.views.passes.watching import Watcher
from nbdist.views.references import FINAL_STANDINGS, are_references, bundle, bundle_of_rows, facts_of, rows_of
from nbdist.views.shown import Bundle
from nbdist.views.workers.panel import Panel

if TYPE_CHECKING:
    from nbdist.swarm.swarm import Swarm

_VALUE_SECONDS = 1.0  # to wait for news of the values of all references in one picture
_HOW = '.step(3), .run(), .run(until="nan"), .pause(), .wait()'  # the methods of a `Watcher`
_VIEWS_LIVE = 8  # of passes, panels and swarms; older ones become pictures
_SWARM = "nbdist.swarm.swarm.Swarm"  # the type's name, because importing the type needs transformers
_before: list[tuple[Any, type | str, Any]] = []  # what `register` replaced: formatter, type, printer or None
_views: deque[Any] = deque()  # of passes, panels and swarms, the oldest first
_parting: weakref.WeakSet[Cluster] = weakref.WeakSet()  # clusters that will call `_leave_pictures`


def register(shell: Any) -> None:
    """Let an IPython shell show nbdist's objects, and lists, tuples and dicts of references, in nbdist's way."""
    bundles = shell.display_formatter.mimebundle_formatter
    # A live view and its picture are two outputs, and a mimebundle is one: so `_live` and its like show by themselves.
    selves = shell.display_formatter.ipython_display_formatter
    printers: dict[type | str, tuple[Any, Any]] = {
        RRef: (_show, _live),
        Watcher: (_show_pass, _live_pass),
        Watch: (_show_pass, _live_pass),
        Panel: (_show_panel, _live_panel),
        _SWARM: (_show_swarm, _live_swarm),
        **dict.fromkeys((list, tuple, dict), (_show_many, _live_many)),
    }
    _before[:] = [
        (formatter, kind, formatter.for_type(kind, printer))
        for kind, both in printers.items()
        for formatter, printer in zip((bundles, selves), both, strict=True)
    ]
    if getattr(shell, "kernel", None) is not None:  # a terminal shows repr(rref), with all that is known
        texts = shell.display_formatter.formatters["text/plain"]
        _before.append((texts, RRef, texts.for_type(RRef, _print)))
    # Imported in advance, which takes a tenth of a second, so that the first reference is shown within a millisecond.
    threading.Thread(target=_prepare, name="views", daemon=True).start()


def unregister(shell: Any) -> None:
    """Restore the printers that the shell had before `register`. Harmless if nothing is registered."""
    for formatter, kind, before in _before:
        if before is None:
            formatter.pop(kind, None)
        else:
            formatter.for_type(kind, before)
    _before.clear()


def _prepare() -> None:
    from nbdist.views.widgets import backward, card, map, panel, rref_table  # noqa: F401


def _print(rref: RRef[Any], printer: Any, _: bool) -> None:
    printer.text(cards.text(facts_of(rref)))


# -- pictures -------------------------------------------------------------------------------------


def _show(rref: RRef[Any]) -> Bundle:
    _await([rref])
    return bundle(rref)


def _show_many(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Any:
    if type(value) not in (list, tuple, dict):  # a subclass of the user's, which may show itself in its own way
        own = getattr(value, "_repr_mimebundle_", None)
        return own(include=None, exclude=None) if own is not None else None
    if not are_references(value):
        return None
    if not current_sink().interactive:  # where nobody watches, the output is the same each time
        _await(list(value.values() if isinstance(value, dict) else value))
    return bundle_of_rows(rows_of(value).each(facts_of))


def _show_pass(handle: Watcher | Watch) -> Bundle:
    watcher = _watcher_of(handle)
    if watcher.shown:  # the view is above: `%%watch` has displayed it before the cell ran
        return {"text/plain": f"<the pass above; {_HOW}>"}
    return _picture_of_pass(watcher, handle)


def _picture_of_pass(watcher: Watcher, handle: Watcher | Watch) -> Bundle:
    found = watcher.backward
    told = report.as_html(found, watcher.told(), watcher.others()) if found is not None else escape(watcher.told())
    return {"text/plain": repr(handle), "text/html": told}


def _show_panel(panel: Panel) -> Bundle:
    return {"text/plain": repr(panel), "text/html": panel._repr_html_()}


def _show_swarm(swarm: Swarm) -> Bundle:
    return {"text/plain": repr(swarm), "text/html": swarm_map.as_html(swarm_map.snapshot_of(swarm), lasting=True)}


def _watcher_of(handle: Watcher | Watch) -> Watcher:
    if isinstance(handle, Watcher):
        return handle
    handle.view = found = handle.view or Watcher.of(handle)
    return found


# -- live views -----------------------------------------------------------------------------------


def _sink() -> Sink:
    """Return the place for the running cell's output; raise NotImplementedError if nobody can see a live view there."""
    sink = current_sink()
    if not sink.interactive or isinstance(sink, PlainSink):
        raise NotImplementedError
    return sink


def _live(rref: RRef[Any]) -> None:
    sink = _sink()
    if facts_of(rref).standing in FINAL_STANDINGS:  # such a reference never changes: a picture is enough
        raise NotImplementedError
    from nbdist.views.widgets.card import card_of

    card = card_of(rref)
    card.show(sink, card.picture)
    _part_with_cluster()


def _live_many(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> None:
    if type(value) not in (list, tuple, dict):  # a subclass of the user's, which may show itself in its own way
        if (own := getattr(type(value), "_ipython_display_", None)) is None:
            raise NotImplementedError
        own(value)
        return
    if not are_references(value):
        raise NotImplementedError
    sink = _sink()
    rrefs = value.values() if isinstance(value, dict) else value
    if all(facts_of(rref).standing in FINAL_STANDINGS for rref in rrefs):
        raise NotImplementedError
    from nbdist.views.widgets.rref_table import LIVE, RRefTable

    table = RRefTable(rows_of(value))
    LIVE.keep(table)
    table.show(sink, table.picture)
    _part_with_cluster()


def _live_pass(handle: Watcher | Watch) -> None:
    """Show the live view of a pass, which is the same at each display until it becomes a picture."""
    watcher = _watcher_of(handle)
    if watcher.shown:
        raise NotImplementedError
    sink = _sink()
    from nbdist.views.widgets.backward import BackwardView

    if watcher.view is None or watcher.view.comm is None:  # no comm: it is a picture
        watcher.view = _keep(BackwardView(watcher))
    watcher.view.show(sink, partial(_picture_of_pass, watcher, handle))


def _live_panel(panel: Panel) -> None:
    sink = _sink()
    from nbdist.views.widgets.panel import PanelView

    _keep(PanelView(panel)).show(sink, partial(_show_panel, panel))


def _live_swarm(swarm: Swarm) -> None:
    sink = _sink()
    if swarm.ended:
        raise NotImplementedError
    from nbdist.views.widgets.map import MapView

    view, text = _keep(MapView(swarm)), repr(swarm)
    view.show(sink, lambda: {"text/plain": text, "text/html": swarm_map.as_html(view.look())})


def _keep(view: Any) -> Any:
    """Keep a view live until `_VIEWS_LIVE` newer ones are kept, or the cluster is shut down. Returns the view."""
    _views.append(view)
    while len(_views) > _VIEWS_LIVE:
        _views.popleft().close()  # it leaves its picture
    _part_with_cluster()
    return view


def _part_with_cluster() -> None:
    """Make the current cluster, if there is one, call `_leave_pictures` before it shuts down."""
    if (cluster := Cluster.current) is not None and cluster not in _parting:
        _parting.add(cluster)
        # Weak, or the cluster would refer to itself.
        cluster.farewells.append(partial(_leave_pictures, weakref.ref(cluster)))


def _leave_pictures(known: weakref.ref[Cluster]) -> None:
    """Turn all live views into pictures, because the cluster ``known``, which they show, is about to end."""
    from nbdist.views.widgets import card, rref_table

    while _views:
        _views.popleft().leave()
    if (cluster := known()) is not None:
        _parting.discard(cluster)
        for live in (card.LIVE, rref_table.LIVE):
            live.leave(cluster.agent.me.incarnation)


def _await(rrefs: Sequence[RRef[Any]]) -> None:
    """Wait until the values of these references are known, for `_VALUE_SECONDS` at most in all."""
    deadline = time.monotonic() + _VALUE_SECONDS
    for rref in rrefs:
        if rref.is_owner():
            continue
        known = threading.Event()
        end = rref.when_changed(partial(_look, rref, known))
        try:
            _look(rref, known)  # after `when_changed`, or news between the two would be missed
            known.wait(max(0.0, deadline - time.monotonic()))
        finally:
            end()


def _look(rref: RRef[Any], known: threading.Event) -> None:
    """Set the event ``known`` if the reference's value is known, or will never be."""
    if rref.state is not None or rref.standing not in ("pending", "confirmed"):
        known.set()
