"""The messages of errors of the views that no other test provokes, without a page."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
from helpers.simulated.swarm_double import Swarm, server

from nbdist import rpc
from nbdist.errors import UsageError
from nbdist.testing import World
from nbdist.views.passes.watching import Watcher
from nbdist.views.widgets.backward import BackwardView
from nbdist.views.widgets.card import RRefCard
from nbdist.views.widgets.map import MapView
from nbdist.views.widgets.panel import PanelView

NO_BUTTON = r"there is no button 'fly': the page is of another version of nbdist; run the cell again"


def map_view(*, ended=False):
    swarm = Swarm(servers=[server("worker0", (0, 30))], ended=ended)
    return MapView(swarm), swarm  # the view refers to the swarm weakly


def panel_view():
    return PanelView(SimpleNamespace(cluster=SimpleNamespace(names=["worker0"]), snapshot=dict)), None


def backward_view():
    return BackwardView(Watcher()), None


def card_of_nothing():
    card = RRefCard(rpc.remote("worker0", abs, args=(-1,)))
    gc.collect()
    return card, None


@pytest.mark.parametrize(
    ("make", "message", "error", "text"),
    [
        (lambda: map_view(ended=True), {"press": "kill"}, UsageError, r"this swarm is over: it has no workers that"),
        (map_view, {"press": "fly"}, UsageError, NO_BUTTON),
        (
            map_view,
            {"press": "kill", "worker": "worker9"},
            UsageError,
            r"there is no 'worker9': the swarm has no server of that name",
        ),
        (
            panel_view,
            {"press": "restart", "worker": "worker9"},
            UsageError,
            r"there is no 'worker9': the cluster has no worker of that name",
        ),
        (panel_view, {"press": "fly", "worker": "worker0"}, UsageError, NO_BUTTON),
        (backward_view, {"press": "fly"}, UsageError, NO_BUTTON),
        (card_of_nothing, {"press": "peek"}, LookupError, r"the reference is gone, because no variable holds"),
    ],
)
def test_presses_that_are_refused(make, message, error, text):
    with World(1) as world, world[0].activate():
        view, _held = make()
        with pytest.raises(error, match=text):
            view.press(message)
        view.close()


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
