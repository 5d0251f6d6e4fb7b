"""`GroupHooks`: sees each operation of this worker's process groups just before torch issues it, from torch 2.14 on.

An older torch calls no hooks: there it sees only sends and receives, which it counts as they are issued.

torch calls the hook with the GIL, in the thread that issues the operation: the one that runs the cell, or a thread of
autograd's for DDP on a GPU. It takes some microseconds, and halts a pass that is paused. In a pass, which may have many
buckets, it leaves out the tensors, and all but the first operation in 10 ms. An error in it would fail the operation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, partial, wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch.distributed
from msgspec.structs import replace

from nbdist.autograd.watching.node_hooks import come_to_collective
from nbdist.cluster.group_history import TRANSFERS, Given, GroupHistory, Transfers
from nbdist.cluster.processes.last_operations import LastOperations
from nbdist.cluster.whereabouts import say_place
from nbdist.cluster.worker import gloo
from nbdist.cluster.worker.wrapped_models import owner
from nbdist.code_places import BACKWARD, is_users
from nbdist.thread_frames import thread_frames
from nbdist.torch_private import groups_by_name, process_groups, watch_new_groups

_HOOK = 0x6E6264  # the number of our hooks of a group
_OLDER = 7  # transfers of one kind that are kept, beside the newest
KEPT = 2000  # sends and receives, for timelines
_SAME_PASS = 0.01  # seconds within which the operations of a backward pass are noted once
_TEXTS = 1000  # kinds of operations whose texts are kept
# torch's names of the hooks, where they are not those of ``torch.distributed``.
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_NAMES_OF_TRANSFERS = ("tensors", "dstRank", "srcRank", "tag")  # of the arguments of torch's methods
_TITLES = {"default_pg": "default group", "undefined": ""}
_MESH = "mesh_"  # begins the description of a group that is a dimension of a DeviceMesh
_is_users = cache(is_users)


class _Kind(IntEnum):
    send = 0
    recv = 1


class _Transfer(NamedTuple):
    """A send or receive, as a hook of torch's would describe it."""

    name: _Kind
    root: int = -1


class Issued(NamedTuple):
    """One send or receive that this worker has issued."""

    came: float
    """When, by `time.monotonic`."""
    group: str
    is_send: bool
    peer: int
    """The global rank of the other member; -1 for a receive from any member."""
    tag: int
    number: int
    """Among those with the same group, peer and tag."""
    given: Given


class GroupHooks:
    """The hooks of this worker's process groups. There is one for all, `HOOKS`, because torch's groups are global."""

    def __init__(self) -> None:
        self.transfers_called = 0
        self.issued = deque[Issued](maxlen=KEPT)
        """The last sends and receives."""
        # By group, of those that have formed since `follow`: by kind, the other's rank, and tag.
        self._transfers: dict[str, dict[object, Transfers]] = {}
        self._begun: dict[tuple[str, int], tuple[tuple[bool, int, int], Given]] = {}  # those that torch has not issued
        self._counting = threading.Lock()
        # The id of the frame of the last backward pass, and when one of its operations was noted.
        self._pass, self._pass_noted = 0, 0.0
        # By operation and instruction of the user's: see `_say`; and the user's code.
        self._kinds: dict[object, tuple[Given, int, bytes, CodeType | None]] = {}

    def follow(self) -> int:
        """Let torch call this object in each group that forms from now on. Call once, before the first group.

        Returns the file of the operations that survives this process: see `LastOperations`.
        """
        self._operations = LastOperations()
        group = torch.distributed.ProcessGroup
        if hasattr(group, "register_pre_hook"):
            watch_new_groups(self._hook)
        else:
            watch_new_groups(lambda name, _: self._begin(name))
            for kind in ("send", "recv", "recv_anysource"):
                setattr(group, kind, self._counted(kind[:4], getattr(group, kind)))
        return self._operations.file

    def _counted(self, kind: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of torch's groups that issues a send or receive by ``issue``, and counts it."""

        @wraps(issue)
        def issue_counted(group: Any, *arguments: Any, **named: Any) -> Any:
            work = issue(group, *arguments, **named)  # an error of torch's: it has issued nothing
            with contextlib.suppress(Exception):  # never the user's
                # In torch's order, which torch also takes by name; there is no peer in `recv_anysource`.
                tensors, *peer, tag = (*arguments, *(named[each] for each in _NAMES_OF_TRANSFERS if each in named))
                operation = _Transfer(_Kind[kind], *peer)
                known, rank, *_ = self._known(group.group_name, operation, tensors, sys._getframe(1))
                self._count(group.group_name, (kind == "send", rank, tag), known)
            return work

        return issue_counted

    def _begin(self, name: str) -> None:
        with self._counting:  # an earlier group of this name has been destroyed
            self._transfers[name] = {}  # also to say that there are none
            self.issued = deque((each for each in self.issued if each.group != name), KEPT)

    def _hook(self, name: str, group: Any) -> None:
        self._begin(name)
        # Not with the group, which holds the hook, and would never end.
        group.register_pre_hook(_HOOK, partial(self._before, name))

    def _before(self, group: str, operation: Any) -> None:
        """Note an operation that torch is about to issue."""
        try:  # not `contextlib.suppress`, which calls more
            come_to_collective(partial(_say_held, group, operation))  # ends by Ctrl-C, too, which is no `Exception`
            # No frame in a thread of autograd's, for which the main thread waits.
            now, called = time.time(), sys._getframe().f_back
            if called is not None and called.f_code.co_filename not in BACKWARD:
                tensors = operation.input_tensors or operation.output_tensors
            elif id(called) == self._pass and now - self._pass_noted < _SAME_PASS:
                return  # C++ has called it, such as DDP for a bucket: a step has many, which differ in the tensors
            else:
                tensors, self._pass, self._pass_noted = [], id(called), now
            kind = self._known(group, operation, tensors, called)
            self._operations.note(now, kind[2])
            if kind[0].kind in TRANSFERS:
                is_first = not self._transfers[group]
                # torch's hooks do not know the tag, but the frame of its `isend` or `irecv` does.
                frame = called or _main_frame()
                key = kind[0].kind == "send", kind[1], (frame.f_locals.get("tag") if frame else 0) or 0
                self._begun[group, operation.op_id] = key, kind[0]
                if is_first:  # not before: each operation pays for the hook. It comes too late for this one
                    groups_by_name()[group].register_post_hook(_HOOK, partial(self._after, group))
                    self._after(group, operation)
        except Exception:  # never the user's
            return

    def _known(
        self, group: str, operation: Any, tensors: Any, called: FrameType | None
    ) -> tuple[Given, int, bytes, CodeType | None]:
        """Return what `_say` returns for an operation, and the user's code that calls it; made once for each kind."""
        frame = called = called or _main_frame()
        while frame is not None and not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
        # Not the line, which takes 0.4 µs, ten times as long. The id of a code is its own while `_kinds` has it.
        at = frame and (id(frame.f_code), frame.f_lasti)
        first = tensors and (tensors[0].shape, tensors[0].dtype, len(tensors))
        key = group, at, int(operation.name), operation.root, *first
        if (kind := self._kinds.get(key)) is None:
            self._kinds = self._kinds if len(self._kinds) < _TEXTS else {}
            kind = self._kinds[key] = (*_say(operation, group, tensors, called), frame and frame.f_code)
        return kind

    def _after(self, group: str, operation: Any) -> None:
        """Count a transfer that torch has issued: not one that it has refused, such as of a tensor with gaps."""
        if (begun := self._begun.pop((group, operation.op_id), None)) is not None:
            self._count(group, *begun)

    def _count(self, group: str, key: tuple[bool, int, int], given: Given) -> None:
        with self._counting:  # several threads may send
            of_group = self._transfers[group]
            before = of_group.get(key) or Transfers(*key, 0, [])
            of_group[key] = Transfers(*key, before.count + 1, [given, *before.newest[:_OLDER]])
            self.issued.append(Issued(time.monotonic(), group, *key, before.count + 1, given))
            self.transfers_called += 1

    def counts(self) -> list[Issued]:
        """Return the last one of each group, kind, peer and tag, without its time."""
        return [
            Issued(0.0, group, each.is_send, each.peer, each.tag, each.count, each.newest[0])
            for group, told in list(self._transfers.items())
            for each in list(told.values())
        ]

    def add_transfers(self, histories: Sequence[GroupHistory]) -> list[GroupHistory]:
        """Return the histories of this worker's groups with their sends and receives, as far as these are known."""
        kinds = () if any(each.waits for each in histories) else self.waits_in()
        own = {  # copies: the main thread may call more
            name: [replace(each, waits=each.is_send in kinds) for each in list(told.values())]
            for name, told in list(self._transfers.items())
        }
        return [replace(each, transfers=own.get(each.name)) for each in histories]

    def waits_in(self) -> tuple[bool, ...]:
        """Return the kinds of transfers of which the main thread may wait for one: True for sends, False for receives.

        In ``wait`` of a handle, these are both kinds; it may also be the handle of a collective.
        """
        frame = _main_frame() if self.transfers_called else None
        call, _ = say_place(frame) or ("", "")
        is_wait = frame is not None and gloo.method_called(frame) == "wait"
        return tuple(each for each in (True, False) if is_wait or call.startswith("dist.send" if each else "dist.recv"))


def _say_held(group: str, operation: Any) -> str:
    tensors, called = operation.input_tensors or operation.output_tensors, _main_frame()
    given, _, text = _say(operation, group, tensors, called)
    known = {"process_group": (group,), "profiling_name": given.kind, "input_sizes": [each.shape for each in tensors]}
    ranks = ",".join(map(str, process_groups()[group]))
    said = [text.decode(), title_of(groups_by_name()[group]) or f"group of ranks {ranks}"]
    return ", ".join([*said, *(f"for {part}" for part in [owner(sys._getframe(), called, known)] if part)])


def title_of(group: Any) -> str:
    """Return a group in a user's words, such as ``mesh dim tp``; "" if it has no name of its own."""
    said = str(group.group_desc)
    if said.startswith(_MESH):
        return f"mesh dim {said.removeprefix(_MESH)}"
    return _TITLES.get(said, f"group {said!r}")


def _main_frame() -> FrameType | None:
    return thread_frames().get(threading.main_thread().ident or 0)


def _say(operation: Any, group: str, tensors: Any, called: FrameType | None) -> tuple[Given, int, bytes]:
    """Return an operation, the other member's global rank (-1 for none), and the text for `LastOperations`."""
    name = operation.name.name.lower()
    said = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors[:1]]
    call, place = say_place(called) or ("", "")
    call = call.removeprefix("dist.").partition("(")[0] if call.startswith("dist.") else ""  # not ``loss.backward()``
    given = Given(_NAMES.get(name, name), "".join(said), call=call, place=place)
    peer = process_groups()[group][operation.root] if name in TRANSFERS and operation.root >= 0 else -1
    to = f" {'to' if name == 'send' else 'from'} rank {peer}" if peer >= 0 else ""
    return given, peer, f"{given.text}{to}".encode()


HOOKS = GroupHooks()
