"""The messages of errors of a swarm that no other test provokes, without servers."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.models import swarm_models
from torch import nn

from nbdist import swarm
from nbdist.errors import UsageError
from nbdist.swarm import adapter, connect, model_cache, named_models
from nbdist.swarm.client.crew import Gone
from nbdist.swarm.client.session import Session
from nbdist.swarm.directory.routing import NoRoute, Span
from nbdist.swarm.placer import Placer
from nbdist.swarm.policy import check_recover
from nbdist.swarm.server.server import Server
from nbdist.swarm.server.session_caches import StepReply
from nbdist.testing import World

GONE = SimpleNamespace(name="worker1", incarnation=1, there=False, state="gone")
ALL_GONE = SimpleNamespace(working=contextlib.nullcontext, member=lambda _: GONE)


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
            lambda: model_cache.RecordedCache([], 1),
            r"a swarm keeps its caches on the workers, where they grow, so it needs a DynamicCache or none, not a list",
        ),
        (
            lambda: named_models.folder_of("gpt9"),
            r"there is no folder 'gpt9', and no model of that name; known names: ",
        ),
        (lambda: connect("file:///nowhere/members#worker0#swarm 1.1"), r"has ended, or runs on another host"),
        (lambda: connect("tcp://127.0.0.1:1#worker0#swarm 1.1"), r"this swarm's workers are on several hosts"),
        (
            lambda: Placer.kill(
                SimpleNamespace(crew=ALL_GONE, _agent=SimpleNamespace(member=lambda _: None)), "worker1"
            ),
            r"worker1 is gone already",
        ),
        (
            lambda: Placer.relieve(SimpleNamespace(crew=ALL_GONE, _arranging=threading.Lock()), "worker1"),
            r"worker1 is gone, so it cannot leave now",
        ),
    ],
)
def test_what_is_refused(use, text):
    with pytest.raises(UsageError, match=text):
        use()


def test_a_model_whose_package_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"the model smollm2 comes with a package that is not installed\. Run: pip"):
        named_models.folder_of("smollm2")
    assert not list((tmp_path / "nbdist").iterdir())


def test_a_session_that_is_computing_cannot_move():
    session = SimpleNamespace(changed=threading.Condition(), busy=True)
    with pytest.raises(TimeoutError, match=r"session s1 is still computing a step, so its caches cannot be moved now"):
        Server.export(SimpleNamespace(find=lambda *_: session), "s1", 0, 0, 1, 0.01)


def test_more_spans_than_workers():
    refused = pytest.raises(UsageError, match=r"2 spans need 2 workers, but `workers` has only 1")
    with World(1) as world, world[0].activate(), refused:
        swarm.serve(swarm_models.make("llama"), workers=["worker0"], spans=[(0, 3), (3, 6)])


class Crew:
    """Servers of which worker1 opens a session and takes its first step, until a call that is in `failing`."""

    options = SimpleNamespace(cache_bytes=None)
    policy = SimpleNamespace(step_timeout=1.0, cache_timeout=1.0, chunk=None, spend=lambda *_: 0.0)
    incarnation = 1
    working = contextlib.nullcontext

    def __init__(self):
        self.failing = set()
        self.worker1 = SimpleNamespace(name="worker1", there=True, has=lambda *_: True, answered=lambda *_: None)
        self.worker1.is_banned = lambda _: False

    def way(self, begin, end):
        return [(Span("worker1", begin, end), self.worker1)]

    def send(self, member, method, *args, **_):
        return method, args

    def answer(self, member, asked, within=None):
        method, args = asked
        if method in self.failing:
            raise Gone(f"{member.name} did not answer")
        return StepReply(args[3].hidden, 0.0, 0, 1, 1) if method == "step" else None

    def ask(self, member, method, *args, **_):
        return self.answer(member, (method, args))

    def abandon(self, *_):
        pass


@pytest.mark.parametrize(
    ("steps", "failing", "text"),
    [
        (0, {"step"}, r"\d+ servers failed one after the other in one step, the last: worker1 did not answer"),
        (0, {"open"}, r"on every route through blocks 0 to 5 a server failed while the session was opened"),
        (1, {"step"}, r"no server could take over the session from worker1: each one failed while it was given"),
    ],
)
def test_servers_that_fail_one_after_the_other(steps, failing, text):
    crew = Crew()
    journal = SimpleNamespace(stepped=lambda *_: None, news=lambda: None, tell=lambda _: None)
    session = Session(crew, journal, SimpleNamespace(layers=[]), begin=0, end=6, recover="exact", expected=0)
    hidden, calls = torch.ones(1, 2, 3), [adapter.LayerCall((), {})] * 6
    for _ in range(steps):
        session.step(hidden, calls)
    crew.failing = failing
    with pytest.raises(NoRoute, match=text):
        session.step(hidden, calls)


def test_transformers_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("adapter_alone", adapter.__file__)
    with pytest.raises(ImportError, match=r'nbdist.swarm needs transformers: pip install "nbdist\[swarm\]"'):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
