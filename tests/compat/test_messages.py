"""The messages of errors of compat that no other test provokes. Nothing here replaces torch's RPC in this process."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nbdist import rpc
from nbdist.compat import gathering, run, substitution, words
from nbdist.compat import rpc as compat_rpc
from nbdist.compat.ipyparallel import client, closed, load_ipython_extension, px
from nbdist.compat.options import TensorPipeRpcBackendOptions
from nbdist.compat.rpc import backend_registry
from nbdist.errors import DecodeError, EncodeError, NotInitialized, RpcTimeout, RRefError, UsageError
from nbdist.testing import World


def unmapped(what):
    error = EncodeError("a tensor is on cuda:0")
    error.unmapped = what
    return error


def lacking(text):
    error = DecodeError("this worker lacks something")
    error.lacks = text
    return error


def raise_error(error):
    raise error


class Engines(list):
    """A client, of which only the number of its engines matters."""

    cluster = SimpleNamespace(spec=SimpleNamespace(may_grow=False))


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (
            lambda: backend_registry.BackendType.TENSORPIPE.value.init_backend_handler(None, "a", 0, 1, 5),
            TypeError,
            r"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not 5",
        ),
        (lambda: backend_registry.backend_of(5), TypeError, r"Could not infer backend for options 5"),
        (
            lambda: backend_registry.register_backend("TENSORPIPE", None, None),
            UsageError,
            r"RPC backend TENSORPIPE: already registered",
        ),
        (
            lambda: compat_rpc.init_rpc("a", rpc_backend_options={}),
            TypeError,
            r"Argument rpc_backend_options must be an instance of RpcBackendOptions",
        ),
        (lambda: compat_rpc.init_rpc(5, rank=0, world_size=1), UsageError, r"Argument name must be a str, not 5"),
        (
            lambda: closed.refuse("Client", "become_dask"),
            AttributeError,
            r"nbdist replaces only a part of ipyparallel: its Client has no 'become_dask': use the library",
        ),
        (
            lambda: client.Client.wait_for_engines(Engines([1, 2]), 4),
            UsageError,
            r"the cluster has 2 workers, and will not have 4: start it with n=4",
        ),
        (lambda: client.Cluster(engines="mpi"), UsageError, r"engines='mpi': nbdist starts workers on this host"),
        (
            lambda: px.Px.pxresult(SimpleNamespace(_last=None), ""),
            UsageError,
            r"%pxresult has no cell to wait for: none was sent with %%px --noblock",
        ),
        (
            lambda: words.refuse_file(io.TextIOWrapper(io.BytesIO())),
            TypeError,
            r"cannot pickle '_io.TextIOWrapper' object",
        ),
        (lambda: words.refuse_call(UsageError("no"), 0.5), ValueError, r"Cannot get WorkerInfo from name 0.5"),
        (
            lambda: words.refuse_worker_info(UsageError("no"), 0.5),
            TypeError,
            r"get_worker_info\(\): incompatible function arguments. Invoked with: 0.5",
        ),
        (
            lambda: raise_error(words.of_lacking(lacking("ModuleNotFoundError: No module named 'm'"), "worker1")),
            RuntimeError,
            r"Error on Node worker1: ModuleNotFoundError: No module named 'm'",
        ),
        (
            lambda: raise_error(
                words.of_lacking(lacking("AttributeError: module 'm' has no attribute 'f'"), "worker1")
            ),
            RuntimeError,
            r"AttributeError: On WorkerInfo\(id=worker1, name=worker1\):\nAttributeError\(\"module 'm' has no",
        ),
        (
            lambda: words.refuse_call(unmapped("argument")),
            RuntimeError,
            r"TensorPipe RPC backend only supports CPU tensors by default.*`set_device_map` on "
            r"`TensorPipeRpcBackendOptions`. Request device mapping is not available: a tensor is on cuda:0",
        ),
        (
            lambda: raise_error(words.of_lacking(unmapped("result"), "worker1")),
            RuntimeError,
            r"Response device mapping is not available: a tensor is on cuda:0",
        ),
        (
            lambda: words.refuse_init(UsageError("Node worker0 has duplicated devices")),
            ValueError,
            r"Node worker0 has duplicated devices",
        ),
        (
            lambda: TensorPipeRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}}).set_device_map(
                "worker1", {"cuda:0": "cuda:0"}
            ),
            ValueError,
            r"`set_device_map` only supports 1-to-1 mapping, trying to map cuda:0 to cuda:0 and cuda:1",
        ),
    ],
)
def test_what_is_refused(use, error, text):
    with pytest.raises(error, match=text):
        use()


def test_torchs_words_for_a_reference_after_the_end():
    with World(2) as world, world[0].activate():
        rref = rpc.remote("worker1", torch.ones, args=(2,))
        rref.to_here()
        rref.release()
        forgotten = SimpleNamespace(id=rref.id, fork_id=rref.fork_id, is_forgotten=lambda: True)
        with pytest.raises(RuntimeError, match=r"has been deleted\. Cannot call to_here\(\) on it after deletion\."):
            words.refuse_rref(RRefError("gone"), "to_here()", forgotten)
        ended = SimpleNamespace(is_forgotten=lambda: False, has_ended=lambda: True, is_owner=lambda: True)
        with pytest.raises(RuntimeError, match=r"Current RPC agent is not set! Did you initialize the RPC framework"):
            words.refuse_rref(NotInitialized("ended"), "to_here()", ended)


def test_all_gather_that_is_called_unequally():
    with World(2) as world, world[0].activate():
        gathering.gather_from_subtree("round 1", "worker1", {"worker1": 3})
        with pytest.raises(RuntimeError, match=r"worker1 has sent its part of round 1 before: all workers must call"):
            gathering.gather_from_subtree("round 1", "worker1", {"worker1": 3})


def test_all_gather_whose_answer_does_not_reach_a_worker():
    with World(2) as world, world[0].activate():
        names = ["worker0", "worker1"]
        with world[1].activate(), pytest.raises(RpcTimeout):
            gathering.all_gather(1, names, 1)  # until then its object is here
        world.kill(1)
        with pytest.raises(
            RpcTimeout, match=r"worker1 timed out in _all_gather after 5.00 seconds; the first error was"
        ):
            gathering.all_gather(0, names, 5)


def test_the_notebook_has_imported_ipyparallel_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipyparallel", ModuleType("ipyparallel"))
    with pytest.raises(UsageError, match=r"the package ipyparallel has been imported in this notebook: restart"):
        load_ipython_extension(None)


def test_px_outside_of_a_notebook(monkeypatch):
    monkeypatch.setattr(px, "get_ipython", lambda: None)
    with pytest.raises(UsageError, match=r"%px needs a notebook, and this program has none; view.execute\(code\)"):
        px.activate()


def test_flags_that_hide_pythonpath(monkeypatch):
    monkeypatch.setattr(sys, "flags", SimpleNamespace(ignore_environment=1, no_site=0))
    with pytest.raises(UsageError, match=r"`python -m nbdist run` needs PYTHONPATH and site: leave out Python's flags"):
        run.run(["program.py"])


def test_torchs_own_rpc_runs(monkeypatch):
    monkeypatch.setattr(substitution, "torch_rpc", lambda: SimpleNamespace(_is_current_rpc_agent_set=lambda: True))
    with pytest.raises(UsageError, match=r"torch's own RPC is running in this process, so nbdist cannot replace it"):
        substitution.install()
