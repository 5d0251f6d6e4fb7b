"""A handle on a module of another worker, which is called like a module of this process.

The handle holds a remote reference to the module, and sends calls to its owner. Methods that need the module in this
process (parameters, hooks, moves to a device) raise an error that names an alternative.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nbdist.errors import UsageError
from nbdist.nn.placement import place_of
from nbdist.optim.local import on_cpu
from nbdist.rpc import api
from nbdist.rpc.devices import results_stay_on_gpus
from nbdist.rpc.futures import Future
from nbdist.rpc.references.rref import RRef
from nbdist.torch_private import compilation


class RemoteModule(torch.nn.Module):
    """Make a module on another worker, and call it from here like a local module.

    Calls are recorded in the current distributed autograd context, if there is one, so a backward pass goes through
    the module. The handle itself can be sent to other workers, and works there. Methods that need the module in this
    process, such as ``parameters()`` and ``to()``, raise `UsageError`; its text names an alternative. The state of a
    local module that contains the handle includes the module's state: ``state_dict()`` fetches it, and
    ``load_state_dict()`` sends it back.

    Tensors of a result that are on a GPU come back on a GPU if the caller has a device map to the module's worker
    (which is then read backwards), or if the caller is a worker of a cluster; else they come back on the CPU.
    `init_rpc` takes device maps in its options.

    Args:
        remote_device: the worker and the device: ``"worker1"``, ``"worker1/cuda:0"`` or ``"rank:1/cuda:0"``. Without
            a device it is the CPU. To another device, the worker moves the arguments of a call that are tensors; it
            does not move tensors in lists or dicts.
        module_cls: the module's class, or a function that returns a module; called on the worker.
        args: positional arguments of ``module_cls``.
        kwargs: keyword arguments of ``module_cls``.

    Raises:
        UsageError: the worker is unknown, the place cannot be parsed, or ``module_cls`` returned no module.
        NotInitialized: RPC is not running in this process.
        EncodeError: ``module_cls`` or an argument cannot be sent.
        RpcTimeout: the worker did not make the module within the default timeout of calls.
        WorkerLost: the worker died, or left.
        Exception: ``module_cls`` raised it on the worker, or torch, which has no such device there.

    Example:
        >>> module = RemoteModule("worker1", torch.nn.Linear, args=(2, 3))
        >>> module(torch.ones(4, 2)).shape
        torch.Size([4, 3])
        >>> module.to("cpu")
        Traceback (most recent call last):
            ...
        nbdist.errors.UsageError: Method ``to`` not supported for RemoteModule: the module is not here. Use ...
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.on, self.device = place_of(remote_device)
        self.module_rref: RRef[torch.nn.Module] = api.rpc_sync(
            self.on, create, args=(module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        )

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[torch.nn.Module]) -> RemoteModule:
        """Return a handle on a module that lives on a worker already. Asks no worker, so a wrong reference shows later.

        Args:
            remote_device: the worker and device of the module, as for the constructor. Arguments of calls that are
                tensors are moved to this device, unless it is the CPU; the module itself is not moved.
            module_rref: a reference to the module. Calls go to its owner, whatever worker ``remote_device`` names.

        Raises:
            UsageError: the place cannot be parsed.

        Example:
            >>> rref = rpc.remote("worker1", torch.nn.Linear, args=(2, 3))
            >>> RemoteModule.init_from_module_rref("worker1", rref)(torch.ones(4, 2)).shape
            torch.Size([4, 3])
        """
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self.on, self.device = place_of(remote_device)
        self.module_rref = module_rref
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with ``*args`` and ``**kwargs``, wait, and return its result.

        Raises:
            RpcTimeout: no answer came within the default timeout of calls.
            WorkerLost: the module's worker died, or left.
            NotInitialized: RPC is not running in this process.
            EncodeError: an argument or the result cannot be sent.
            Exception: the module raised it.
        """
        function = run if self.device == "cpu" else self._run()
        return api.rpc_sync(self.module_rref.owner(), function, (self.module_rref, self.device, *args), kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module with ``*args`` and ``**kwargs``, and return a `Future` of its result at once.

        Raises `EncodeError` for an argument that cannot be sent, and `NotInitialized`, at once. The future's ``wait()``
        raises the other errors of `forward`, also that of a dead worker.

        Example:
            >>> module = RemoteModule("worker1", torch.nn.Linear, args=(2, 3))
            >>> module.forward_async(torch.ones(4, 2)).wait().shape
            torch.Size([4, 3])
        """
        function = run if self.device == "cpu" else self._run()
        return api.rpc_async(self.module_rref.owner(), function, (self.module_rref, self.device, *args), kwargs)

    def _run(self) -> Callable[..., Any]:
        """Return the function that calls a module on a GPU: `run`, or `run_to_cpu` if the result could not be sent."""
        agent = api.current_agent()
        return run if results_stay_on_gpus(agent.me, agent.find(self.module_rref.owner_name())) else run_to_cpu

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """Return the remote reference to the module.

        Any worker can use it, to pass the module to a function that runs on its owner. Asks no worker, so this also
        works when that worker is dead or RPC has ended; using the reference fails then.
        """
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Return references to the module's parameters, as `DistributedOptimizer` takes them.

        The optimizer saves its state by the positions of these parameters, because the module does not know its name in
        the whole model. To save the state by names, give the optimizer pairs: ``[("encoder.weight", rref), …]``.

        Args:
            recurse: include the parameters of submodules.

        Raises:
            RpcTimeout: no answer came within the default timeout of calls.
            WorkerLost: the module's worker died, or left.
            NotInitialized: RPC is not running in this process.

        Example:
            >>> module = RemoteModule("worker1", torch.nn.Linear, args=(2, 3))
            >>> [rref.owner_name() for rref in module.remote_parameters()]
            ['worker1', 'worker1']
        """
        found: list[RRef[torch.nn.Parameter]] = self._on_owner(parameters, recurse)
        return found

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module into training mode, or with ``mode=False`` into evaluation mode. Returns the handle.

        After an error, ``training`` of the handle has not changed.

        Raises:
            RpcTimeout: no answer came within the default timeout of calls.
            WorkerLost: the module's worker died, or left.
            NotInitialized: RPC is not running in this process.
            ValueError: ``mode`` is not a bool.
        """
        self._on_owner(train, mode)
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        """Put the module into evaluation mode, and return the handle.

        Raises RpcTimeout, WorkerLost or NotInitialized, as `train` does.
        """
        return self.train(False)

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the module's state, its tensors on the CPU.

        Args:
            *args: ``destination`` and ``prefix``, in the positional form that torch deprecates.
            destination: the dict to fill and return, as torch passes it to the parts of a module; by default a new one.
            prefix: the text before each name.
            keep_vars: ignored: the tensors are copies without gradients.

        Raises:
            RpcTimeout: no answer came within the default timeout of calls.
            WorkerLost: the module's worker died, or left.
            NotInitialized: RPC is not running in this process.

        Example:
            >>> module = RemoteModule("worker1", torch.nn.Linear, args=(2, 3))
            >>> sorted(module.state_dict())
            ['bias', 'weight']
            >>> sorted(torch.nn.Sequential(module, torch.nn.ReLU()).state_dict())
            ['0.bias', '0.weight']
        """
        if args:
            destination, prefix = (*args, prefix)[:2]
        state, metadata = self._on_owner(state_of)
        if destination is None:
            if not prefix:
                return _with_metadata(state, metadata)
            destination = _with_metadata({}, OrderedDict())
        destination.update({prefix + name: value for name, value in state.items()})
        known = getattr(destination, "_metadata", None)
        if known is not None and metadata:
            # A process that has the whole model looks up each part's version by name. `_load_from_state_dict` gets only
            # the entry of the handle's own name, so that entry has all of them.
            known.update({prefix + name if name else prefix[:-1]: dict(version) for name, version in metadata.items()})
            known.setdefault(prefix[:-1], {})[_VERSIONS] = metadata
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state into the module; arguments and result are those of `torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: as torch raises it: a name is missing or unknown (if ``strict``), or a shape does not fit.
            RpcTimeout: no answer came within the default timeout of calls.
            WorkerLost: the module's worker died, or left.
            NotInitialized: RPC is not running in this process.
        """
        return self._on_owner(load, dict(state_dict), getattr(state_dict, "_metadata", None), strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the part of a larger module's state whose names begin with ``prefix``. torch calls this."""
        state = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        # Without `_VERSIONS`, the state came from a model in one process: torch takes the module's parts for old ones.
        metadata = local_metadata.get(_VERSIONS, {"": local_metadata})
        assign = local_metadata.get("assign_to_params_buffers", False)
        missing, unexpected, errors = self._on_owner(load_part, state, metadata, assign)
        if strict:
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += [f"{prefix[:-1]}: {error}" for error in errors]

    def extra_repr(self) -> str:
        """Return the text in the parentheses of the handle's repr: the module's class, if known, and its place.

        Asks no worker, so this also works when the module's worker is dead or RPC has ended.
        """
        state = self.module_rref.state
        return f"{state.qualname if state is not None else 'module'} on {self.module_rref.owner_name()}/{self.device}"

    def _on_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        return api.rpc_sync(self.module_rref.owner(), function, args=(self.module_rref, *args))


# The key of the versions of all parts of the module, by name, in a state's metadata of the handle.
_VERSIONS = "nbdist_versions"

# The methods of torch.nn.Module that `RemoteModule` refuses, and for some of them the method to call instead.
_ALTERNATIVES = {
    **dict.fromkeys(("parameters", "named_parameters", "requires_grad_", "zero_grad"), "remote_parameters()"),
    **dict.fromkeys(("buffers", "named_buffers"), "state_dict()"),
}
_REFUSED_METHODS = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "float", "half", "modules"),
    *("named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "register_backward_hook"),
    *("register_buffer", "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_module", "register_parameter", "requires_grad_", "share_memory"),
    *("ipu", "to", "to_empty", "type", "xpu", "zero_grad"),
)


def _refusal(name: str) -> Callable[..., Any]:
    instead = _ALTERNATIVES.get(name, "get_module_rref(), and a function that runs on the owner")

    def refuse(self: RemoteModule, *_: Any, **__: Any) -> Any:
        if name == "named_modules" and compilation() is not None:
            return ()  # torch.compile looks for the parameters of the module that contains this one
        raise UsageError(f"Method ``{name}`` not supported for RemoteModule: the module is not here. Use {instead}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise UsageError: the module is not here. Use {instead}."
    return refuse


for _name in _REFUSED_METHODS:
    setattr(RemoteModule, _name, _refusal(_name))


# --- on the owner ---------------------------------------------------------------------------------


def create(cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> RRef[Any]:
    """Make the module, move it to its device, and return a reference to it."""
    module = cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns one of "
            f"{type(module)}"
        )
    return RRef(module.to(device))


def run(rref: RRef[torch.nn.Module], device: str, /, *args: Any, **kwargs: Any) -> Any:
    """Move arguments that are tensors to ``device`` unless it is the CPU, call the module, and return its result."""
    # The module's arguments are arguments of this call, not in a tuple, because that is faster to encode.
    if device != "cpu":
        args = tuple(_moved(value, device) for value in args)
        kwargs = {name: _moved(value, device) for name, value in kwargs.items()}
    return rref.local_value()(*args, **kwargs)


def run_to_cpu(rref: RRef[torch.nn.Module], device: str, /, *args: Any, **kwargs: Any) -> Any:
    """Do the work of `run`, and move the result's tensors to the CPU: the caller has no device map for this worker."""
    return on_cpu(run(rref, device, *args, **kwargs))


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def parameters(rref: RRef[torch.nn.Module], recurse: bool) -> list[RRef[Any]]:
    """Return references to the module's parameters, in the order of torch's ``parameters(recurse)``."""
    return [RRef(parameter) for parameter in rref.local_value().parameters(recurse)]


def train(rref: RRef[torch.nn.Module], mode: bool) -> None:
    """Put the module into training mode, or with False into evaluation mode."""
    rref.local_value().train(mode)


def state_of(rref: RRef[torch.nn.Module]) -> tuple[dict[str, Any], Any]:
    """Return the module's state, its tensors on the CPU, so that it can be sent; and its metadata, as in `load`."""
    state = rref.local_value().state_dict()
    return on_cpu(state), getattr(state, "_metadata", None)


def load(rref: RRef[torch.nn.Module], state: Mapping[str, Any], metadata: Any, strict: bool, assign: bool) -> Any:
    """Load a state into the module, with the version of each part if known; return torch's missing and other keys."""
    return rref.local_value().load_state_dict(_with_metadata(state, metadata), strict=strict, assign=assign)


def load_part(
    rref: RRef[torch.nn.Module], state: Mapping[str, Any], metadata: Any, assign: bool
) -> tuple[list[str], list[str], list[str]]:
    """Load a part of a larger state; return the missing names, the unexpected names, and the errors as texts."""
    try:
        found = load(rref, state, metadata, strict=False, assign=assign)
    except RuntimeError as error:  # torch names what is missing only if all shapes fit
        own = rref.local_value().state_dict()
        return [name for name in own if name not in state], [name for name in state if name not in own], [str(error)]
    return list(found.missing_keys), list(found.unexpected_keys), []


def _with_metadata(state: Mapping[str, Any], metadata: Any) -> dict[str, Any]:
    """Return a state in the form in which torch returns it, with its metadata in a private attribute."""
    whole = OrderedDict(state)
    if metadata is not None:
        whole._metadata = metadata  # type: ignore[attr-defined]
    return whole
