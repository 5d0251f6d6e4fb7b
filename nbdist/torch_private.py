"""Lists every private name of torch that nbdist uses, and what happens if a version of torch lacks it.

torch may change or drop a private name in any release, without notice. So private functions are taken from torch here
and nowhere else. Private attributes of torch's objects are listed here (`ATTRIBUTES`), but read where they are needed,
because many are read for every node of a graph. `tests/test_torch_private.py` compares both tables with the installed
torch, and finds every private name that another module uses without an entry here.

A missing name that its table calls "required" raises UsageError, with the name and both versions, when it is first
used. nbdist has been tested with torch 2.10 to `NEWEST_TESTED`; a newer torch gives one warning (`warn_of_untested`).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import torch

from nbdist.errors import UsageError

NEWEST_TESTED = (2, 15)
"""The newest torch, as (major, minor), with which the whole test suite has passed."""

REQUIRED = "required: its first use raises UsageError"

FUNCTIONS: dict[str, str] = {
    "torch._C._stash_obj_in_tls": REQUIRED,
    "torch._C._get_obj_in_tls": REQUIRED,
    "torch._C._is_key_in_tls": REQUIRED,
    "torch._C._remove_obj_from_tls": "since 2.13; before, a value of a thread is replaced by None",
    "torch._C.DisableTorchFunction": "a view may run the __torch_function__ of a user's class or mode",
    "torch._C._set_grad_enabled": "torch.set_grad_enabled, which is slower, is used",
    "torch._C._len_torch_function_stack": "a thread is taken to be in no function mode, and keeps modes of contexts",
    "torch._C._pop_torch_function_stack": "a context that notes the origins of nodes raises UsageError at its end",
    "torch._C._push_on_torch_function_stack": "a context inside of a function mode may raise UsageError",
    "torch._C._len_torch_dispatch_stack": "a thread is taken to be in no dispatch mode",
    "torch._C._functorch.unwrap_if_dead": "a tensor left over by a torch.func transform may not be sent in a context",
    "torch._C._functorch.peek_interpreter_stack": "a thread is taken to be outside of torch.func transforms",
    "torch._C._current_graph_task_id": 'a context with check="nan" also looks at what a user\'s backward computes',
    "torch._C._DisableTorchDispatch": "dispatch modes see how a tensor is searched for NaN",
    "torch._C._collect_all": "torch.futures.wait_all waits for the rest after the first error of a call",
    "torch._C.Future": "torch.futures.Future, its subclass, is looked for",
    "torch._C._distributed_c10d._dump_fr_trace": "nothing says which worker has not come to a collective",
    "torch._C._distributed_c10d._WorkerServer": "nothing is known of the collectives of a worker that holds the GIL",
    "torch._C._distributed_rpc": "torch was built without RPC, so no agent of torch's can run",
    "torch._lazy_modules": "the first line about a collective takes a second, and 70 MB in each worker",
    "torch._guards.TracingContext.try_get": "torch.compile fails for a module that contains a RemoteModule",
    "torch._utils._get_sparse_tensors_to_validate": "since 2.15; before, torch._utils._sparse_tensors_to_validate",
    "torch._utils._sparse_tensors_to_validate": "until 2.14; where both are missing, torch keeps no such list",
    "torch._utils._validate_loaded_sparse_tensors": "sparse tensors that arrive are not validated",
    "torch._dynamo.trace_rules.SKIP_DIRS": "torch.compile traces nbdist's own code, and a call in compiled code fails",
    "torch._dynamo.trace_rules.add": "torch.compile traces nbdist's own code, and a call in compiled code fails",
    "torch.autograd.Variable._execution_engine": "nbdist.autograd cannot be imported",
    "torch.distributed.distributed_c10d._world": (
        "a worker's death ends the collectives of all process groups, and a group may not form after a failed forming"
    ),
    "torch.distributed.distributed_c10d._register_process_group": "a hang in send or recv is not explained",
    "torch.distributed.distributed_c10d._canonicalize_group_rank": "different roots of a broadcast are not told",
    "torch.distributed.distributed_c10d._warn_not_in_group": "the warning of a foreign group has a line of torch's",
    "torch.distributed.distributed_c10d._set_pg_timeout": (
        "init_process_group(timeout=...) in a cell leaves the timeout of a process group that is there as it is"
    ),
    "torch.utils.data.dataloader._BaseDataLoaderIter": "a timeline shows no loading of data",
    "torch.serialization._get_layout": "a sparse tensor that two threads rebuild first at once may fail",
}
"""The path of each private function, class or list, and what happens if it is missing."""

ATTRIBUTES: dict[str, tuple[str, str]] = {
    "_sequence_nr": ("a node", "recording fails with AttributeError"),
    "_set_sequence_nr": ("a node", "a backward pass over workers fails with AttributeError"),
    "_metadata": ("a state of a module", "a RemoteModule takes a state without versions for an old one"),
    "_input_metadata": ("a node", "trace(), plan() and watch() fail with AttributeError"),
    "_raw_saved_": ("a node, as the beginning of a name", "%dist_memory does not count what a graph has saved"),
    "_forward_cls": ("a node of a user's Function", "watch() does not name the line of the function"),
    "_backward_cls": ("a Function", "nbdist.autograd cannot be imported"),
    "_backward_hooks": ("a tensor", "a backward pass over workers fails with AttributeError"),
    "_post_accumulate_grad_hooks": ("a tensor", "a backward pass over workers fails with AttributeError"),
    "_version": ("a tensor", "Pipeline.train_step fails with AttributeError"),
    "_cdata": ("a storage", "tensors cannot be sent"),
    "_parameters": ("a module", "%dist_memory counts no parameters of modules, and RRefs do not say their bytes"),
    "_modules": ("a module", "%dist_memory counts no parameters of modules in modules"),
    "_forward_hooks": ("a module", "Pipeline cannot cut a model"),
    "_forward_pre_hooks": ("a module", "Pipeline cannot cut a model"),
    "_class_reducer_dict": ("the pickler of torch's RPC", "compat.install() fails with AttributeError"),
    "_device_types": ("a process group", "a worker leaves no collective, and forms no group anew"),
    "_get_backend": ("a process group", "a worker leaves no collective, and forms no group anew"),
    "_get_sequence_number_for_group": ("a process group", "different roots of a broadcast are not told"),
    "_timeout": ("the options of a backend", "a process group's time limit runs out while a backward pass is held"),
    "_set_default_timeout": ("a backend", "a process group's time limit runs out while a backward pass is held"),
    "_module_fqn": ("a group of parameters of FSDP2", "the line of a waiting cell does not name the module"),
    "_is_initialized": ("a backend of NCCL", "an interrupt in gloo's collectives aborts NCCL's of the group, too"),
    "_set_unwrap_func": ("a torch.futures.Future", "torch.futures.wait_all does not raise the errors of calls"),
}
"""Private attributes of torch's objects: which object has it, and what happens if it is missing."""

SYMBOLS: dict[str, str] = dict.fromkeys(
    [
        "_ZTVN4gloo9transport3tcp13UnboundBufferE",
        "_ZTVN4gloo9transport3tcp7ContextE",
        "_ZNK4gloo9transport3tcp7Context21getConnectedPeerRanksEv",
        "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE",
    ],
    "the receiver of a large tensor waits 30 minutes if its sender dies in the middle of the transfer",
)
"""Mangled names in torch's C++ library, and what happens if one is missing."""


def torch_version() -> tuple[int, ...]:
    """Return the version of the installed torch, as (major, minor)."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def _find(name: str, otherwise: Any = None) -> Any:
    """Return the object that torch has under a name of `FUNCTIONS`.

    If it is missing, return ``otherwise``, or, without this argument, a function that raises UsageError.
    """
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None:
        return _raises(name) if otherwise is None else otherwise
    return found


def _raises(name: str) -> Callable[..., Any]:
    # Raised at the first use, not at the import: other parts of nbdist work without the name.
    def missing(*_: Any, **__: Any) -> Any:
        newest = ".".join(map(str, NEWEST_TESTED))
        raise UsageError(
            f"torch {torch.__version__} has no {name}, which nbdist needs: install torch {newest} or older, or a newer "
            "nbdist"
        )

    return missing


# -- values that go with torch's own threads ----------------------------------------------------------------

_keep: Callable[[str, Any], None] = _find("torch._C._stash_obj_in_tls")
_value: Callable[[str], Any] = _find("torch._C._get_obj_in_tls")
_has: Callable[[str], bool] = _find("torch._C._is_key_in_tls")
_take: Any = _find("torch._C._remove_obj_from_tls", False)


class ValuesOfThreads:
    """Stores values per thread, for a torch before 2.13, which cannot remove a value that it stores for a thread.

    A thread that ends while torch stores a value for it, even None, aborts a process that exits at this moment. So
    values lie in Python's own thread locals, and also in torch's where the engine may have threads for a GPU.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        # torch before 2.12 takes over the reference that it receives, and adds none of its own.
        self._steals = torch_version() < (2, 12)

    def keep(self, key: str, value: Any) -> None:
        """Store a value under a key, for the calling thread."""
        setattr(self._local, key, value)
        if torch.cuda.is_initialized():  # only then does the engine have threads for a GPU
            self._tell_torch(key, value)

    def value(self, key: str) -> Any:
        """Return the calling thread's value under a key; None if there is none.

        In an engine's thread for a GPU, this is the value of the thread that started the backward pass.
        """
        value = getattr(self._local, key, None)
        return _value(key) if value is None and _has(key) else value

    def has(self, key: str) -> bool:
        """Return whether `value` finds a value under a key."""
        return self.value(key) is not None

    def take(self, key: str) -> None:
        """Remove the calling thread's value under a key; do nothing if there is none."""
        self._local.__dict__.pop(key, None)
        if _has(key):
            # Torch cannot forget a key, so it gets None.
            self._tell_torch(key, None)

    def _tell_torch(self, key: str, value: Any) -> None:
        if self._steals:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        _keep(key, value)


_values = ValuesOfThreads()
keep_in_thread: Callable[[str, Any], None] = _keep if _take else _values.keep
"""Store a value under a key for the calling thread; torch's engine passes it on to its threads for other devices."""

thread_value: Callable[[str], Any] = _value if _take else _values.value
"""Return the value under a key for the calling thread."""
thread_has: Callable[[str], bool] = _has if _take else _values.has
"""Return whether there is a value under a key for the calling thread."""
take_from_thread: Callable[[str], None] = _take or _values.take
"""Remove the value under a key for the calling thread."""

# -- modes of the calling thread ----------------------------------------------------------------------------

set_grad_enabled: Callable[[bool], object] = _find("torch._C._set_grad_enabled", torch.set_grad_enabled)
"""Switch gradients on or off in the calling thread; unlike `torch.set_grad_enabled`, not a context manager."""
no_torch_function: Callable[[], AbstractContextManager[object]] = _find("torch._C.DisableTorchFunction", nullcontext)
"""Return a context manager in which the calling thread runs no `__torch_function__`, of a class or of a mode."""

function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", lambda: 0)
"""Return how many function modes the calling thread has entered."""

pop_function_mode: Callable[[], Any] = _find("torch._C._pop_torch_function_stack")
push_function_mode: Callable[[Any], None] = _find("torch._C._push_on_torch_function_stack")
_dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", lambda: 0)
innermost_transform: Callable[[], object] = _find("torch._C._functorch.peek_interpreter_stack", lambda: None)
"""Return the innermost transform of torch.func in which the calling thread is; None outside of any."""

unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = _find("torch._C._functorch.unwrap_if_dead", lambda it: it)
"""Return the tensor inside a wrapper that a finished transform has made; any other tensor is returned itself."""


def direct_apply(function: Any) -> Callable[..., Any]:
    """Return the C++ function that ``function.apply`` of a `torch.autograd.Function` calls in the end.

    ``function.apply`` looks at each argument first, which takes time. Use the C++ function outside of torch.func's
    transforms only, and with no tensors that a transform has left over: see `unwrap_if_dead`.
    """
    of_base: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return of_base if isinstance(of_base, BuiltinFunctionType) else function.apply  # else the slower way


graph_task: Callable[[], int] = _find("torch._C._current_graph_task_id", lambda: -1)
"""Return the number of the backward pass for which the calling thread runs a node; negative outside of any."""

without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _find("torch._C._DisableTorchDispatch", nullcontext)
"""Return a context manager in which no dispatch mode sees the functions that are called."""


def is_transforming() -> bool:
    """Return whether the calling thread runs a function under vmap, grad or another transform of torch.func."""
    return innermost_transform() is not None


def is_in_a_mode() -> bool:
    """Return whether tensors that the calling thread makes would differ from those it makes outside of any block.

    This is so inside of ``no_grad``, inference mode, function and dispatch modes, and torch.func's transforms.
    """
    return bool(
        not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or function_modes()
        or _dispatch_modes()
        or is_transforming()
    )


# -- the engine ---------------------------------------------------------------------------------------------

engine: Any = _find("torch.autograd.Variable._execution_engine")
"""The engine behind ``Tensor.backward`` and ``torch.autograd.grad``, as torch made it."""


def set_engine(engine: Any) -> None:
    """Replace the engine that `torch.autograd` calls, by one with all methods of torch's own engine."""
    torch.autograd.Variable._execution_engine = engine


# -- futures and RPC ----------------------------------------------------------------------------------------

_future: type = _find("torch._C.Future", torch.futures.Future)


def is_torch_future(value: object) -> bool:
    """Return whether a value is one of torch's futures, of its class in Python or the one in C++."""
    return isinstance(value, _future)


collect_all_of_torch: Any = _find("torch._C._collect_all", False)
"""torch's own function behind ``torch.futures.collect_all`` and ``wait_all``; None if this torch has it no more."""


def take_over_collect_all(collect: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
    """Make ``torch.futures.collect_all`` and ``wait_all`` call ``collect(futures, collect_of_torch)``.

    ``collect_of_torch`` is torch's own function, for futures that are all torch's. Does nothing if this torch has no
    private function to replace.
    """
    if collect_all_of_torch:
        torch._C._collect_all = lambda futures: collect(futures, collect_all_of_torch)


def torch_rpc() -> Any:
    """Return the C++ module of torch's own RPC; None if torch was built without it."""
    return getattr(torch._C, "_distributed_rpc", None)


# -- the C++ library -----------------------------------------------------------------------------------------


def torch_library() -> ctypes.CDLL:
    """Return torch's C++ library, to look up `SYMBOLS`. Raises OSError if torch has loaded no such file."""
    file = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # not a second copy of it


# -- process groups -----------------------------------------------------------------------------------------

_no_world = SimpleNamespace(pg_names={}, group_count=0)


def process_groups() -> dict[str, list[int]]:
    """Return the global ranks of each process group that this process is in, by the group's name."""
    return {name: torch.distributed.get_process_group_ranks(group) for name, group in groups_by_name().items()}


def flight_record(*, entries: bool = True, frames: bool = False) -> dict[str, Any]:
    """Return what torch's flight recorder holds of this process's collectives; an empty dict if torch has none.

    Without ``entries``, returns the last numbers of each group only, in 3 µs; 2,000 entries take 18 ms, and about 30 ms
    with their Python ``frames``.
    """
    dump = _find("torch._C._distributed_c10d._dump_fr_trace", lambda **_: pickle.dumps({}))
    # For frames, torch looks whether it has its compiler, and so imports it: for a second, and 70 MB.
    lazy: set[str] = _find("torch._lazy_modules", set())
    is_hidden = frames and "_inductor" in lazy and "torch._inductor" not in sys.modules
    if is_hidden:
        lazy.discard("_inductor")
    try:
        found: dict[str, Any] = pickle.loads(dump(includeCollectives=entries, includeStackTraces=frames))
    finally:
        if is_hidden:
            lazy.add("_inductor")
    return found


def worker_server(path: str) -> Any:
    """Let a thread of torch's own answer HTTP at the Unix socket ``path``, until the server returned here is gone."""
    return _find("torch._C._distributed_c10d._WorkerServer", lambda path: None)(path)


def groups_by_name() -> dict[str, Any]:
    """Return each process group that this process is in, by the group's name."""
    groups = _find("torch.distributed.distributed_c10d._world", _no_world).pg_names
    # A copy: another thread may make a group meanwhile.
    return {name: group for group, name in list(groups.items())}


def is_process_group_known(group: Any) -> bool:
    """Return whether torch still knows a process group: it has not been destroyed."""
    return group in _find("torch.distributed.distributed_c10d._world", _no_world).pg_names


def restart_group_numbers() -> None:
    """Reset torch's counter of process groups, so that torch names the next one as a new process would.

    Destroy all groups first. The ranks of a group find one another by its name, and some may be new processes.
    """
    _find("torch.distributed.distributed_c10d._world", _no_world).group_count = 0


def set_group_timeout(timeout: timedelta) -> None:
    """Set the time limit of the collectives of the default process group."""
    _find("torch.distributed.distributed_c10d._set_pg_timeout", lambda _: None)(timeout)


def take_over_warning_of_group(warn: Callable[[str], None]) -> None:
    """Have torch call ``warn(operation)`` for a collective of a group that the process is not in, and not warn."""
    if _find("torch.distributed.distributed_c10d._warn_not_in_group") is not None:
        vars(torch.distributed.distributed_c10d)["_warn_not_in_group"] = warn


def watch_roots(watch: Callable[[str, Any, int], None]) -> None:
    """Have torch call ``watch(function, group, rank)`` when a function has looked up its ``src`` or ``dst``.

    ``rank`` is that member's rank in the group. The function has issued nothing yet.
    """
    find: Any = _find("torch.distributed.distributed_c10d._canonicalize_group_rank")

    def find_watched(group: Any, *arguments: Any, **options: Any) -> int:
        rank: int = find(group, *arguments, **options)
        watch(sys._getframe(1).f_code.co_name, group, rank)
        return rank

    vars(torch.distributed.distributed_c10d)["_canonicalize_group_rank"] = find_watched


def watch_new_groups(watch: Callable[[str, Any], None]) -> None:
    """Have torch call ``watch(name, group)`` for each process group that forms, before its first operation."""
    if (register := _find("torch.distributed.distributed_c10d._register_process_group")) is not None:

        def register_watched(name: str, group: Any) -> None:
            register(name, group)
            watch(name, group)

        vars(torch.distributed.distributed_c10d)["_register_process_group"] = register_watched


# -- sparse tensors -----------------------------------------------------------------------------------------


def load_layouts() -> None:
    """Fill torch's table of tensor layouts now, before several threads rebuild sparse tensors."""
    # torch fills the table when a sparse tensor is first rebuilt; another thread that comes meanwhile finds it half
    # full.
    _find("torch.serialization._get_layout", lambda _: None)(str(torch.strided))


_none: list[torch.Tensor] = []
_loaded: list[torch.Tensor] = _find("torch._utils._sparse_tensors_to_validate", _none)
_loaded_here: Callable[[], list[torch.Tensor]] = _find("torch._utils._get_sparse_tensors_to_validate", lambda: _loaded)
_validate: Callable[[], None] = _find("torch._utils._validate_loaded_sparse_tensors", _none.clear)


def validate_sparse() -> None:
    """Validate the sparse tensors that were rebuilt, which torch collects in a list until then.

    Raises torch's RuntimeError for indices out of range, if ``torch.sparse.check_sparse_tensor_invariants`` is on.
    """
    if _loaded_here():  # of the process up to torch 2.14, of the calling thread from 2.15 on
        _validate()


# -- loading of data ----------------------------------------------------------------------------------------

loader_iterator: Any = _find("torch.utils.data.dataloader._BaseDataLoaderIter", SimpleNamespace(__next__=None))
"""The class of all iterators of ``torch.utils.data.DataLoader``."""

# -- torch.compile ------------------------------------------------------------------------------------------

# The module that decides which code torch.compile traces. A process that compiles nothing does not import it.
_RULES = "torch._dynamo.trace_rules"
# The one file of nbdist that torch.compile must trace: its hooks run inside users' modules, and do nothing there.
_TRACED = Path(__file__).parent / "autograd" / "graph" / "noting.py"


def _skip_own_code(rules: Any) -> None:
    if hasattr(rules, "SKIP_DIRS") and hasattr(rules, "add"):
        parents = _TRACED.parents[:3]
        files = {file for folder in parents for file in folder.iterdir()} - {_TRACED, *parents}
        rules.SKIP_DIRS.extend(map(str, files))
        rules.add("nbdist.errors")  # any module will do: this makes torch read the list again


def _find_rules(name: str, path: Sequence[str] | None = None, _: Any = None) -> ModuleSpec | None:
    """Return the spec of torch's module `_RULES`, with a loader that calls `_skip_own_code` at the end; else None."""
    spec = PathFinder.find_spec(name, path) if name == _RULES else None
    if spec is not None:
        loader: Any = spec.loader
        execute = loader.exec_module
        loader.exec_module = lambda module: (execute(module), _skip_own_code(module))  # type: ignore[func-returns-value]
    return spec


if _RULES in sys.modules:
    _skip_own_code(sys.modules[_RULES])
else:
    # Importing torch's module here would take a second and 70 MB in every process. The finder stays for good: another
    # thread may iterate over sys.meta_path, and would pass over a finder if this one were removed.
    sys.meta_path.insert(0, SimpleNamespace(find_spec=_find_rules))

compilation: Callable[[], object] = _find("torch._guards.TracingContext.try_get", lambda: None)
"""Return an object if ``torch.compile`` traces code in the calling thread now, else None."""

# -- untested versions of torch ------------------------------------------------------------------------------

_warned = False


def warn_of_untested() -> None:
    """Warn, once in a process, if torch is newer than the newest version with which nbdist was tested."""
    global _warned
    if torch_version() <= NEWEST_TESTED or _warned:
        return
    _warned = True
    newest = ".".join(map(str, NEWEST_TESTED))
    warnings.warn(
        f"nbdist was tested with torch up to {newest}, and this is {torch.__version__}. If something fails, try: "
        f"pip install 'torch<{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}'",
        stacklevel=3,
    )
