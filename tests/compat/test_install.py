"""What install() replaces, and what the private names do that it brings."""

import pytest

WORLD = """
import gc, time
import torch
import nbdist.compat
nbdist.compat.install()
import torch.distributed.rpc as rpc
from nbdist.testing import World

def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        gc.collect()
        time.sleep(0.01)
"""


def alone(tmp_path):
    """Code that starts RPC in a world of one."""
    options = f"rpc.TensorPipeRpcBackendOptions(init_method='file://{tmp_path}/store')"
    return WORLD + f"rpc.init_rpc('me', rank=0, world_size=1, rpc_backend_options={options})\n"


def test_the_modules_are_replaced_wherever_they_are_reached(lines):
    code = """
    import torch, sys
    import torch.distributed.rpc as before
    from torch.distributed.rpc import RRef, rpc_sync
    from torch.distributed.rpc import api
    torchs = set(map(id, (before, RRef, rpc_sync, api)))
    import nbdist.compat, nbdist.rpc
    print(nbdist.compat.is_installed())
    nbdist.compat.install()
    nbdist.compat.install()
    print(nbdist.compat.is_installed())
    import torch.distributed.rpc as rpc
    from torch.distributed.rpc.internal import _internal_rpc_pickler
    import torch.distributed.rpc.backend_registry
    assert rpc is torch.distributed.rpc is sys.modules["torch.distributed.rpc"] is before
    assert rpc.RRef is nbdist.rpc.RRef is RRef is torch.nn.parallel.distributed.RRef
    assert rpc_sync is rpc.rpc_sync and api is rpc.api
    assert not torchs & set(map(id, (rpc, RRef, rpc_sync, api)))
    assert type(_internal_rpc_pickler).__module__.startswith("nbdist.")
    ours = [m for name, m in sys.modules.items() if name.startswith("torch.distributed.rpc")]
    assert len(ours) == 8 and all(m.__name__.startswith("nbdist.") for m in ours)
    assert rpc.is_available() and rpc.BackendType.TENSORPIPE and repr(rpc.BackendType.TENSORPIPE)
    """
    assert lines(code) == ["False", "True"]


def test_what_is_not_rpc_stays_torchs(lines):
    code = """
    import torch, torch.distributed.optim
    before = dict(vars(torch.distributed))
    import nbdist.compat
    nbdist.compat.install()
    after = vars(torch.distributed)
    print(sorted(name for name in before if after[name] is not before[name]))
    print(torch.distributed.optim.DistributedOptimizer.__module__)
    """
    assert lines(code) == ["['autograd', 'rpc']", "nbdist.optim.optimizer"]


@pytest.mark.parametrize("registered", ["before", "after"])
def test_reducers_that_were_registered_with_torchs_pickler_are_used(lines, tmp_path, registered):
    """`import torch.distributed.nn` registers one for RemoteModule; a program may keep torch's pickler as a global."""
    register = "pickler._register_reducer(Odd, lambda odd: (int, ('5',)))"
    before, after = (register, "") if registered == "before" else ("", register)
    code = f"""
    import operator, torch, torch.distributed.nn
    from torch.distributed.rpc.internal import _internal_rpc_pickler as pickler

    class Odd:
        def __reduce__(self):
            raise RuntimeError("not this way")

    {before}
    import nbdist.compat
    nbdist.compat.install()
    {after}
    import torch.distributed.rpc as rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    module = torch.distributed.nn.RemoteModule("me", torch.nn.Linear, args=(2, 3))
    print(rpc.rpc_sync("me", list, args=([Odd()],)))
    forward = operator.methodcaller("forward", torch.ones(1, 2))
    print(rpc.rpc_sync("me", forward, args=(module,)).shape)
    del module
    rpc.shutdown()
    """
    assert lines(code) == ["[5]", "torch.Size([1, 3])"]


def test_a_wish_to_hear_of_leaks_that_came_before_is_heard(lines):
    code = """
    import torch
    import torch.distributed.rpc as rpc
    rpc.api._ignore_rref_leak = False
    import nbdist.compat
    nbdist.compat.install()
    print(torch.distributed.rpc.api._ignore_rref_leak, rpc.api._ignore_rref_leak)
    """
    assert lines(code) == ["False False"]


def test_autograd_is_nbdists_and_says_that_rpc_does_not_run(lines):
    code = """
    import torch, nbdist.compat
    nbdist.compat.install()
    import torch.distributed.autograd as dist_autograd
    print(dist_autograd.backward.__module__)
    for use in (lambda: dist_autograd.context().__enter__(), lambda: dist_autograd.backward(0, [torch.ones(1)]),
                lambda: dist_autograd.get_gradients(0)):
        try:
            use()
        except RuntimeError as error:
            print(type(error).__name__)
    """
    assert lines(code) == ["nbdist.autograd.api", "NotInitialized", "UsageError", "NotInitialized"]


def test_it_is_refused_while_torchs_own_rpc_runs(lines, tmp_path):
    code = f"""
    import torch, nbdist.compat
    import torch.distributed.rpc as rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store", _transports=["uv"])
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        nbdist.compat.install()
    except RuntimeError as error:
        print(error)
    assert torch.distributed.rpc is rpc and rpc.__name__ == "torch.distributed.rpc"
    rpc.shutdown()
    """
    (line,) = (line for line in lines(code) if "before init_rpc" in line)  # torch prints lines of its own, with paths
    assert "nbdist" in line


def test_errors_of_called_functions_are_printed_where_they_arose(lines, tmp_path):
    code = (
        alone(tmp_path)
        + """
import contextlib, io
heard = io.StringIO()
with contextlib.redirect_stderr(heard):
    try:
        rpc.rpc_sync("me", divmod, args=(1, 0))
    except ZeroDivisionError:
        print("raised")
print("ZeroDivisionError" in heard.getvalue(), "On me" in heard.getvalue())
rpc.shutdown()
"""
    )
    assert lines(code) == ["raised", "True True"]


def test_the_words_of_torch_in_errors(lines, tmp_path):
    code = (
        alone(tmp_path)
        + """
def told(use):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, str(error).split(":")[0])
told(lambda: rpc.get_worker_info("nobody"))
told(lambda: rpc.init_rpc("me", backend="TENSORPIPE", rank=0, world_size=1))
told(lambda: rpc.init_rpc("me", rank=0, world_size=1))
told(lambda: rpc.TensorPipeRpcBackendOptions(rpc_timeout="soon"))
told(lambda: rpc.enable_gil_profiling(True))
rpc.shutdown()
told(lambda: rpc.rpc_sync("me", abs, args=(1,)))
"""
    )
    assert lines(code) == [
        "UnknownWorker could not find destination name nobody",
        "TypeError Argument backend must be a member of BackendType",
        "UsageError RPC is already initialized",
        "TypeError incompatible constructor arguments",
        "UsageError nbdist does not measure how long calls wait for the interpreter's lock",
        "NotInitialized RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.",
    ]


@pytest.mark.parametrize(("owner", "sender", "receiver"), [(0, 0, 1), (0, 1, 2), (0, 1, 0), (0, 0, 0), (0, 1, 1)])
def test_a_serialized_reference_keeps_the_value_until_its_copy_is_gone(lines, owner, sender, receiver):
    code = (
        WORLD
        + f"""
owner, sender, receiver = {owner}, {sender}, {receiver}
with World(3) as world:
    with world[sender].activate():
        rref = rpc.remote(f"worker{{owner}}", torch.add, args=(torch.ones(2), 1))
        rref.to_here()
        data = rref._serialize()
        del rref
    time.sleep(0.3)
    with world[receiver].activate():
        copy = rpc.PyRRef._deserialize(data)
        print(copy.to_here().tolist(), copy.is_owner())
        until(copy.confirmed_by_owner)
        del copy
    until(lambda: not world[owner].references.forks.forks and not len(world[owner].references._values))
    until(lambda: not any(agent.references.forks.users for agent in world))
"""
    )
    assert lines(code) == [f"[2.0, 2.0] {owner == receiver}"]


def test_a_reference_that_was_never_let_go_is_a_leak(lines, tmp_path):
    code = (
        alone(tmp_path)
        + """
rpc.api._ignore_rref_leak = False
import pickle
rref = rpc.RRef(1)
pickle.dumps(rref._serialize())
try:
    rpc.shutdown()
except RuntimeError as error:
    print(str(error).split("Globally")[0])
"""
    )
    assert lines(code) == ["Leaking RRef "]


def test_gathering_ends_when_a_member_is_lost(lines):
    code = (
        WORLD
        + """
import threading
from nbdist.compat import gathering
from torch.distributed.rpc.api import _all_gather
with World(2) as world:
    def gather():
        with world[0].activate():
            try:
                _all_gather(1)
            except RuntimeError as error:
                print(type(error).__name__, "worker1" in str(error))
    waiting = threading.Thread(target=gather)
    waiting.start()
    while not gathering._rounds:
        time.sleep(0.01)
    world[1].close("has had enough")
    waiting.join(10)
"""
    )
    assert lines(code) == ["WorkerLost True"]


def test_a_backend_of_the_programs_own_can_be_registered_but_not_used(lines, tmp_path):
    code = (
        WORLD
        + f"""
from unittest import mock
registry = rpc.backend_registry
backend = registry.register_backend("other", lambda *_, **__: None, lambda **_: "an agent")
print(backend, registry.BackendType.other is backend, registry.backend_registered("other"))
options = mock.Mock(init_method="file://{tmp_path}/store", rpc_timeout=5)
try:
    rpc.init_rpc("me", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
except RuntimeError as error:
    print("not an agent of nbdist" in str(error))
"""
    )
    assert lines(code) == ["BackendType.other True True", "True"]
