"""Calls of the program's own functions, which both sides define: by name, with their digests cached."""

import sys
import threading
import types

import pytest
import torch
from helpers.processes import workers
from helpers.processes.mains import CHANGES, FUNCTIONS

import nbdist
from nbdist import rpc
from nbdist.rpc.api import current_agent
from nbdist.wire import codec, quick


@pytest.fixture(scope="module")
def others():
    with workers.world(2) as others:
        yield others


@pytest.fixture
def main(others, monkeypatch):
    """This process's `__main__`, which defines the same functions as worker1's."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    both(main, FUNCTIONS)
    return main


def both(main, source):
    exec(source, main.__dict__)
    there(source)


def there(source):
    rpc.rpc_sync("worker1", workers.define, args=(source,))


def call(function, *args):
    return rpc.rpc_sync("worker1", function, args=args)


@pytest.fixture
def encoded_generally(monkeypatch):
    """The calls for which the usual way was not enough."""
    found, encode = [], codec.encode
    monkeypatch.setattr(codec, "encode", lambda value, **options: found.append(value) or encode(value, **options))
    return found


def warm_up(main, name, encoded_generally):
    """Call a function until both sides have cached what they need for the usual way."""
    function = getattr(main, name)
    assert [call(function, 0) for _ in range(2)] == [1, 1]
    encoded_generally.clear()
    assert call(function, 0) == 1
    assert not encoded_generally or not quick.USUAL_IS_ON


def test_the_second_call_goes_by_name_without_a_pickler(main, encoded_generally):
    tensor = torch.ones(2)
    warm_up(main, "default", encoded_generally)
    assert call(main.default, tensor, 2).tolist() == [3, 3]
    assert rpc.rpc_async("worker1", main.default, args=(4,), kwargs={"y": 5}).wait() == 9
    rref = rpc.remote("worker1", main.default, args=(tensor,))
    assert not encoded_generally or not quick.USUAL_IS_ON
    assert rref.to_here().tolist() == [2, 2]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_here_is_the_new_one_on_the_next_call(main, encoded_generally, change):
    name, source = CHANGES[change]
    warm_up(main, name, encoded_generally)
    exec(source, main.__dict__)
    assert [call(getattr(main, name), 0) for _ in range(3)] == [2, 2, 2]
    assert rpc.rpc_async("worker1", getattr(main, name), args=(0,)).wait() == 2


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_there_does_not_change_what_is_called(main, encoded_generally, change):
    name, source = CHANGES[change]
    new = f"{name}_{list(CHANGES).index(change)}"  # what worker1 has lacked once goes by value from then on
    both(main, FUNCTIONS.replace(name, new))
    name, source = new, source.replace(name, new)
    warm_up(main, name, encoded_generally)
    there(source)
    assert [call(getattr(main, name), 0) for _ in range(3)] == [1, 1, 1]


def test_a_call_that_nobody_waits_for_says_when_the_definition_is_gone(main):
    both(main, "def gone(x): return x + 1")
    assert call(main.gone, 0) == 1
    there("del gone")
    with pytest.raises(nbdist.MissingDefinition, match="worker1 no longer has the definition of gone"):
        rpc.rpc_async("worker1", main.gone, args=(0,)).wait()
    assert rpc.rpc_async("worker1", main.gone, args=(0,)).wait() == 1


def test_what_is_repeated_is_the_value_at_the_call(main):
    both(main, "def twice(x): return x * 2")
    tensor = torch.ones(2)
    assert call(main.twice, tensor).tolist() == [2, 2]
    there("def twice(x): return x * 3")
    assert call(main.twice, tensor).tolist() == [2, 2]


def test_a_call_that_is_repeated_names_the_cell_that_made_it(main):
    both(main, "def moved(x): return x + 1\norigins = []\ndef origins_there(): return origins")
    there(
        "from contextlib import contextmanager\nfrom nbdist.rpc.api import current_agent\n"
        "@contextmanager\ndef note(origin):\n    origins.append(origin)\n    yield\n"
        "current_agent().know_cells(None, note)"
    )
    agent, cell = current_agent(), threading.get_ident()
    agent.know_cells(lambda: "In[3]" if threading.get_ident() == cell else "another", None)
    try:
        assert [call(main.moved, 0) for _ in range(2)] == [1, 1]
        there("del moved")
        assert call(main.moved, 0) == 1  # worker1 has refused it, and another thread has sent it again
        assert set(call(main.origins_there)) == {"In[3]"}
    finally:
        agent.know_cells(None, None)
        there("current_agent().know_cells(None, None)")


def test_an_own_function_that_returns_a_future(main):
    both(
        main,
        "from nbdist import rpc\nimport torch\n"
        "@rpc.functions.async_execution\n"
        "def later(x):\n    future = torch.futures.Future()\n    future.set_result(x + 1)\n    return future",
    )
    assert [call(main.later, 1) for _ in range(3)] == [2, 2, 2]


def test_own_functions_that_this_worker_runs_itself(main):
    assert [rpc.rpc_sync("worker0", main.plain, args=(0,)) for _ in range(3)] == [1, 1, 1]


def test_a_function_that_misses_a_definition_elsewhere_is_not_run_again(main):
    both(
        main,
        "import nbdist\n"
        "from helpers.processes import workers\n"
        "def nested(fails):\n"
        "    number = workers.count('nested')\n"
        "    if fails:\n        raise nbdist.MissingDefinition('elsewhere')\n"
        "    return number",
    )
    assert call(main.nested, False) == 1
    with pytest.raises(nbdist.MissingDefinition, match="elsewhere"):
        call(main.nested, True)
    assert call(main.nested, False) == 3
