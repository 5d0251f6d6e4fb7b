"""A module on another worker, which is used like one that is here.

It is a handle: it holds a reference to the module, and forwards. What could only be done to a module that is here
(parameters, hooks, moving it to a device) is refused with a word on what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from nbdist.errors import UsageError
from nbdist.nn.placement import place_of
from nbdist.optim.local import on_cpu
from nbdist.rpc import api
from nbdist.rpc.futures import Future
from nbdist.rpc.rref import RRef

__all__ = ["RemoteModule"]


class RemoteModule(torch.nn.Module):
    """Make ``module_cls(*args, **kwargs)`` on another worker, and call it from here as a module.

    ``remote_device`` is ``"worker1"``, ``"worker1/cuda:0"`` or ``"rank:1/cuda:0"``; without a device, the CPU. The
    worker moves tensors among the arguments to the module's device when they arrive. Results come back on the CPU,
    unless the worker was started with a device map for the caller's: `init_rpc` takes device maps in its options, and
    a notebook's workers, which ``%dist_init`` starts, have none.
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
        """A handle on a module that exists."""
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self.on, self.device = place_of(remote_device)
        self.module_rref = module_rref
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module and wait for the result."""
        return api.rpc_sync(self.module_rref.owner(), run, (self.module_rref, self.device, *args), kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module, and have a Future."""
        return api.rpc_async(self.module_rref.owner(), run, (self.module_rref, self.device, *args), kwargs)

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """The reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Return references to the module's parameters, as `DistributedOptimizer` takes them.

        The optimizer saves its state of them by their positions, because the module does not know its name in the
        whole model. To save it by names, give the optimizer pairs: ``[("encoder.weight", rref), …]``.
        """
        found: list[RRef[torch.nn.Parameter]] = self._on_owner(parameters, recurse)
        return found

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module in training mode, or out of it."""
        self.training = mode
        self._on_owner(train, mode)
        return self

    def eval(self) -> RemoteModule:
        """Put the module in evaluation mode."""
        return self.train(False)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's state, on the CPU."""
        found: dict[str, Any] = self._on_owner(state_of)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Give the module a state."""
        return self._on_owner(load, dict(state_dict), strict, assign)

    def extra_repr(self) -> str:
        """What stands between the brackets of its repr: where the module is, and what, as far as is known."""
        state = self.module_rref.state
        return f"{state.qualname if state is not None else 'module'} on {self.module_rref.owner_name()}/{self.device}"

    def _on_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        return api.rpc_sync(self.module_rref.owner(), function, args=(self.module_rref, *args))


_INSTEAD = {
    **dict.fromkeys(("parameters", "named_parameters", "requires_grad_", "zero_grad"), "remote_parameters()"),
    **dict.fromkeys(("buffers", "named_buffers"), "state_dict()"),
}
_HERE_ONLY = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "float", "half", "modules"),
    *("named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "register_backward_hook"),
    *("register_buffer", "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_module", "register_parameter", "requires_grad_", "share_memory"),
    *("to", "to_empty", "type", "zero_grad"),
)


def _refusal(name: str) -> Callable[..., NoReturn]:
    instead = _INSTEAD.get(name, "get_module_rref(), and a function that runs on the owner")

    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(f"Method ``{name}`` not supported for RemoteModule: the module is not here. Use {instead}")

    refuse.__name__ = name
    return refuse


for _name in _HERE_ONLY:
    setattr(RemoteModule, _name, _refusal(_name))


# --- on the owner ---------------------------------------------------------------------------------


def create(cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> RRef[Any]:
    """Make the module."""
    module = cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns one of "
            f"{type(module)}"
        )
    return RRef(module.to(device))


def run(rref: RRef[torch.nn.Module], device: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the module, on its device. The module's arguments are the call's own, which are quick to encode."""
    if device != "cpu":
        args = tuple(_moved(value, device) for value in args)
        kwargs = {name: _moved(value, device) for name, value in kwargs.items()}
    return rref.local_value()(*args, **kwargs)


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def parameters(rref: RRef[torch.nn.Module], recurse: bool) -> list[RRef[Any]]:
    """References to the parameters."""
    return [RRef(parameter) for parameter in rref.local_value().parameters(recurse)]


def train(rref: RRef[torch.nn.Module], mode: bool) -> None:
    """Set the module's mode."""
    rref.local_value().train(mode)


def state_of(rref: RRef[torch.nn.Module]) -> dict[str, Any]:
    """The module's state, ready to travel."""
    found: dict[str, Any] = on_cpu(rref.local_value().state_dict())
    return found


def load(rref: RRef[torch.nn.Module], state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Give the module a state."""
    return rref.local_value().load_state_dict(state, strict=strict, assign=assign)
