"""Reads torch's flight recorder, which keeps the last 2,000 collectives of this process, as plain data.

The recorder knows of each collective the group, its number there, the sizes and dtypes, the thread and the lines that
called it, and whether it has ended. It does not know `send` and `recv` of gloo: `nbdist.cluster.worker.group_hooks`
does. Until a collective hangs, a look costs 3 µs.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import msgspec
import torch.distributed

from nbdist.cluster.group_history import Given, GroupHistory, Wait
from nbdist.cluster.whereabouts import say_place
from nbdist.cluster.worker import roots
from nbdist.cluster.worker.group_hooks import HOOKS, KEPT, Issued, title_of
from nbdist.cluster.worker.roots import Root
from nbdist.cluster.worker.wrapped_models import owner
from nbdist.code_lines import CodeLine, users_lines
from nbdist.thread_frames import thread_frames
from nbdist.torch_private import flight_record, groups_by_name, process_groups

# torch's names of dtypes in C++, where they are not Python's in capitals.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
# Kinds in which the members may give tensors of different sizes, or none.
_MAY_DIFFER = ("all_to_all", "alltoall", "send", "recv", "barrier")
_MAY_DIFFER_ON_NCCL = ("all_gather", "reduce_scatter")  # but not on gloo
# One member gives the tensors: the sizes of all members' outputs must agree.
_FROM_ONE = ("scatter",)
_LIFTED_FROM = 86_400.0  # seconds
_NOTED_WITHIN = 0.1  # seconds for torch to note the ends of collectives, on a busy machine
_Entry = Mapping[str, Any]
_Groups = Mapping[str, tuple[str, list[int]]]  # the title and the global ranks of each group, by torch's name
_COLLECTIVES = torch.distributed.distributed_c10d.__file__  # the file with the functions of ``torch.distributed``


def progress() -> tuple[int, bool | None]:
    """Return how many collectives this process has called, and whether one may not have ended. Takes 3 µs.

    Counts sends and receives, too, where they are known. The second is None if the user has switched the recorder off.
    """
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return HOOKS.transfers_called, None
    groups = flight_record(entries=False).get("pg_status", {}).values()
    counts = [(each["last_enqueued_collective"], each["last_completed_collective"]) for each in groups]
    has_unfinished = any(called != ended for called, ended in counts) or bool(HOOKS.waits_in())
    return HOOKS.transfers_called + sum(called for called, _ in counts), has_unfinished


def limits_left() -> dict[str, float]:
    """Return the seconds after which collectives in which this process waits now give up, by the titles of groups."""
    if not progress()[1]:
        return {}
    titles = {name: title_of(group) or f"group {name}" for name, group in groups_by_name().items()}
    found: dict[str, float] = {}
    for entry in flight_record().get("entries", ()):
        left = entry["timeout_ms"] / 1000 - (time.time_ns() - entry["time_created_ns"]) / 1e9
        # A limit of many days is one that `GroupLimits` has lifted.
        if not entry["retired"] and entry["process_group"][0] in titles and 0 < left < _LIFTED_FROM:
            found[titles[entry["process_group"][0]]] = left
    return found


def state() -> object:
    """Return what changes when this process makes a group or calls a collective. Takes some microseconds."""
    counts = flight_record(entries=False).get("pg_status", {})
    return list(process_groups()), {id: each["last_enqueued_collective"] for id, each in counts.items()}


def read(formed_at: int, *, places: bool) -> list[GroupHistory]:
    """Return the histories of the groups since ``formed_at``, by `time.time_ns`; with ``places``, with lines."""
    present, is_whole = _since(formed_at, flight_record(frames=places).get("entries", ()))
    titles = {name: title_of(group) for name, group in groups_by_name().items()}
    threads = thread_frames() if places else {}
    found = histories(present, process_groups(), titles, threads, is_whole, roots.noted())
    return HOOKS.add_transfers(found)


def last_collective(since: int, but: CodeType) -> str:
    """Return the collective that this process has called last, in words; "" if none since ``since``, by `time.time_ns`.

    Those that the function ``but`` has called do not count.
    """
    for entry in reversed(flight_record(frames=True).get("entries", ())):
        if all((each["filename"], each["name"]) != (but.co_filename, but.co_name) for each in entry.get("frames", ())):
            return _given(entry).text if entry["time_created_ns"] >= since else ""
    return ""


def decode(record: bytes, formed_at: int, groups: Iterable[GroupHistory]) -> list[GroupHistory]:
    """Return what the worker of a `Probe` has called in ``groups``, which other members have told, without its lines.

    ``record`` and ``formed_at`` are the probe's.
    """
    entries = msgspec.json.decode(record).get("entries", ())  # missing before the process's first collective
    present, is_whole = _since(formed_at, entries)
    ranks = {each.name: each.ranks for each in groups}
    return histories(present, ranks, {each.name: each.title for each in groups}, {}, is_whole)


class CollectiveCall(NamedTuple):
    """A collective, send or receive that this process has called. Times are of `time.monotonic`."""

    group: str  # torch's name, which is the same on all members; for a transfer, with its members and tag
    title: str
    ranks: list[int]
    number: int  # of the collective in its group
    given: Given
    came: float
    left: float  # when torch saw that it had ended; equals `came` on gloo, where torch never sees that
    is_over: bool


class CollectiveCalls(NamedTuple):
    """The collectives that this process has called since some time."""

    arrivals: list[CollectiveCall]
    rank: int | None  # None if this process is in no group
    last: dict[str, int]
    """The number of the last collective in each group; without groups of which the recorder may have dropped all."""
    missing_until: float | None = None
    """The time before which the recorder has dropped some; infinite if the user has switched it off."""


def calls_since(since: float) -> CollectiveCalls:
    """Return the collectives that this process has called since a time of `time.monotonic`, with their lines."""
    present = groups_by_name()
    if not present or os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return CollectiveCalls([], None, {}, math.inf if present else None)
    # A thread of gloo's notes an end after it has woken the thread that waits.
    deadline = time.monotonic() + _NOTED_WITHIN
    while progress()[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks = process_groups()
    groups = {name: (title_of(group) or f"group {name}", ranks[name]) for name, group in present.items()}
    ahead, rank = time.time() - time.monotonic(), torch.distributed.get_rank()
    found = choose_calls(flight_record(frames=True).get("entries", ()), groups, rank, since, ahead)
    return add_transfers(found, list(HOOKS.issued), HOOKS.counts(), since)  # a copy: the main thread may issue more


def choose_calls(entries: Sequence[_Entry], groups: _Groups, rank: int, since: float, ahead: float) -> CollectiveCalls:
    """Return what `calls_since` returns. Pure: from entries of a clock that is ``ahead`` of that of ``since``."""
    times = [entry["time_created_ns"] / 1e9 - ahead for entry in entries]
    missing_until = None if _since(int((since + ahead) * 1e9), entries)[1] else times[0]
    last = dict.fromkeys(groups, 0) if not entries or entries[0]["record_id"] == 0 else {}
    found: dict[tuple[str, int], CollectiveCall] = {}
    for entry, came in zip(entries, times, strict=True):
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if name not in groups or entry["is_p2p"]:
            continue
        if number < last.get(name, 0) and any(key[0] == name for key in found):
            # A later group of the same name numbers anew.
            found, missing_until = {key: each for key, each in found.items() if key[0] != name}, came
        last[name] = number
        if came >= since:
            left = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) / 1e9 - ahead
            arrival = CollectiveCall(name, *groups[name], number, _given(entry), came, left, entry["retired"])
            found.setdefault((name, number), arrival)  # NCCL puts several operations together
    return CollectiveCalls(list(found.values()), rank, last, missing_until)


def add_transfers(
    calls: CollectiveCalls, issued: Sequence[Issued], counts: Sequence[Issued], since: float
) -> CollectiveCalls:
    """Return the calls with the sends and receives ``issued`` since a time; without those from any member. Pure."""

    def call(each: Issued) -> CollectiveCall:
        ranks = [calls.rank or 0, each.peer] if each.is_send else [each.peer, calls.rank or 0]
        name = f"{each.group} {ranks} {each.tag}"
        return CollectiveCall(name, "", ranks, each.number, each.given, each.came, each.came, is_over=True)

    arrivals = [call(each) for each in issued if each.came >= since and each.peer >= 0]
    last = {one.group: one.number for one in map(call, counts)}
    missing_until = calls.missing_until
    if len(issued) == KEPT and issued[0].came > since:
        missing_until = max(missing_until or 0.0, issued[0].came)
    return CollectiveCalls([*calls.arrivals, *arrivals], calls.rank, {**calls.last, **last}, missing_until)


def _since(formed_at: int, entries: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the entries since the group formed, and whether the recorder has dropped none of these."""
    present = [each for each in entries if each["time_created_ns"] >= formed_at]
    # It drops the oldest first: with one from before, or the first of all, none is missing.
    return present, len(present) < len(entries) or not entries or entries[0]["record_id"] == 0


def histories(
    entries: Iterable[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]],
    titles: Mapping[str, str],
    threads: Mapping[int, FrameType],
    is_whole: bool = True,
    noted: Mapping[tuple[str, int, str], Root] = {},
) -> list[GroupHistory]:
    """Return the history of each group in ``groups``, which has the members' ranks, from the recorder's ``entries``.

    If they are not whole, a group without entries is left out: the recorder may have dropped them.
    """
    of_group: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in groups}
    for entry in entries:
        known, number = of_group.get(entry["process_group"][0]), entry["collective_seq_id"]
        if known is None or entry["is_p2p"]:
            continue
        if known and number - next(reversed(known)) not in (0, 1):  # 0: NCCL has put several operations together
            known.clear()  # a later group of the same name, which numbers anew; or the recorder has lost some
        known[number] = entry
    busy = any(say_place(each) is not None for each in threads.values())
    return [
        _history(name, groups[name], titles.get(name, ""), known, threads, busy, noted)
        for name, known in of_group.items()
        if known or is_whole
    ]


def _history(
    name: str,
    ranks: Sequence[int],
    title: str,
    entries: Mapping[int, Mapping[str, Any]],
    threads: Mapping[int, FrameType],
    busy: bool,
    noted: Mapping[tuple[str, int, str], Root],
) -> GroupHistory:
    main = threads.get(threading.main_thread().ident or 0)
    kinds: dict[Given, int] = {}
    given, waits = [], []
    for number, entry in entries.items():
        each = _given(entry)
        root = noted.get((name, number, each.kind))
        if root is not None and root.at <= entry["time_created_ns"]:  # else it is of a later one: see `roots.noted`
            each = msgspec.structs.replace(each, root=ranks[root.rank])
        if not entry["retired"]:
            thread = threads.get(int(entry["thread_id"]))
            waits.append(Wait(number, owner(thread, main, entry)))
            if not each.place:  # called by a thread of autograd's: the main thread waits for that
                each = msgspec.structs.replace(each, place=(say_place(main) or ("", ""))[1])
        given.append(kinds.setdefault(each, len(kinds)))
    return GroupHistory(name, title, list(ranks), next(iter(entries), 1), given, list(kinds), waits, busy)


def _given(entry: Mapping[str, Any]) -> Given:
    backend, _, kind = entry["profiling_name"].partition(":")
    may_differ = kind in _MAY_DIFFER or (backend == "nccl" and kind in _MAY_DIFFER_ON_NCCL)
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if not sizes or kind in _FROM_ONE:
        sizes, dtypes = entry["output_sizes"], entry["output_dtypes"]
    said = [f"{_dtype(dtype)}[{', '.join(map(str, size))}]" for size, dtype in zip(sizes, dtypes, strict=False)]
    more = f" and {len(said) - 1} more" if len(said) > 1 else ""
    elements = None if may_differ else sum(map(math.prod, sizes))
    frames = entry.get("frames", ())
    call = frames[0]["name"] if frames and frames[0]["filename"] == _COLLECTIVES else ""
    lines = users_lines(CodeLine(each["filename"], each["line"], each["name"]) for each in frames)
    place = next((line.place for line in lines), "")
    dtype = _dtype(dtypes[0]) if elements is not None and dtypes else ""
    return Given(kind, "".join(said[:1]) + more, elements, dtype, call, place)


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.lower())
