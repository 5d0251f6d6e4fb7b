"""`nbdist.torch_private` lists each private name of torch that nbdist uses, and the installed torch has them."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.rpc
from torch.autograd import Function

import nbdist
from nbdist import rpc, testing, torch_private
from nbdist.torch_private import ATTRIBUTES, FUNCTIONS, REQUIRED, SYMBOLS, torch_library

PACKAGE = Path(nbdist.__file__).parent
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

OTHERS = {
    # Private names of the standard library, cloudpickle and Jupyter's packages, by the expression in the code.
    "_signal",
    "_thread",
    "agent.exchange.lock._at_fork_reinit",
    "atexit._run_exitfuncs",
    "app.kernel._shutdown_message",
    "cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID",
    "cloudpickle._dynamic_class_reduce",
    "cloudpickle._class_setstate",
    "cloudpickle._extract_code_globals",
    "cloudpickle._make_skeleton_class",
    "comm._reply_subshell_for",
    "linecache._ipython_cache",
    "lock._is_owned",
    "ran._asdict",
    "ray.experimental.internal_kv._internal_kv_get",
    "os._exit",
    "threading._shutdown",
    "kernel.shell.display_pub._hooks",
    "self._actions",
    "self._dynamic_function_reduce",
    "self._shell._nbdist",
    "shell._nbdist",
    "source._parent_header",
    "stream._exc",
    "stream._io_loop",
    "stream._fid",
    "stream._original_stdstream_copy",
    "stream._should_watch",
    "stream._watch_pipe_fd",
    "subprocess._args_from_interpreter_flags",
    "sys._current_frames",
    "sys._getframe",
    "thread.manager._shell_socket",
}


def modules():
    """Yield the file and the syntax tree of every module of the package but `torch_private`."""
    for file in PACKAGE.rglob("*.py"):
        if file.name != "torch_private.py":
            yield file, ast.parse(file.read_text())


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def own_names():
    """The private names that the package itself defines."""
    found = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.asname or "")
    return found


def private_names(tree):
    """Yield each private name of somebody else that a module reaches for, and the expression in which it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own_names():
            yield node.attr, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nbdist"):
            for alias in node.names:
                if is_private(alias.name):
                    yield alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_private(alias.name.rpartition(".")[2]):
                    yield alias.name, alias.name


def test_no_other_module_uses_a_private_function_of_torch():
    for file, tree in modules():
        for _, expression in private_names(tree):
            assert not expression.startswith("torch._"), f"{file} uses {expression}: take it from torch_private"


def test_every_private_attribute_of_others_is_listed():
    used = set()
    for file, tree in modules():
        for name, expression in private_names(tree):
            if expression in OTHERS:
                continue
            assert name in ATTRIBUTES, f"{file} uses {expression}, which torch_private.ATTRIBUTES does not list"
            used.add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
                used.add(node.value)  # for getattr, or for the beginning of a name
    assert used == set(ATTRIBUTES), "listed, but nobody uses it"


def test_private_functions_are_listed_where_they_are_taken():
    text = (PACKAGE / "torch_private.py").read_text()
    tree = ast.parse(text)
    found = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_find"
    }
    rules = {"torch._dynamo.trace_rules.SKIP_DIRS", "torch._dynamo.trace_rules.add"}  # without importing them
    assert found | rules | {"torch._C._distributed_rpc"} == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_this_torch_has_the_function(name):
    since = {"torch._utils._get_sparse_tensors_to_validate": (2, 15), "torch._C._remove_obj_from_tls": (2, 13)}.get(
        name, (0, 0)
    )
    until = {"torch._utils._sparse_tensors_to_validate": (2, 14)}.get(name, (99, 0))
    if not since <= RELEASE <= until:
        pytest.skip(f"torch {torch.__version__} does not have it: {FUNCTIONS[name]}")
    found = torch
    for part in name.split(".")[1:]:
        assert hasattr(found, part), f"torch {torch.__version__} has no {name}: {FUNCTIONS[name]}"
        found = getattr(found, part)


@pytest.mark.parametrize("name", SYMBOLS)
def test_this_torchs_library_has_the_symbol_and_a_module_uses_it(name):
    assert torch_library()[name]
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "torch_private.py"]
    assert any(f'"{name}"' in file.read_text() for file in files), "listed, but nobody uses it"


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def objects():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # takes a second

    leaf = torch.ones(2, requires_grad=True)
    made = Twice.apply(leaf)
    custom = made.grad_fn
    return {
        "a node": [leaf.exp().grad_fn, custom, torch.autograd.graph.get_gradient_edge(leaf).node],
        "a node, as the beginning of a name": [leaf.exp().grad_fn],
        "a node of a user's Function": [custom],
        "a Function": [Twice],
        "a tensor": [leaf],
        "": [made],  # before torch 2.13 a user's node lives as long as the tensor that it made
        "a storage": [leaf.untyped_storage()],
        "a module": [torch.nn.Linear(1, 1)],
        "a state of a module": [torch.nn.Linear(1, 1).state_dict()],
        "a process group": [torch.distributed.ProcessGroup],
        "a backend": [torch.distributed.ProcessGroupGloo],
        "the options of a backend": [torch.distributed.ProcessGroupGloo._Options],
        "a backend of NCCL": [getattr(torch.distributed, "ProcessGroupNCCL", SimpleNamespace(_is_initialized=None))],
        "a group of parameters of FSDP2": [SimpleNamespace(**dict.fromkeys(FSDPParamGroup.__init__.__code__.co_names))],
        "a torch.futures.Future": [torch.futures.Future()],
        "the pickler of torch's RPC": [torch.distributed.rpc.internal._internal_rpc_pickler],
    }


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_objects_of_this_torch_have_the_attribute(name):
    whose, otherwise = ATTRIBUTES[name]
    all_objects = objects()
    for found in all_objects[whose]:
        if whose.endswith("of a name"):
            has = any(attribute.startswith(name) for attribute in dir(found))
        else:
            has = hasattr(found, name)
        assert has, f"torch {torch.__version__}: {found} has no {name}; {otherwise}"


def test_a_missing_name_is_an_error_that_says_what_to_install(monkeypatch):
    missing = torch_private._find("torch._C._no_such_name")
    with pytest.raises(
        nbdist.UsageError, match=r"torch 2\.\d+.* has no torch\._C\._no_such_name.*: install torch 2\.\d+"
    ):
        missing(1, 2)
    assert FUNCTIONS["torch._C._stash_obj_in_tls"] == REQUIRED


def test_a_newer_torch_gives_one_warning(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git1")
    monkeypatch.setattr(torch_private, "_warned", False)
    with pytest.warns(
        UserWarning, match=r"tested with torch up to 2\.\d+, and this is 2\.99\.0a0.*pip install 'torch<2"
    ):
        torch_private.warn_of_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.warn_of_untested()


@pytest.mark.parametrize("version", ["2.10.0", "2.15.1+cpu", "2.15.0a0"])
def test_a_torch_that_was_tested_gives_none(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.warn_of_untested()


def test_a_cluster_warns_in_the_notebook_and_in_no_worker():
    code = (
        "import torch; torch.__version__ = '2.99.0'\n"
        "import nbdist\n"
        "with nbdist.Cluster(2, backend='none') as cluster:\n"
        "    cluster.execute('print(\"ready\")')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("tested with torch up to") == 1


def test_sparse_tensors_arrive_and_torch_keeps_none_of_them():
    sparse = torch.eye(3).to_sparse()
    with testing.World(2) as world, world[0].activate():
        for _ in range(3):
            assert rpc.rpc_sync("worker1", torch.Tensor.to_dense, args=(sparse,)).tolist() == torch.eye(3).tolist()
            with torch.sparse.check_sparse_tensor_invariants():
                rpc.rpc_sync("worker1", torch.add, args=(sparse, sparse))
    assert not torch_private._loaded_here()


@pytest.mark.parametrize("cuda", [False, True])
def test_values_of_threads_where_torch_cannot_forget_them(monkeypatch, cuda):
    """Before torch 2.13; with CUDA torch knows them too, for the engine's threads."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    values = torch_private.ValuesOfThreads()
    key = f"nbdist.test.{cuda}"
    assert not values.has(key)
    value = object()
    references = sys.getrefcount(value)
    values.keep(key, value)
    assert values.value(key) is value
    assert torch._C._is_key_in_tls(key) == cuda
    assert torch_private.ValuesOfThreads().value(key) is (value if cuda else None)  # as a thread for a device sees it
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(values.has(key)))
    thread.start()
    thread.join()
    assert elsewhere == [False]
    values.take(key)
    assert not values.has(key)
    assert values.value(key) is None
    assert sys.getrefcount(value) == references
