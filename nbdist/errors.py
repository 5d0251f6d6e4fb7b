"""The classes of nbdist's own errors, by whose fault an error is.

::

    NbdistError                    (a RuntimeError, as torch's RPC errors are)
    ├── UsageError                 the caller asked for something impossible
    │   ├── NotInitialized         RPC does not run in this process
    │   ├── UnknownWorker          this world has no such worker
    │   └── EncodeError            an argument or a result cannot be sent
    ├── RemoteError                a function failed on another worker, with an error that cannot be rebuilt here
    ├── DecodeError                a value arrived that this process cannot rebuild
    │   └── MissingDefinition      ... because it lacks a definition of the sender's ``__main__``
    ├── RRefError                  a reference whose value is not available any more
    ├── RpcTimeout                 (also a TimeoutError) the answer did not come in time
    ├── WorkerLost                 the worker died, left, or fell silent
    ├── RendezvousError            the world could not form, or did not end in time
    │   └── NotUnique              ... because a name or rank is taken
    ├── GroupError                 a process group cannot be used any more, or not yet
    ├── SecurityError              refused as unsafe, mostly because the workers share no secret
    ├── ForwardNaN                 (also a FloatingPointError) the model made a NaN, in a context that checks for it
    ├── ResourceError              (also an OSError) no more files can be opened, or disk space or memory is used up
    ├── ProtocolError              another process sent something that no correct member sends
    │   └── VersionMismatch        ... because it runs another version of nbdist
    └── Interrupted                the user's Ctrl-C ended the wait
"""

from __future__ import annotations

__all__ = [
    "DecodeError",
    "EncodeError",
    "ForwardNaN",
    "GroupError",
    "Interrupted",
    "MissingDefinition",
    "NbdistError",
    "NotInitialized",
    "NotUnique",
    "ProtocolError",
    "RRefError",
    "RemoteError",
    "RendezvousError",
    "ResourceError",
    "RpcTimeout",
    "SecurityError",
    "UnknownWorker",
    "UsageError",
    "VersionMismatch",
    "WorkerLost",
]


class NbdistError(RuntimeError):
    """The base class of all errors that nbdist raises itself.

    Errors that a user's function raises on a worker keep their own class.

    Example:
        >>> try:
        ...     rpc.rpc_sync("worker7", max, args=(1, 2))
        ... except nbdist.NbdistError as error:
        ...     print(type(error).__name__, error)
        UnknownWorker unknown destination worker 'worker7'; there are worker0, worker1
    """


class UsageError(NbdistError):
    """The caller asked for something impossible, such as an option out of range. The text says what is possible."""


class NotInitialized(UsageError):
    """RPC does not run in this process: call `nbdist.rpc.init_rpc`, or start a cluster with ``%dist_init``."""


class UnknownWorker(UsageError):
    """There has never been a worker of this name or id in this world. The text lists the workers there are."""


class EncodeError(UsageError):
    """An argument or a result cannot be sent to another worker. The text says which one, and why."""


class RemoteError(NbdistError):
    """A function failed on another worker, with an error that cannot be rebuilt here.

    The text has the error's class and text; a note has the worker's traceback.
    """


class DecodeError(NbdistError):
    """A value arrived that this process cannot rebuild, most often because it lacks the value's class."""

    lacks: str = ""
    """Python's text about the missing module or name, such as ``"ModuleNotFoundError: No module named 'm'"``."""


class MissingDefinition(DecodeError):
    """The receiver's ``__main__`` lacks a definition of the sender's ``__main__``; the same call again sends it."""


class RRefError(NbdistError):
    """The value of a remote reference is not available: it was released, never made, or RPC has ended."""


class RpcTimeout(NbdistError, TimeoutError):
    """The answer to a call, or the outcome of a future, did not come in time.

    For a call, the text says whether the worker has received it and what the worker was running. The function may still
    run there.

    Example:
        >>> import time
        >>> try:
        ...     rpc.rpc_sync("worker1", time.sleep, args=(0.5,), timeout=0.05)
        ... except nbdist.RpcTimeout as error:
        ...     print(error)
        RPC ran for more than 0.05 s (50 ms): sleep on worker1; ...
    """


class WorkerLost(NbdistError):
    """The worker died, left, or has been silent for too long. The text names it and says what happened to it.

    For a call that the worker had not answered, the text also names the function.

    Example:
        >>> with World(2) as world, world[0].activate():
        ...     world.kill(1)
        ...     rpc.rpc_sync("worker1", max, args=(1, 2))
        Traceback (most recent call last):
        nbdist.errors.WorkerLost: worker1 died
    """


class RendezvousError(NbdistError):
    """The world could not form, or did not end in time. The text says why, such as which workers are missing."""


class NotUnique(RendezvousError):
    """A living worker has the name or the rank already."""


class GroupError(NbdistError):
    """A process group cannot be used any more, or not yet. The text says why, and what to do."""


class SecurityError(NbdistError):
    """Something unsafe was refused, such as a world over several hosts without a secret. The text says what to set."""


class ForwardNaN(NbdistError, FloatingPointError):
    """An operation of a forward pass made a NaN, or received one, in a context with ``check="nan"``."""

    worker: str = ""
    """The name of the worker that ran the operation."""
    operation: str = ""
    """torch's name of the operation; if compiled code made the NaN, the name of the module."""
    module: str | None = None
    """The path of the module whose forward ran, such as ``Net.layers.2``; None outside of any module."""
    line: str | None = None
    """The line of the user's code, such as ``model.py:12: return torch.log(x)``; None if it is not known."""


class ResourceError(NbdistError, OSError):
    """No more files can be opened, or disk space or memory is used up: the text says which. ``errno`` has the code."""


class ProtocolError(NbdistError):
    """Another process sent something that no correct member sends."""


class VersionMismatch(ProtocolError):
    """Another member runs a version of nbdist with another protocol. Install the same version everywhere."""


class Interrupted(NbdistError):
    """The user's Ctrl-C, or a cancellation, ended a call or a wait that KeyboardInterrupt could not reach."""
