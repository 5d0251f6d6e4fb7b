"""Every error that nbdist raises, named by whose fault it is.

::

    NbdistError                    (a RuntimeError, as torch's RPC errors are)
    ├── UsageError                 the caller asked for something that cannot be
    │   ├── NotInitialized         RPC is not running in this process
    │   ├── UnknownWorker          no such worker in this world
    │   └── EncodeError            an argument or a result that cannot be sent
    ├── RemoteError                a function failed elsewhere, with an error that cannot be rebuilt here
    ├── DecodeError                a value arrived that this side cannot rebuild
    │   └── MissingDefinition      ... because it lacks a definition of the sender's ``__main__``
    ├── RRefError                  a reference whose value can no longer be had
    ├── RpcTimeout                 (also a TimeoutError) the answer did not come in time
    ├── WorkerLost                 the worker died, left, or fell silent
    ├── RendezvousError            the world did not form, or did not part
    │   └── NotUnique              ... because a name or rank is taken
    ├── GroupError                 a process group can no longer be used, or not yet
    ├── SecurityError              without a shared secret this is refused
    ├── ForwardNaN                 (also a FloatingPointError) the model made a NaN, in a context that checks for it
    ├── ResourceError              (also an OSError) the system has no file, disk space or memory left
    ├── ProtocolError              a peer sent what no correct peer sends
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
    """The root of all errors that nbdist raises itself."""


class UsageError(NbdistError):
    """The caller asked for something that cannot be done."""


class NotInitialized(UsageError):
    """RPC is not running in this process."""


class UnknownWorker(UsageError):
    """No worker of that name or id is in this world."""


class EncodeError(UsageError):
    """An argument or a result cannot be sent to another worker."""


class RemoteError(NbdistError):
    """A function failed on another worker, with an error that cannot be rebuilt here."""


class DecodeError(NbdistError):
    """A value arrived that this side cannot rebuild, mostly for want of its class."""

    lacks: str = ""
    """What Python says of the module or name that is missing: ``"ModuleNotFoundError: No module named 'm'"``."""


class MissingDefinition(DecodeError):
    """The receiver's ``__main__`` lacks a definition that the sender referred to by name."""


class RRefError(NbdistError):
    """The value of a remote reference can no longer be had."""


class RpcTimeout(NbdistError, TimeoutError):
    """The answer to a call did not come in time."""


class WorkerLost(NbdistError):
    """The worker died, left, or has been silent for too long."""


class RendezvousError(NbdistError):
    """The world did not form, or did not part, in time."""


class NotUnique(RendezvousError):
    """A name or a rank is taken by a living worker."""


class GroupError(NbdistError):
    """A process group can no longer be used, or not yet; the text says why, and what to do."""


class SecurityError(NbdistError):
    """What was asked needs a secret that all members share, and there is none."""


class ForwardNaN(NbdistError, FloatingPointError):
    """An operation of a forward pass made a NaN, or was given one, in a context with ``check="nan"``."""

    worker: str = ""
    """The worker that computed it."""
    operation: str = ""
    """torch's name of the operation, or of the module if compiled code made the NaN."""
    module: str | None = None
    """The path of the module whose forward ran, such as ``Net.layers.2``; None outside of any module."""
    line: str | None = None
    """The line of the user's code, such as ``model.py:12: return torch.log(x)``; None if it is not known."""


class ResourceError(NbdistError, OSError):
    """The system has no open file, disk space or memory left to give; ``errno`` says which, the text in words."""


class ProtocolError(NbdistError):
    """A peer sent what no correct peer sends."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class Interrupted(NbdistError):
    """The user's interrupt ended a wait that Python itself could not end."""
