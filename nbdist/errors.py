"""The classes of nbdist's own errors. The class says whose fault an error is.

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
    ├── Interrupted                the user's Ctrl-C ended the wait
    └── DebuggerQuit               the user's `q` in a debugger ended the function
"""

from __future__ import annotations


class NbdistError(RuntimeError):
    """The base class of nbdist's own errors, a RuntimeError. A value of a wrong type raises Python's TypeError instead.

    Errors that a user's function raises on a worker keep their own class.

    Example:
        >>> try:
        ...     rpc.rpc_sync("worker7", max, args=(1, 2))
        ... except nbdist.NbdistError as error:
        ...     print(type(error).__name__, error)
        UnknownWorker unknown destination worker 'worker7'; there are worker0, worker1
    """


class UsageError(NbdistError):
    """The caller asked for something impossible, such as an option out of range. The text says what is possible.

    A RuntimeError, as all errors of nbdist, and no ValueError. Also raised for a call at the wrong time.

    Example:
        >>> rpc.WorkerInfo("two words", 1)
        Traceback (most recent call last):
        nbdist.errors.UsageError: Worker name must match [A-Za-z0-9-_:]*, but 'two words' does not
    """


class NotInitialized(UsageError):
    """RPC does not run in this process: call `nbdist.rpc.init_rpc`, or start a cluster with ``%dist_init``.

    Example:
        >>> with World(1) as world:
        ...     pass
        >>> with world[0].activate():
        ...     rpc.get_worker_info()
        Traceback (most recent call last):
        nbdist.errors.NotInitialized: Current RPC agent is not set! ...
    """


class UnknownWorker(UsageError):
    """There has never been a worker of this name or id in this world. The text lists the workers there are.

    Example:
        >>> rpc.get_worker_info("worker7")
        Traceback (most recent call last):
        nbdist.errors.UnknownWorker: unknown destination worker 'worker7'; there are worker0, worker1
    """


class EncodeError(UsageError):
    """An argument or a result cannot be sent to another worker. The text says which one, and why.

    For an argument, the function has not run; for a result, it has.

    Example:
        >>> import threading
        >>> rpc.rpc_sync("worker1", print, args=(threading.Lock(),))
        Traceback (most recent call last):
        nbdist.errors.EncodeError: `args[0]` is a lock, which cannot be sent: cannot pickle '_thread.lock' object
    """

    unmapped: str = ""
    """``"argument"`` or ``"result"`` if it holds a tensor on a GPU for which there is no device map; else empty."""


class RemoteError(NbdistError):
    """A function failed on another worker, with an error that cannot be rebuilt here.

    The text has the error's class and text; a note has the worker's traceback. Errors that can be rebuilt arrive as
    what they are, with such a note. KeyboardInterrupt and SystemExit on a worker always arrive as a RemoteError.

    Example:
        >>> import threading
        >>> class Broken(Exception):
        ...     def __init__(self):
        ...         self.lock = threading.Lock()
        ...     def __str__(self):
        ...         return "the lock is broken"
        >>> def fail():
        ...     raise Broken
        >>> rpc.rpc_sync("worker1", fail)
        Traceback (most recent call last):
        nbdist.errors.RemoteError: nbdist.errors.Broken: the lock is broken ...
    """


class DecodeError(NbdistError):
    """A value arrived that this process cannot rebuild, most often because it lacks the value's class.

    Example:
        >>> class Broken:
        ...     def __reduce__(self):
        ...         return int, ("no number",)
        >>> rpc.rpc_sync("worker1", print, args=(Broken(),))
        Traceback (most recent call last):
        nbdist.errors.DecodeError: a value that another worker sent cannot be rebuilt in this process: ValueError: ...
    """

    lacks: str = ""
    """Python's text about the missing module or name, such as ``"ModuleNotFoundError: No module named 'm'"``."""


class MissingDefinition(DecodeError):
    """The receiver's ``__main__`` lacks a definition of the sender's ``__main__``; the same call again sends it.

    ``docs/troubleshooting.md`` has an example.
    """


class RRefError(NbdistError):
    """The value of a remote reference is not available: it was released, never made, or RPC has ended.

    Example:
        >>> rref = rpc.remote("worker1", max, args=(1, 2))
        >>> rref.release()
        >>> rref.to_here()
        Traceback (most recent call last):
        nbdist.errors.RRefError: <RRef ...> cannot be used: release() was called on it. ...
    """


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
        nbdist.errors.WorkerLost: worker1 died. Call another worker, ...
    """


class RendezvousError(NbdistError):
    """The world could not form, or did not end in time. The text says why, such as which workers are missing.

    ``docs/troubleshooting.md`` has an example.
    """


class NotUnique(RendezvousError):
    """A living worker has the name or the rank already: choose another one, or end that worker first.

    ``docs/errors.md`` has examples.
    """


class GroupError(NbdistError):
    """A process group cannot be used any more, or not yet. The text says why, and what to do.

    A collective on a worker raises it: an interrupt has broken the group off, a worker has destroyed it, or workers
    were restarted or have joined.
    ``docs/troubleshooting.md`` has an example.
    """


class SecurityError(NbdistError):
    """Something unsafe was refused, such as a world over several hosts without a secret. The text says what to set.

    ``docs/troubleshooting.md`` has an example.
    """


class ForwardNaN(NbdistError, FloatingPointError):
    """An operation of a forward pass made a NaN, or received one, in a context with ``check="nan"``.

    Example:
        >>> with dist_autograd.context(check="nan"):
        ...     torch.tensor([1.0, -1.0]).log()
        Traceback (most recent call last):
        nbdist.errors.ForwardNaN: log made 1 NaN of 2 values ...
    """

    worker: str = ""
    """The name of the worker that ran the operation."""
    operation: str = ""
    """torch's name of the operation; if compiled code made the NaN, the name of the module."""
    module: str | None = None
    """The path of the module whose forward ran, such as ``Net.layers.2``; None outside of any module."""
    line: str | None = None
    """The line of the user's code, such as ``model.py:12: return torch.log(x)``; None if it is not known."""


class ResourceError(NbdistError, OSError):
    """No more files can be opened, or disk space or memory is used up: the text says which. An OSError, too.

    ``errno`` has the system's code. It is None if Ray has no room for the workers, or if the process that starts the
    workers has ended. ``docs/troubleshooting.md`` has an example.
    """


class ProtocolError(NbdistError):
    """Another process sent something that no correct member sends.

    ``docs/errors.md`` has examples.
    """


class VersionMismatch(ProtocolError):
    """Another member runs a version of nbdist with another protocol. Install the same version everywhere.

    ``docs/troubleshooting.md`` has an example.
    """


class Interrupted(NbdistError):
    """The user's Ctrl-C, or a cancellation, ended a call or a wait that KeyboardInterrupt could not reach.

    ``except Exception`` catches it, unlike KeyboardInterrupt. A function may still run on its worker.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id, dist_autograd.watch(context_id, paused=True):
        ...     handle = context_id.backward_async(w.sum())
        ...     handle.cancel()
        ...     handle.wait()
        Traceback (most recent call last):
        nbdist.errors.Interrupted: the backward pass was cancelled, by cancel() of its handle, ...
    """


class DebuggerQuit(NbdistError):
    """The user's `q` in the debugger of a worker ended the function, or the cell, that stood there.

    Example:
        >>> raise nbdist.DebuggerQuit("`q` in the debugger of worker1 ended step at In[7]:12")
        Traceback (most recent call last):
        nbdist.errors.DebuggerQuit: `q` in the debugger of worker1 ended step at In[7]:12
    """
