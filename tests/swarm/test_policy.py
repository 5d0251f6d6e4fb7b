"""The arguments of `serve` that concern its own process."""

import inspect
from dataclasses import fields

import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.swarm.policy import Policy


def test_serve_has_an_argument_for_each_field():
    """The signature is written out for mypy and Shift-Tab; what is passed on is read from the fields."""
    given = inspect.signature(nbdist.swarm.serve).parameters
    for each in fields(Policy):
        assert given[each.name].annotation == each.type
        if each.name != "spend":
            assert given[each.name].default == each.default
        assert f"\n        {each.name}: " in str(nbdist.swarm.serve.__doc__)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"chunk": 0}, "chunk must be a whole number of at least 1"),
        ({"micro_batch": 1.5}, "micro_batch must be a whole number"),
        ({"recover": "soon"}, "exact"),
        ({"step_timeout": 0}, "step_timeout must be more than 0 s"),
        ({"cache_timeout": -1}, "cache_timeout must be 0 s or more"),
        ({"route_timeout": float("nan")}, "route_timeout"),
    ],
)
def test_what_cannot_be_is_refused(wrong, says):
    with pytest.raises(UsageError, match=says):
        Policy.of({**vars(Policy()), **wrong})
