"""The messages of errors of the views that no other test provokes, without a page."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from nbdist.errors import UsageError
from nbdist.testing import World
from nbdist.views.passes.watching import Watcher
from nbdist.views.widgets.backward import BackwardView
from nbdist.views.widgets.card import RRefCard
from nbdist.views.widgets.map import MapView
from nbdist.views.widgets.panel import PanelView

SWARM = SimpleNamespace(ended=False, snapshot=lambda: {"servers": [{"name": "worker0"}]})
PANEL = SimpleNamespace(cluster=SimpleNamespace(names=["worker0"]))
NO_BUTTON = r"there is no button 'fly': the page is of another version of nbdist; run the cell again"


@pytest.mark.parametrize(
    ("view", "now", "message", "error", "text"),
    [
        (
            MapView,
            {"_swarm": lambda: None},
            {"press": "kill"},
            UsageError,
            r"this swarm is over: it has no workers that",
        ),
        (MapView, {"_swarm": lambda: SWARM}, {"press": "fly"}, UsageError, NO_BUTTON),
        (
            MapView,
            {"_swarm": lambda: SWARM},
            {"press": "kill", "worker": "worker9"},
            UsageError,
            r"there is no 'worker9': the swarm has no server of that name",
        ),
        (
            PanelView,
            {"_panel": PANEL},
            {"press": "restart", "worker": "worker9"},
            UsageError,
            r"there is no 'worker9': the cluster has no worker of that name",
        ),
        (PanelView, {"_panel": PANEL}, {"press": "fly", "worker": "worker0"}, UsageError, NO_BUTTON),
        (BackwardView, {"_watcher": None}, {"press": "fly"}, UsageError, NO_BUTTON),
        (
            RRefCard,
            {"_known": lambda: None},
            {"press": "peek"},
            LookupError,
            r"the reference is gone, because no variable holds",
        ),
    ],
)
def test_presses_that_are_refused(view, now, message, error, text):
    with pytest.raises(error, match=text):
        view.press(SimpleNamespace(**now), message)


def test_waiting_for_a_watched_cell():
    gate = threading.Event()
    with World(1) as world, world[0].activate():
        watcher = Watcher()
        with pytest.raises(UsageError, match=r"this cell does not run in the background, so there is nothing to wait"):
            watcher.wait()
        with pytest.raises(UsageError, match=r"there has been no backward pass to trace: call this after one has"):
            watcher.trace()
        with pytest.raises(UsageError, match=r"no backward pass is under way, and the cell that asks would have to"):
            watcher.step()
        watcher.run()
        watcher.begin(gate.wait)
        with pytest.raises(TimeoutError, match=r"the watched cell has not ended in time"):
            watcher.wait(0.01)
        gate.set()
        watcher.wait()
