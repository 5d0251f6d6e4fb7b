"""The messages of errors of a swarm that no other test provokes, without servers."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import SimpleNamespace

import pytest
import swarm_models
from torch import nn

from nbdist import swarm
from nbdist.errors import UsageError
from nbdist.swarm import adapter, named_models
from nbdist.swarm.client.routing import NoRoute
from nbdist.swarm.client.servers import Gone, Servers
from nbdist.swarm.client.session import Session
from nbdist.swarm.policy import check_recover
from nbdist.swarm.server.server import NotHere, Server
from nbdist.testing import World

GONE = SimpleNamespace(name="worker1", incarnation=1, there=False, state="gone")


class Flat(nn.Module):
    """A model that has three layers, but no list of them."""

    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_hidden_layers=3))


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: check_recover("soon"), r"recover must be \"exact\" or \"fast\", not 'soon'"),
        (lambda: adapter.find_layers(Flat()), r"a swarm cannot serve Flat: it has no nn.ModuleList of its 3 layers"),
        (
            lambda: adapter.write_checkpoint(nn.Linear(1, 1), None),
            r"a swarm serves a transformers model, a folder with one, or a name, not a Linear",
        ),
        (
            lambda: adapter.RecordedCache([], 1),
            r"a swarm keeps its caches on the workers, where they grow, so it needs a DynamicCache or none, not a list",
        ),
        (
            lambda: named_models.folder_of("gpt9"),
            r"there is no folder 'gpt9', and no model of that name; known names: ",
        ),
        (
            lambda: Servers.kill(SimpleNamespace(_agent=SimpleNamespace(member=lambda _: None)), GONE),
            r"worker1 is gone already",
        ),
        (
            lambda: Servers.relieve(SimpleNamespace(_arranging=threading.Lock(), _changed=threading.Lock()), GONE),
            r"worker1 is gone, so it cannot leave now",
        ),
    ],
)
def test_what_is_refused(use, text):
    with pytest.raises(UsageError, match=text):
        use()


def test_a_model_whose_package_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"the model smollm2 comes with a package that is not installed\. Run: pip"):
        named_models._make_smollm2(None)


def test_a_block_that_has_moved():
    with pytest.raises(NotHere, match=r"this server does not have block 3, only \[0, 1\]: the swarm has moved it"):
        Server._block(SimpleNamespace(_blocks={0: nn.Identity(), 1: nn.Identity()}), 3)


def test_a_session_that_is_computing_cannot_move():
    session = SimpleNamespace(changed=threading.Condition(), busy=True)
    with pytest.raises(TimeoutError, match=r"session s1 is still computing a step, so its caches cannot be moved now"):
        Server.export(SimpleNamespace(_find=lambda *_: session), "s1", 0, 0, 1, 0.01)


def test_more_spans_than_workers():
    refused = pytest.raises(UsageError, match=r"2 spans need 2 workers, but `workers` has only 1")
    with World(1) as world, world[0].activate(), refused:
        swarm.serve(swarm_models.make("llama"), workers=["worker0"], spans=[(0, 3), (3, 6)])


def fail(*_):
    raise Gone("worker1 did not answer")


class Part:
    """A part of a route on a worker that answers nothing."""

    member = SimpleNamespace(name="worker1", has=fail)
    span = None


@pytest.mark.parametrize(
    ("use", "now", "text"),
    [
        (
            lambda session: session._step_with_spares(session, SimpleNamespace(hidden=None)),
            {"_number": 0, "_part_for_span": lambda *_: None, "_replace": lambda _: None},
            r"\d+ servers failed one after the other in one step, the last: worker1 did not answer",
        ),
        (
            lambda session: session._open_on_a_route(session, 0, 6),
            {"_crew": SimpleNamespace(way=lambda *_: [], abandon=lambda *_: None), "_open": fail, "id": "s1"},
            r"on every route through blocks 0 to 5 a server failed while the session was opened",
        ),
        (
            lambda session: session._replace(session, 0),
            {"_journal": SimpleNamespace(news=lambda: None), "_move_caches": fail},
            r"no server could take over the session from worker1: each one failed while it was given",
        ),
    ],
)
def test_servers_that_fail_one_after_the_other(use, now, text):
    methods = {
        "_step_with_spares": Session._step_with_spares,
        "_open_on_a_route": Session._open_on_a_route,
        "_replace": Session._replace,
    }
    with pytest.raises(NoRoute, match=text):
        use(SimpleNamespace(**{**methods, "_parts": [Part()], **now}))


def test_transformers_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("adapter_alone", adapter.__file__)
    with pytest.raises(ImportError, match=r'nbdist.swarm needs transformers: pip install "nbdist\[swarm\]"'):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
