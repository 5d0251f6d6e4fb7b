"""Translates errors of nbdist into torch's, with torch's class and text. The cause of each is nbdist's own error.

Programs recognise torch's errors by class and text. Only a process in which compat is installed gets these errors;
elsewhere an error keeps its own type. If torch has no error for a case, each ``refuse_…`` raises nbdist's, and each
``of_…`` returns it.

========================================= ==========================================================================
nbdist's error                            torch's
========================================= ==========================================================================
a destination that is no name or id       ValueError: Cannot get WorkerInfo from name 0.5
Python's pickler refuses an argument      the pickler's own TypeError, AttributeError or PicklingError
the callee lacks a function or class      RuntimeError: Error on Node 1: ModuleNotFoundError ...
an error inside of a backward pass        RuntimeError: Error on Node 0: Error on Node 1: ...
an RRef used after `shutdown`             RuntimeError: ... Cannot call to_here() on it after deletion.
references that `shutdown` could not end  RuntimeError: Leaking RRef ... with fork Id ...
a GPU tensor without a device map         RuntimeError: TensorPipe RPC backend only supports CPU tensors by default ...
an impossible device map                  ValueError: Node worker0 has source devices with invalid indices ...
========================================= ==========================================================================
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn

from nbdist.errors import (
    DecodeError,
    EncodeError,
    NbdistError,
    NotInitialized,
    RemoteError,
    RRefError,
    UnknownWorker,
    UsageError,
)
from nbdist.ids import GlobalId
from nbdist.rpc import api
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.references.rref import RRef

NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"

_PICKLER_ERRORS = TypeError, AttributeError, pickle.PicklingError  # with which Python's pickler refuses an object
# torch's words for the uses of a deleted RRef. It has none for other uses.
_AFTER_DELETION = {"to_here()": "to_here() on it", "fork": "fork an UserRRef"}
_ON_BOTH_SIDES = """Default RPC pickler does not serialize
            function code. Ensure that UDFs are defined on both caller and
            callee modules."""


def refuse_call(error: NbdistError, to: Any = "") -> NoReturn:
    """Raise the error that torch raises for a call to the worker ``to``, which nbdist has refused with ``error``."""
    _raise(_of_call(error, to), error)


def refuse_worker_info(error: UsageError, name: Any) -> NoReturn:
    """Raise the error that torch raises for ``get_worker_info(name)``, which nbdist has refused with ``error``."""
    _raise(_of_worker_info(error, name), error)


def refuse_rref(error: NbdistError, what: str, rref: RRef[Any]) -> NoReturn:
    """Raise the error that torch raises for a use of ``rref``, which nbdist has refused with ``error``."""
    # ``what`` is "to_here()", "fork" or the like, and empty for a call of a method of the value.
    _raise(_of_rref(error, what, rref), error)


def _of_rref(error: NbdistError, what: str, rref: RRef[Any]) -> Exception:
    # First: after `shutdown`, an RRef of another worker has both ended and been forgotten, and torch says "deleted".
    if rref.is_forgotten() and what in _AFTER_DELETION:
        names = f"UserRRef(rref_id={rref.id}, fork_id={rref.fork_id})"
        return RuntimeError(f"{names} has been deleted. Cannot call {_AFTER_DELETION[what]} after deletion.")
    if rref.has_ended() and not (what == "local_value()" and not rref.is_owner()):
        return RuntimeError(NO_AGENT)
    return _of_call(error, "") if isinstance(error, UsageError) else error


def _raise(said: Exception, error: Exception) -> NoReturn:
    try:
        if said is error:
            raise error
        raise said from error
    finally:
        del said, error  # else each error and this frame, to which its traceback refers, would form a cycle


def _of_call(error: NbdistError, to: Any) -> Exception:
    if isinstance(error, NotInitialized):
        return NotInitialized("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
    if isinstance(error, UnknownWorker):
        to = to.name if isinstance(to, WorkerInfo) else to
        return UnknownWorker(f"could not find destination {'name' if isinstance(to, str) else 'id'} {to}: {error}")
    if isinstance(error, EncodeError):
        return _of_unmapped(error) if error.unmapped else _of_pickler(error)
    if type(error) is UsageError and not isinstance(to, str | int | WorkerInfo):
        return ValueError(f"Cannot get WorkerInfo from name {to}")
    return error


def _of_unmapped(error: EncodeError) -> RuntimeError:
    what = "Response" if error.unmapped == "result" else "Request"
    return RuntimeError(
        "TensorPipe RPC backend only supports CPU tensors by default; send tensor.cpu(), or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions`. {what} device mapping is not available: {error}"
    )


def refuse_init(error: UsageError) -> NoReturn:
    """Raise the error that torch raises for an ``init_rpc`` that nbdist has refused with ``error``."""
    text = str(error)  # an impossible device map, for which torch has a ValueError, begins with the node
    _raise(ValueError(text) if text.startswith("Node ") else error, error)


def _of_pickler(error: EncodeError) -> Exception:
    cause: BaseException | None = error
    while isinstance(cause, NbdistError):
        cause = cause.__cause__
    # A copy, because ``error`` will be its cause, and it is the cause of ``error``.
    return type(cause)(*cause.args) if isinstance(cause, Exception) and type(cause) in _PICKLER_ERRORS else error


def _of_worker_info(error: UsageError, name: Any) -> Exception:
    said = _of_call(error, name)
    if isinstance(said, ValueError):
        return TypeError(f"get_worker_info(): incompatible function arguments. Invoked with: {name!r}")
    return said


def refuse_file(file: io.TextIOWrapper) -> NoReturn:
    """Raise TypeError, with pickle's text, for an open file in a message. cloudpickle would send its contents."""
    raise TypeError(f"cannot pickle '_io.{type(file).__name__}' object")


def of_lacking(error: BaseException, worker: str) -> BaseException:
    """Return torch's error for a call whose function ``worker`` lacks, or whose result is on an unmapped GPU."""
    # `nbdist.rpc.failures` calls this for each error that a call brings back.
    if isinstance(error, EncodeError) and error.unmapped:
        unmapped = _of_unmapped(error)
        unmapped.__cause__ = error
        return unmapped
    if not isinstance(error, DecodeError) or not error.lacks:
        return error
    kind, _, text = error.lacks.partition(": ")
    id = _id_of(worker)
    if kind == AttributeError.__name__:
        where = f"On WorkerInfo(id={id}, name={worker})"
        said = RuntimeError(f'AttributeError: {where}:\nAttributeError("{text} {_ON_BOTH_SIDES}")')
    else:
        import_error = error.lacks  # such as "ModuleNotFoundError: No module named 'm'"
        said = RuntimeError(f"Error on Node {id}: {import_error}")
    said.__cause__ = error
    return said


def of_backward(error: Exception, root: int) -> Exception:
    """Return torch's error for a backward pass that ends with ``error``; the worker with the id ``root`` began it."""
    if isinstance(error, NbdistError) and not isinstance(error, RemoteError):
        return error  # from outside of the pass, such as the loss of a worker
    text = f"Error on Node {root}: "
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised on ")]
    if notes:
        arose = _id_of(notes[-1].removeprefix("raised on ").partition(",")[0])
        text += f"Error on Node {arose}: " if arose != root else ""
    return RuntimeError(f"{text}{error}")


def _id_of(worker: str) -> int | str:
    with contextlib.suppress(NbdistError):
        return api.get_worker_info(worker).id
    return worker  # its name, if it is not a member any more


def of_leaks(forks: Sequence[tuple[GlobalId, GlobalId]]) -> RuntimeError:
    """Return torch's error for an RPC that has ended while other workers still refer to values of this worker."""
    said = RuntimeError("".join(f"Leaking RRef {rref} with fork Id {fork}\n" for rref, fork in forks))
    said.__cause__ = RRefError(
        f"{len(forks)} references to values of this worker were not deleted before shutdown; next time, delete the "
        "RRefs before it"
    )
    return said
