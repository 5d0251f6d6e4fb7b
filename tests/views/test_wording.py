"""What a timeline calls the work of a worker."""

import re
from types import SimpleNamespace

import pytest
import torch

from nbdist.nn import pipeline_part, remote_module
from nbdist.optim import local, owners
from nbdist.rpc.named import call_method
from nbdist.rpc.world import clocks
from nbdist.testing import World
from nbdist.views.drawing.gantt import KINDS
from nbdist.views.timeline import recording
from nbdist.views.timeline.wording import name_call
from nbdist.wire.pickling.names import display_name


class Balloon:
    def blow(self, breath):
        return breath

    def __call__(self, breath):
        return breath


def users(x):
    return x


@pytest.mark.parametrize(
    ("label", "callee", "told"),
    [
        ("users", users, "users"),
        ("add", torch.add, "add"),
        ("Balloon", Balloon, "Balloon"),
        ("Balloon.blow", Balloon().blow, "Balloon.blow"),
        ("blow", Balloon().blow, "Balloon.blow"),  # called before the caller knew of what class the value is
        ("__call__", Balloon().__call__, "Balloon"),
        ("Tensor.narrow", torch.ones(2).narrow, "Tensor.narrow"),
    ],
)
def test_a_users_function_has_its_own_name(label, callee, told):
    assert name_call(label, callee, ()) == ("call", told)


def test_what_nbdist_calls_is_named_in_words():
    part, optimizer = (SimpleNamespace(state=SimpleNamespace(qualname=of)) for of in ("PipelinePart", "LocalOptimizer"))
    every = [
        (pipeline_part.run_step, (None,), "a worker's share of a pipeline step"),
        (local.call_local, (part, "parameter_rrefs"), "pipeline: parameter rrefs"),
        (local.call_local, (optimizer, "state_dict"), "optimizer: state dict"),
        (local.new_local_optimizer, (torch.optim.SGD,), "make an optimizer (SGD)"),
    ]
    for function, args, told in every:
        assert name_call(display_name(function), function, args) == ("own", told)
    for label, told in (
        ("pipeline.deliver", "a micro-batch arrives"),
        ("server.export", "send a session's caches"),
        ("server.something_new", "serve blocks"),
        ("pushed.receive", "variables arrive"),
        ("keeper.start", "nbdist's own work"),
    ):
        assert name_call(label, call_method, ()) == ("own", told)
    assert name_call("create", remote_module.create, (Balloon,)) == ("call", "RemoteModule(Balloon)")


def test_what_has_no_words_or_other_arguments_than_they_were_made_for_is_nbdists_own_work():
    for function in (pipeline_part.shapes_of, owners.by_owner):
        assert name_call(display_name(function), function, ()) == ("own", "nbdist's own work")
    assert name_call("call_local", local.call_local, ()) == ("own", "nbdist's own work")


def test_what_only_looks_is_not_shown():
    for function in (clocks.clock, recording.begin):
        assert name_call(display_name(function), function, ()) is None
    assert name_call("scout.hold", call_method, ()) is None


def test_no_kind_and_no_words_are_names_of_functions():
    from nbdist.views.timeline import wording

    told = [words for words in [*wording._WORDS.values(), *wording._OF_SERVER.values()] if isinstance(words, str)]
    told += [text for kind in KINDS.values() for text in kind[1:]]
    assert not [words for words in told if re.search(r"_|\w\.\w|\(\)", words)]


def test_the_functions_that_have_words_exist():
    import importlib

    from nbdist.views.timeline import wording

    with World(1):
        for place in wording._WORDS:
            module, _, name = place.partition(":")
            assert callable(getattr(importlib.import_module(f"nbdist.{module}"), name)), place


def test_a_task_of_an_executor_has_the_name_of_its_function():
    from nbdist.cluster.worker import tasks as worker_tasks
    from nbdist.compat.ipyparallel import tasks

    for function, args, told in [
        (users, (1,), "users"),
        (tasks.call, (users, (1,), {}), "users"),
        (tasks.call_each, (users, [(1,)]), "users"),
        (tasks.call, (tasks.Reference("here.f"), (1,), {}), "here.f"),
    ]:
        assert name_call("run", worker_tasks.run, (function, args, {})) == ("call", told)
