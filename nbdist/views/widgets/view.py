"""The base class of all live views: publishes a snapshot to the page, and lets buttons act while a cell runs.

::

    any thread ── changed() ──> queue ──> _Painter's thread ── publish(): snapshot ──> the page, which draws it
                                                            └─ save(): pictures, every `_SAVE_EVERY` seconds
    the page ── a button ──> receive() ──> a thread for each press ── press()
             ── "is anybody there?" ──> receive() ── a confirmation ──> the page: without it, a line instead of buttons

A view is data and a drawing. The data, one JSON value, is made again after a change, about ten times a second at most.
The drawing is a JavaScript module in `static`, which the page runs. Every press has a thread of its own. So a view does
not block the kernel, and does not wait for it or for an earlier press.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from nbdist.cluster.jupyter.versions import handle_where_sent
from nbdist.cluster.output.sinks import Sink
from nbdist.errors import UsageError
from nbdist.views.shown import Bundle, Shown

# A token bucket for snapshots: `_STEADY` a second, and after a pause `_BURST` at once. So there are ten a second at
# most, and the first one comes without delay.
_STEADY, _BURST = 8, 2
_ROUND_SECONDS = 0.02  # between two rounds of the painter, which publishes changes in quick succession together
_SAVE_EVERY = 5.0  # seconds between two pictures of a view that changes; a saved notebook has the last of them
_PICTURES_UPDATED = 16  # places of one view whose pictures are kept up to date; older places keep what they have
_LOOKING_SECONDS = 10.0  # after these, a view counts as not looked at, unless the page reports it again

STATIC = Path(__file__).parent.parent / "static"
_IMPORT = re.compile(r'^import .* from "\./.*";\n', re.MULTILINE)
_BUNDLED = re.compile(r'^import \* as (\w+) from "\./(dagre)\.js";\n', re.MULTILINE)
_WIDGET = "application/vnd.jupyter.widget-view+json"
_log = logging.getLogger("nbdist.views")


def script(*names: str) -> Any:
    """Return a trait with JavaScript modules of the folder ``static`` joined into one text, for a widget's ``_esm``."""
    # In the order of ``names``: a module comes after the modules that it imports.
    # Without the imports: a page cannot import the modules from anywhere.
    text = "\n".join(_IMPORT.sub("", _BUNDLED.sub(_bundled, _read(name))) for name in names)
    return traitlets.Unicode(text).tag(sync=True)


def identity(name: str) -> Any:
    """Return a trait, for ``_anywidget_id``, with the name by which a page keeps the styles of kinds of views apart."""
    return traitlets.Unicode(name).tag(sync=True)


def _bundled(found: re.Match[str]) -> str:
    """Return a statement that loads a third party's module from the text itself, in place of the import ``found``."""
    # As a module of its own, so that its names do not clash with ours.
    source = json.dumps(_read(f"{found[2]}.js"))
    return (
        f'const {found[1]} = await import(URL.createObjectURL(new Blob([{source}], {{ type: "text/javascript" }})));\n'
    )


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def style(*names: str) -> Any:
    """Return a trait with style sheets of the folder ``static`` joined into one text, for a widget's ``_css``."""
    return traitlets.Unicode("\n".join(map(_read, names))).tag(sync=True)


class View(anywidget.AnyWidget):
    """A live view: a widget whose page draws one snapshot. Subclasses define `look` and `press`.

    The painter's thread calls `look`, `publish` and `save`; it logs an error, and publishes the other views.
    """

    snapshot = traitlets.Dict().tag(sync=True)  # the JSON value that the page draws
    notice = traitlets.Unicode("").tag(sync=True)  # the error of the button that was pressed last
    mark = traitlets.Unicode().tag(sync=True)  # a CSS class that only this view's element in the page has: see `Shown`

    _until = 0.0  # the time of `time.monotonic` until which the view counts as looked at
    _saved_at = 0.0  # the time of `time.monotonic` at which the pictures were last drawn

    def __init__(self, **traits: Any) -> None:
        _painter.start()
        self._places: deque[Shown] = deque(maxlen=_PICTURES_UPDATED)
        super().__init__(mark=f"nbdist-{uuid.uuid4().hex}", **traits)
        self.on_msg(_receive)

    def add_traits(self, **traits: Any) -> None:
        """Add only the traits that the class lacks."""
        # anywidget adds its traits to each widget, and every addition makes a new class. Our classes have them already.
        if missing := {name: trait for name, trait in traits.items() if not self.has_trait(name)}:
            super().add_traits(**missing)

    def open(self) -> None:
        """Connect the widget with the page; let ipykernel handle the page's messages in the thread they are sent to."""
        super().open()
        handle_where_sent(self.comm)

    # -- the picture --------------------------------------------------------------------------

    def show(self, sink: Sink, picture: Callable[[], Bundle]) -> None:
        """Show the view in ``sink``, a cell's output, and behind it the picture, which stays after `close`."""
        # In Colab the metadata names the program that draws widgets, and the page draws none without it.
        live, metadata = self._repr_mimebundle_() or ({}, {})
        # The painter's thread calls ``picture`` again and again.
        place = Shown(sink, self.mark, picture)
        place.show({kind: data for kind, data in live.items() if kind == _WIDGET}, metadata)
        self._places.append(place)

    def save(self) -> None:
        """Draw the pictures of this view again, below each of the last `_PICTURES_UPDATED` cells that show it."""
        self._saved_at = time.monotonic()
        for place in list(self._places):
            place.update()

    @property
    def save_due(self) -> float:
        """The time (of `time.monotonic`) from which the pictures may be drawn again."""
        return self._saved_at + _SAVE_EVERY

    def close(self) -> None:
        """Draw the pictures for the last time, and remove the widget from the page. The pictures stay."""
        places, self._places = self._places, deque()
        for place in places:
            place.end()
        super().close()

    def leave(self) -> None:
        """Close the view, because its cluster is about to end."""
        self.close()

    # -- the snapshot -------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Return the data, of values that JSON can hold, that the page should draw now."""
        raise NotImplementedError

    def changed(self) -> None:
        """Queue the view for the painter, once for several calls. Any thread and any finaliser may call this."""
        _painter.add(self)

    @property
    def looking(self) -> bool:
        """True if the page has reported in the last `_LOOKING_SECONDS` seconds that somebody looks."""
        return self.comm is not None and time.monotonic() < self._until

    def looked(self) -> None:
        """Note that the page has reported that somebody looks. A visible page reports this again and again."""
        self._until = time.monotonic() + _LOOKING_SECONDS

    def publish(self) -> None:
        """Send the data that `look` returns to the page."""
        self.snapshot = self.look()

    # -- buttons ------------------------------------------------------------------------------

    def press(self, message: dict[str, Any]) -> None:
        """Act on a button, "press" in the page's message, in a thread of its own. The page shows what this raises."""

    def receive(self, message: dict[str, Any]) -> None:
        """Confirm a message of the page, and let a new thread call `press` with it; do not wait for that."""
        if "number" in message:  # "looking" has none
            self.send({"received": message["number"]})
        if "press" not in message:  # it asks whether messages arrive: each page sends it first
            return
        threading.Thread(target=_press, args=(self, message), name="pressed", daemon=True).start()


def unknown_button(what: object) -> UsageError:
    """Return the error to raise in `View.press` for a button that the view does not have."""
    return UsageError(f"there is no button {what!r}: the page is of another version of nbdist; run the cell again")


def queuing(view: View) -> Callable[..., None]:
    """Return a function that queues a view for publishing and does not keep it alive; it ignores its arguments."""
    # It may be the callback of a weak reference, so it takes no locks, and publishes nothing itself.
    return partial(_queue, weakref.ref(view))


def _queue(known: weakref.ref[View], *_: object) -> None:
    if (view := known()) is not None:
        view.changed()


def _receive(view: View, message: Any, _: Any) -> None:
    if isinstance(message, dict):
        view.receive(message)


def _press(view: View, message: dict[str, Any]) -> None:
    """Call the view's `press`, and store its error as text in `notice`, which the page shows."""
    try:
        if "number" in message:  # a message without a number, such as "looking", is no press of a button
            view.notice = ""
        view.press(message)
    except Exception as error:  # whatever the button's work raises, the page shows it
        view.notice = f"{type(error).__name__}: {error}"


class _Painter:
    """The thread that publishes all views that have changed. Views are only queued, so that finalisers may add them."""

    def __init__(self) -> None:
        self._changed: queue.SimpleQueue[weakref.ref[View]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Start the thread, if it is not running; every new view calls this."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="views", daemon=True).start()

    def add(self, view: View) -> None:
        """Queue a view for publishing; does not keep it alive. Any thread and any finaliser may call this."""
        known = weakref.ref(view)
        hash(known)  # now, because a weak reference can compute its hash only as long as the view is alive
        self._changed.put(known)

    def _run(self) -> None:
        """Publish changed views, about ten times a second at most, and draw their pictures when due; never returns."""
        left, at = float(_BURST), time.monotonic()
        # The views that have changed since their pictures were drawn, and the time from which each may be drawn.
        stale: dict[weakref.ref[View], float] = {}
        while True:
            try:
                due = min(stale.values(), default=None)
                changed = {self._changed.get(timeout=None if due is None else max(0.0, due - time.monotonic()))}
            except queue.Empty:
                changed = set()
            now = time.monotonic()
            left, at = min(_BURST, left + (now - at) * _STEADY), now
            if left < 1:
                time.sleep((1 - left) / _STEADY)
                left, at = 1.0, time.monotonic()
            left -= 1
            while not self._changed.empty():  # what changed during the sleep goes with it
                changed.add(self._changed.get())
            for known in changed:
                if (view := known()) is not None:
                    _safely(view.publish)
                    stale[known] = view.save_due
                del view  # or this thread would keep the last view alive while it waits
            for known in [known for known, due in stale.items() if due <= time.monotonic()]:
                del stale[known]
                if (view := known()) is not None:
                    _safely(view.save)
                del view
            time.sleep(_ROUND_SECONDS)


def _safely(draw: Callable[[], None]) -> None:
    try:
        draw()
    except Exception:  # of any view: the thread must draw the others
        _log.exception("a view could not be drawn")


_painter = _Painter()
