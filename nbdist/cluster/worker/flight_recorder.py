"""Reads torch's flight recorder, which keeps the last 2,000 collectives of this process, as plain data.

The recorder knows of each collective the group, its number there, the sizes and dtypes, the thread that called it, and
whether it has ended. It does not know `send` and `recv` of gloo. It names what gloo runs, not the function that the
user called: the frames of the thread that is in it tell that, and the line. Until a collective hangs, this costs 3 µs
for each look.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from nbdist.cluster.group_history import Given, GroupHistory, Wait
from nbdist.cluster.whereabouts import say_place
from nbdist.cluster.worker.wrapped_models import owner
from nbdist.code_places import is_users, shown_name
from nbdist.thread_frames import thread_frames
from nbdist.torch_private import flight_record, groups_by_name, process_groups

__all__ = ["has_unfinished", "histories", "line_of", "read"]

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
"""torch's names of dtypes in C++, where they are not Python's in capitals."""
_MAY_DIFFER = ("all_to_all", "alltoall", "send", "recv", "barrier")
"""Kinds in which the members may give tensors of different sizes, or none."""
_FROM_ONE = ("scatter",)
"""Kinds to which one member gives tensors: the sizes of all members' outputs must agree."""
_TITLES = {"default_pg": "default group", "undefined": ""}
_MESH = "mesh_"
"""The beginning of the description that torch gives to the group of a dimension of a DeviceMesh."""


def has_unfinished() -> bool:
    """Return whether a collective of this process may not have ended. Takes some microseconds."""
    groups = flight_record(entries=False).get("pg_status", {}).values()
    return any(each["last_enqueued_collective"] != each["last_completed_collective"] for each in groups)


def read(formed_at: int) -> list[GroupHistory]:
    """Return the histories of the groups of this process that have formed since ``formed_at``, by `time.time_ns`."""
    entries = [each for each in flight_record().get("entries", ()) if each["time_created_ns"] >= formed_at]
    titles = {name: _title(group) for name, group in groups_by_name().items()}
    return histories(entries, process_groups(), titles, thread_frames())


def histories(
    entries: Iterable[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]],
    titles: Mapping[str, str],
    frames: Mapping[int, FrameType],
) -> list[GroupHistory]:
    """Return the history of each group in ``groups``, which has the members' ranks, from the recorder's ``entries``.

    ``frames`` has the innermost frame of each thread of this process, by ident.
    """
    of_group: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in groups}
    for entry in entries:
        known, number = of_group.get(entry["process_group"][0]), entry["collective_seq_id"]
        if known is None or entry["is_p2p"]:
            continue
        if known and number <= next(reversed(known)):
            known.clear()  # a later group of the same name, which numbers anew
        if known and number > next(reversed(known)) + 1:
            known.clear()  # the recorder has lost what lies between
        known[number] = entry
    return [_history(name, groups[name], titles.get(name, ""), known, frames) for name, known in of_group.items()]


def _history(
    name: str,
    ranks: Sequence[int],
    title: str,
    entries: Mapping[int, Mapping[str, Any]],
    frames: Mapping[int, FrameType],
) -> GroupHistory:
    """Return the history of one group from its entries, by number, without gaps."""
    kinds: dict[Given, int] = {}
    given = [kinds.setdefault(_given(entry), len(kinds)) for entry in entries.values()]
    waits = [_wait(number, entry, frames) for number, entry in entries.items() if not entry["retired"]]
    return GroupHistory(name, title, list(ranks), next(iter(entries), 1), given, list(kinds), waits)


def _given(entry: Mapping[str, Any]) -> Given:
    kind = entry["profiling_name"].partition(":")[2]
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if not sizes or kind in _FROM_ONE:
        sizes, dtypes = entry["output_sizes"], entry["output_dtypes"]
    said = [f"{_dtype(dtype)}[{', '.join(map(str, size))}]" for size, dtype in zip(sizes, dtypes, strict=False)]
    more = f" and {len(said) - 1} more" if len(said) > 1 else ""
    elements = None if kind in _MAY_DIFFER else sum(map(math.prod, sizes))
    return Given(kind, "".join(said[:1]) + more, elements, _dtype(dtypes[0]) if elements is not None and dtypes else "")


def _wait(number: int, entry: Mapping[str, Any], frames: Mapping[int, FrameType]) -> Wait:
    """Return where the user's code waits in a collective that has not ended.

    The thread that called it may be one of autograd's, without a line of the user's: then the main thread waits.
    """
    thread, main = frames.get(int(entry["thread_id"])), frames.get(threading.main_thread().ident or 0)
    call, place = say_place(thread) or ("", "")
    if not place:
        _, place = say_place(main) or ("", "")
    call = call.removeprefix("dist.").partition("(")[0] if call.startswith("dist.") else ""
    return Wait(number, call, place, owner(thread, main, entry))


def line_of(group: str, number: int) -> str:
    """Return the line of the user's code that called a collective, such as ``In[7]:12``; "" if it is not known."""
    for entry in reversed(flight_record(frames=True).get("entries", ())):
        if (entry["process_group"][0], entry["collective_seq_id"]) == (group, number):
            places = [(each["filename"], each["line"]) for each in entry["frames"]]
            return next((f"{shown_name(file)}:{line}" for file, line in places if is_users(file)), "")
    return ""


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.lower())


def _title(group: Any) -> str:
    """Return a group in a user's words, such as ``mesh dim tp``; "" if it has no name of its own."""
    said = str(group.group_desc)
    if said.startswith(_MESH):
        return f"mesh dim {said.removeprefix(_MESH)}"
    return _TITLES.get(said, f"group {said!r}")
