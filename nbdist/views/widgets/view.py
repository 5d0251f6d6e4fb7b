"""What all live views share: a snapshot that is published, and buttons that act though a cell is busy.

A view is data and a drawing. The data, one JSON value, is made anew when something has changed, by a thread of its own
and ten times a second at most; the drawing is a module in `static`, which the page runs. A press of a button comes as a
message, and whoever receives it leaves it to a thread of its own: so a view can neither hold up the kernel nor be held
up by it, nor by an earlier press that still waits for something.
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
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from nbdist.cluster.sinks import Sink
from nbdist.views.shown import Bundle, Shown

__all__ = ["View", "identity", "script", "style"]

_STEADY, _BURST = 8, 2
"""So many snapshots a second, and so many more at once after a while without: ten a second at most, the first soon."""
_GAP = 0.02
_SAVE_EVERY = 5.0
"""Seconds between two pictures of a view that changes: a notebook is saved with the last of them."""
_PICTURES = 16
"""So many places of one view have a picture that keeps up with it; those before keep the one that they have."""
_LOOKING = 10.0
"""Seconds after which nobody looks any more, unless the page has said so again."""

STATIC = Path(__file__).parent.parent / "static"
_IMPORT = re.compile(r'^import .* from "\./.*";\n', re.MULTILINE)
_BUNDLED = re.compile(r'^import \* as (\w+) from "\./(dagre)\.js";\n', re.MULTILINE)
_WIDGET = "application/vnd.jupyter.widget-view+json"
_log = logging.getLogger("nbdist.views")


def script(*names: str) -> Any:
    """Modules of `static` as one, each after those that it imports: a page has no place to import them from."""
    text = "\n".join(_IMPORT.sub("", _BUNDLED.sub(_bundled, _read(name))) for name in names)
    return traitlets.Unicode(text).tag(sync=True)


def identity(name: str) -> Any:
    """By which a page tells the styles of one kind of view from those of another."""
    return traitlets.Unicode(name).tag(sync=True)


def _bundled(found: re.Match[str]) -> str:
    """A module of others, whose names are not to meet ours: it stays one of its own."""
    source = json.dumps(_read(f"{found[2]}.js"))
    return (
        f'const {found[1]} = await import(URL.createObjectURL(new Blob([{source}], {{ type: "text/javascript" }})));\n'
    )


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def style(*names: str) -> Any:
    """The styles of a view."""
    return traitlets.Unicode("\n".join(map(_read, names))).tag(sync=True)


class View(anywidget.AnyWidget):
    """A widget of one snapshot."""

    snapshot = traitlets.Dict().tag(sync=True)
    notice = traitlets.Unicode("").tag(sync=True)
    """What went wrong when a button was pressed last."""
    mark = traitlets.Unicode().tag(sync=True)
    """A class of the view's element in the page, by which a page finds it: see `Shown`."""

    _until = 0.0
    _saved_at = 0.0

    def __init__(self, **traits: Any) -> None:
        _painter.start()
        self._places: deque[Shown] = deque(maxlen=_PICTURES)
        super().__init__(mark=f"nbdist-{uuid.uuid4().hex}", **traits)
        self.on_msg(_receive)

    def add_traits(self, **traits: Any) -> None:
        """Those that the class lacks: anywidget adds some to each widget, which makes a class for each."""
        missing = {name: trait for name, trait in traits.items() if not self.has_trait(name)}
        if missing:
            super().add_traits(**missing)

    def open(self) -> None:
        """Open the comm; what comes over it is for the thread to which the page sends it, busy or not."""
        super().open()
        # ipykernel from 7.4 on hands a message to the thread that published last, which may be the one that is busy.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = _where_it_was_sent

    # -- the picture --------------------------------------------------------------------------

    def show(self, sink: Sink, picture: Callable[[], Bundle]) -> None:
        """Show the view below a cell, and the picture that stays there when the view is gone."""
        found = self._repr_mimebundle_()
        place = Shown(sink, self.mark, picture)
        place.show({kind: data for kind, data in found[0].items() if kind == _WIDGET} if found is not None else {})
        self._places.append(place)

    def save(self) -> None:
        """Have all pictures show what is known now."""
        self._saved_at = time.monotonic()
        for place in list(self._places):
            place.update()

    @property
    def save_due(self) -> float:
        """The time from which on the pictures may be drawn anew (of `time.monotonic`)."""
        return self._saved_at + _SAVE_EVERY

    def close(self) -> None:
        """Leave the pictures, as they are now, and be gone from the page."""
        places, self._places = self._places, deque()
        for place in places:
            place.end()
        super().close()

    def leave(self) -> None:
        """Close: the cluster that the view is about is to end."""
        self.close()

    # -- the snapshot -------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """What is to be drawn now."""
        raise NotImplementedError

    def changed(self) -> None:
        """There is news: have it published soon. To be called by any thread."""
        _painter.add(self)

    @property
    def looking(self) -> bool:
        """Whether somebody looks, in a page that says so."""
        return self.comm is not None and time.monotonic() < self._until

    def looked(self) -> None:
        """The page has said so."""
        self._until = time.monotonic() + _LOOKING

    def publish(self) -> None:
        """Publish the snapshot."""
        self.snapshot = self.look()

    # -- buttons ------------------------------------------------------------------------------

    def press(self, message: dict[str, Any]) -> None:
        """A button was pressed; called by a thread of the view's own."""

    def receive(self, message: dict[str, Any]) -> None:
        """A message of the page's: say that it has come, and leave it to another thread."""
        if "number" in message:
            self.send({"received": message["number"]})
        threading.Thread(target=_act, args=(self, message), name="pressed", daemon=True).start()


def _receive(view: View, message: Any, _: Any) -> None:
    if isinstance(message, dict):
        view.receive(message)


def _act(view: View, message: dict[str, Any]) -> None:
    try:
        if "number" in message:  # else nobody has pressed a button
            view.notice = ""
        view.press(message)
    except Exception as error:
        view.notice = f"{type(error).__name__}: {error}"


def _where_it_was_sent(_: Any, default: Any) -> Any:
    return default


class _Painter:
    """The thread that publishes what has changed. What is told to it is only queued, so that a finaliser may do it."""

    def __init__(self) -> None:
        self._changed: queue.SimpleQueue[weakref.ref[View]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Be there; for each view that is made."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="views", daemon=True).start()

    def add(self, view: View) -> None:
        """Publish this one."""
        known = weakref.ref(view)
        hash(known)  # now: it has none when the view is gone, unless it was asked for before
        self._changed.put(known)

    def _run(self) -> None:
        left, at = float(_BURST), time.monotonic()
        stale: dict[weakref.ref[View], float] = {}
        """The views whose pictures are older than they are, and when each may be drawn."""
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
            while not self._changed.empty():
                changed.add(self._changed.get())
            for known in changed:
                view = known()
                if view is not None:
                    _safely(view.publish)
                    stale[known] = view.save_due
                del view
            for known in [known for known, due in stale.items() if due <= time.monotonic()]:
                del stale[known]
                view = known()
                if view is not None:
                    _safely(view.save)
                del view
            time.sleep(_GAP)


def _safely(draw: Callable[[], None]) -> None:
    try:
        draw()
    except Exception:
        _log.exception("a view could not be drawn")


_painter = _Painter()
