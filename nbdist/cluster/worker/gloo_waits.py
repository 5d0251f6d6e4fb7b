"""Ends waits for transfers that were cut off in the middle; gloo itself does not end them.

When a connection ends, gloo fails all its transfers but one: the transfer that has arrived in part
(`Pair::signalException` skips ``rx_``). A thread that waits for this transfer waits on until gloo's timeout of 30
minutes. This happens to the receiver of a large ``broadcast`` or ``send`` whenever the sender is killed.
`CutTransfers.end` does what gloo omits: it calls ``signalException`` of the buffer for which the thread waits.

gloo has no list of its buffers. Each is found from its waiting thread, by what Linux and the C++ ABI guarantee::

    thread ── waits at ──> condition variable, a member of an UnboundBuffer
                             +0   the address of its virtual table, which tells that it is an UnboundBuffer
                             +24  the address of its Context, which knows the connections of the process group

A wait is ended only if its group has no connection left, so that only the timeout could end it, and if the same
thread waits for the same buffer in two consecutive looks. Memory is read through ``/proc/self/mem``: a wrong address
there is an error, not a crash. Where torch lacks a symbol of `torch_private.SYMBOLS`, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.cluster.worker import gloo
from nbdist.torch_private import torch_library

# The system calls of a waiting thread, futex and restart_syscall, on x86-64 and on ARM. The second one continues a
# futex call after a signal has stopped the process; Linux still shows the arguments of the futex call.
_WAITING = ("202", "219", "98", "128")

_WORD = 8  # bytes of a pointer

_CONTEXT_AT = 24  # from a buffer's start to the address of its context

# Distances from a buffer's start at which its two condition variables lie: from 80 on x86-64, from 88 on ARM.
_CONDITIONS_AT = range(64, 192)

# From a virtual table's symbol to the functions, to which objects point; two words about the type precede.
_FUNCTIONS_AT = 16

# A variable of torch's: if set, members connect when one first sends, so having no connection need not mean a loss.
_LAZY = "TORCH_GLOO_LAZY_INIT"

# The text of the error, in which `nbdist.cluster.worker.collectives` recognises the words of gloo's own errors.
_ERROR_TEXT = b"[nbdist, in place of third_party/gloo/gloo/transport/tcp] Connection closed in the middle of a transfer"

# Held from a look until its waits are ended: a buffer whose wait another thread has ended may have been freed.
_looking = threading.Lock()


class CutTransfers:
    """Finds and ends the waits of this process that only gloo's timeout would end. Call `end` several times."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def end(self) -> int:
        """End waits that only gloo's timeout would end, and return how many were ended.

        Ends a wait only if the previous call found the same thread waiting for the same buffer, so the first call ends
        none. The thread gets a RuntimeError.
        """
        if (functions := _functions()) is None:
            return 0
        with _looking:
            waits = functions.hopeless_waits()
            cut = [buffer for thread, buffer in waits.items() if self._before.get(thread) == buffer]
            self._before = waits
            for buffer in cut:
                functions.fail(buffer)
            return len(cut)


class _Ranks(ctypes.Structure):
    """A ``std::vector<int>``."""

    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p)]


class _Functions:
    """Functions and addresses in torch's library and in C++'s. Raises AttributeError or OSError if one is missing."""

    def __init__(self) -> None:
        torchs, cpp = torch_library(), ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        pointer = ctypes.c_void_p
        self._buffers = _address(torchs, "_ZTVN4gloo9transport3tcp13UnboundBufferE") + _FUNCTIONS_AT
        self._contexts = _address(torchs, "_ZTVN4gloo9transport3tcp7ContextE") + _FUNCTIONS_AT
        self._connected = _function(torchs, "_ZNK4gloo9transport3tcp7Context21getConnectedPeerRanksEv", _Ranks, pointer)
        signal = "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE"
        self._signal = _function(torchs, signal, None, pointer, pointer)
        self._delete = _function(cpp, "_ZdlPv", None, pointer)
        self._allocate = _function(cpp, "__cxa_allocate_exception", pointer, ctypes.c_size_t)
        self._initialise = _function(cpp, "__cxa_init_primary_exception", pointer, pointer, pointer, pointer)
        self._make_error = _function(cpp, "_ZNSt13runtime_errorC1EPKc", None, pointer, ctypes.c_char_p)
        self._make_pointer = _function(cpp, "_ZNSt15__exception_ptr13exception_ptrC1EPv", None, pointer, pointer)
        self._type = _address(cpp, "_ZTISt13runtime_error")
        self._end_error = _address(cpp, "_ZNSt13runtime_errorD1Ev")

    def hopeless_waits(self) -> dict[int, int]:
        """Return the threads whose gloo wait only the timeout would end: by thread id, the address of the buffer."""
        found = {}
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            for task in Path("/proc/self/task").iterdir():
                call = gloo.system_call(int(task.name))
                if call[0] not in _WAITING:
                    continue
                # A thread that waits for something else has no buffer around the address at which it waits.
                buffer = self._buffer_around(memory, int(call[1], 16))
                context = _pointer_at(memory, buffer + _CONTEXT_AT) if buffer else 0
                if context and _pointer_at(memory, context) == self._contexts and not self._is_connected(context):
                    found[int(task.name)] = buffer
        return found

    def _buffer_around(self, memory: BinaryIO, address: int) -> int:
        """Return the address of the gloo buffer that has a condition variable at ``address``; 0 if there is none."""
        starts = (address - distance for distance in _CONDITIONS_AT if (address - distance) % _WORD == 0)
        return next((start for start in starts if _pointer_at(memory, start) == self._buffers), 0)

    def _is_connected(self, context: int) -> bool:
        """Return whether a process group, by the address of its gloo context, is connected to any other member."""
        ranks = self._connected(context)
        if ranks.begin:
            self._delete(ranks.begin)  # the vector was returned by value, so it is ours to free
        return bool(ranks.begin != ranks.end)

    def fail(self, buffer: int) -> None:
        """Make the thread that waits for a buffer throw a ``std::runtime_error``, in Python a RuntimeError.

        ``buffer`` is an address that `hopeless_waits` has returned; this is not checked.
        """
        # As a C++ compiler does for ``std::make_exception_ptr(std::runtime_error(text))``: memory from the runtime, the
        # exception's header, the constructor, a pointer to the whole.
        error = self._allocate(2 * _WORD)  # the size of a runtime_error
        self._initialise(error, self._type, self._end_error)
        self._make_error(error, _ERROR_TEXT)
        pointer = ctypes.c_void_p()
        self._make_pointer(ctypes.byref(pointer), error)
        self._signal(buffer, ctypes.byref(pointer))  # takes the pointer over, so that nothing has to be freed here


@functools.cache
def _functions() -> _Functions | None:
    """Return the `_Functions` of this process; None if one is missing, or torch connects members lazily."""
    lazily = os.environ.get(_LAZY, "0").lower() not in ("", "0", "n", "no", "f", "false", "off")
    with contextlib.suppress(AttributeError, OSError):
        return None if lazily else _Functions()
    return None


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(library[name], ctypes.c_void_p).value or 0  # AttributeError if it has no such name


def _pointer_at(memory: BinaryIO, address: int) -> int:
    """Return the pointer at an address of ``memory``; 0 if there is no memory there."""
    with contextlib.suppress(OSError, OverflowError):
        return int.from_bytes(os.pread(memory.fileno(), _WORD, address), sys.byteorder)
    return 0
