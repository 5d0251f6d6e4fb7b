"""Draws the map of a swarm: a row for each worker, a column for each block, coloured where the worker has the block.

This is the form without a script, for saved notebooks; `nbdist.views.widgets.map` is the live form. Pure: a snapshot of
a swarm in, HTML out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.amounts import counted, plural, size
from nbdist.views import tables
from nbdist.views.drawing.pictures import as_image, legend, svg, themed

if TYPE_CHECKING:
    from nbdist.swarm.swarm import Swarm  # which needs transformers

_ROW = 20  # the height of a row in pixels
_LETTER = 7  # the width of a letter in pixels, about
_LONGEST = 24  # letters of a worker's name that are drawn
_COLOURS = {"route": "#d97706", "held": "#5b9bd5", "away": "#a0a5ad", "was": "#a0a5ad", "missing": "#c53030"}
_KINDS = {
    "route": "on the session's route",
    "held": "with a worker",
    "away": "with a worker that is not online",
    "was": "with a worker, as long as the swarm served",
    "missing": "with nobody",
}
_NUMBER = re.compile(r"(\d+)")
_PROCESS = re.compile(r"^client\d+$")  # a client that is no worker, with its process id
_SERVING = ("online", "draining")  # the states in which a worker's blocks can be used
# The parts of a log line that differ in each run, and are left out of lasting pictures: session ids and times.
_VARIES_BY_RUN = re.compile(r"(?<=\bsession) [0-9a-f]+\.\d+|, [\d.]+ (?:µs|ms|s)\b")


def snapshot_of(swarm: Swarm) -> dict[str, Any]:
    """Return a swarm's snapshot for a map: one server for each worker, in order; ``"over"`` if it has ended.

    ``"users"`` has a line for each client.
    """
    found = swarm.snapshot()
    return {**found, "servers": in_order(found["servers"]), "over": swarm.ended, "users": users(found["clients"])}


def in_order(servers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return servers in the order of their workers' names, with numbers as numbers: worker2 before worker10."""
    last = {server["name"]: server for server in servers}  # a worker that came back has several: the last counts
    return [last[name] for name in sorted(last, key=_sort_key)]


def _sort_key(name: str) -> list[tuple[int, str]]:
    # Pairs, so that a number is never compared with a text.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]


class MapPart(NamedTuple):
    """Consecutive blocks of a worker, from ``begin`` to before ``end``, that are drawn alike."""

    begin: int
    end: int
    kind: str  # one of `_KINDS`


def parts(server: Mapping[str, Any], route: Iterable[Sequence[Any]], *, over: bool = False) -> list[MapPart]:
    """Return a worker's blocks as parts: runs of consecutive blocks that are drawn alike; none if the worker is gone.

    ``route`` is the session's route, as (worker, begin, end); ``over`` says that the swarm has ended.
    """
    if server["state"] == "gone":
        return []
    unusable = "was" if over else "away" if server["state"] not in _SERVING else ""
    way = {number for name, begin, end in route if name == server["name"] for number in range(begin, end)}
    return _parts_of_one_kind(
        (number, unusable or ("route" if number in way else "held")) for number in _loaded_blocks(server)
    )


def missing(snapshot: Mapping[str, Any]) -> list[MapPart]:
    """Return the blocks that no serving worker has, as runs of consecutive blocks; none for a swarm that is over."""
    if snapshot["over"]:
        return []
    serving = [server for server in snapshot["servers"] if server["state"] in _SERVING]
    held = {number for server in serving for number in _loaded_blocks(server)}
    return _parts_of_one_kind((number, "missing") for number in range(snapshot["count"]) if number not in held)


def _loaded_blocks(server: Mapping[str, Any]) -> list[int]:
    return [number for begin, end in server["blocks"] for number in range(begin, end)]


def _parts_of_one_kind(numbers: Iterable[tuple[int, str]]) -> list[MapPart]:
    """Return blocks, each given by its number and kind, as parts: consecutive blocks of one kind make one part."""
    found: list[MapPart] = []
    for number, kind in numbers:
        if found and found[-1].end == number and found[-1].kind == kind:
            found[-1] = MapPart(found[-1].begin, number + 1, kind)
        else:
            found.append(MapPart(number, number + 1, kind))
    return found


def as_html(snapshot: Mapping[str, Any], *, lasting: bool = False) -> str:
    """Return a snapshot that `snapshot_of` made as HTML: the picture, a table of the workers, and the log.

    With ``lasting``, times, rates, session ids and other values that differ in each run are left out.
    """
    used = users(snapshot["clients"], lasting=True) if lasting else snapshot["users"]
    lines = [_head(snapshot), *_session(snapshot, lasting=lasting), *([] if snapshot["over"] else used)]
    known = lasting or snapshot["over"]  # then cache, sessions and steps are left out
    rows = [_row(server, lasting=known, over=snapshot["over"]) for server in snapshot["servers"]]
    faint = [n for n, server in enumerate(snapshot["servers"]) if server["state"] == "gone" or snapshot["over"]]
    table = tables.as_html(_COLUMNS_LASTING if known else _COLUMNS, rows, faint) if rows else ""
    log = "\n".join(
        _VARIES_BY_RUN.sub("", text) if lasting else f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}"
        for at, text in snapshot["log"]
    )
    return themed(
        *(f"<div>{escape(line)}</div>" for line in lines),
        as_image(as_svg(snapshot)),
        f"<div>{_legend(snapshot)}</div>{table}",
        f'<pre style="max-height:160px;overflow:auto">{escape(log)}</pre>' if log else "",
    )


def as_svg(snapshot: Mapping[str, Any]) -> str:
    """Return the picture as SVG. Under the pointer, blocks have a tip that names their worker."""
    count, servers, lost = snapshot["count"], snapshot["servers"], missing(snapshot)
    rows = [(server["name"], parts(server, snapshot["route"], over=snapshot["over"])) for server in servers]
    if lost:
        rows.append(("nobody", lost))
    cell = max(4, min(30, 420 // max(1, count)))
    left = 12 + _LETTER * max((min(len(name), _LONGEST) for name, _ in rows), default=0)
    width, height = left + max(1, count) * cell + 12, _ROW * (len(rows) + 1)
    drawn = []
    # The numbers are at least 24 pixels apart, or they would run into each other.
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200) if step * cell >= 24), 500)
    for number in range(0, count, step):
        x = left + (number + 0.5) * cell
        drawn.append(f'<text x="{x}" y="14" text-anchor="middle" class="ink">{number}</text>')
    for line, (name, own) in enumerate(rows, 1):
        top = line * _ROW
        shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        drawn.append(f'<text x="4" y="{top + 14}" class="ink">{escape(shown)}</text>')
        drawn.append(f'<rect x="{left}" y="{top + 2}" width="{count * cell}" height="{_ROW - 4}" class="track"/>')
        drawn += [_draw_part(name, part, left, top, cell) for part in own]
    # Last, so that the lines between blocks lie over the bars.
    drawn += [f'<path d="M{left + number * cell} {_ROW}V{height}" class="gap"/>' for number in range(1, count)]
    return svg(width, height, _head(snapshot), drawn)


def _draw_part(name: str, part: MapPart, left: int, top: int, cell: int) -> str:
    """Return a run of blocks as SVG. ``left`` and ``top`` are the corner of the row; ``cell`` is a block's width."""
    inset = 2 if part.kind in ("route", "missing") else 5  # taller bars, for people who cannot tell the colours
    told = f"{_blocks([part])}: {name}" + (", on the session's route" if part.kind == "route" else "")
    return (
        f'<g><title>{escape(told)}</title><rect x="{left + part.begin * cell}" y="{top + inset}" '
        f'width="{(part.end - part.begin) * cell}" height="{_ROW - 2 * inset}" fill="{_COLOURS[part.kind]}"/></g>'
    )


# -- in words -------------------------------------------------------------------------------------

_COLUMNS_LASTING = ("worker", "state", "blocks", "bytes", "")
_COLUMNS = (*_COLUMNS_LASTING[:4], "cache", "sessions", "steps", "")


def _row(server: Mapping[str, Any], *, lasting: bool, over: bool) -> list[str]:
    runs = [MapPart(begin, end, "held") for begin, end in server["blocks"]]
    there = server["state"] != "gone"
    state = "" if over and there else server["state"]  # the last state of a server that has ended says nothing
    shared = [server["name"], state, _numbers(runs), size(server["nbytes"]) if there else ""]
    heard = [_cache(server) if there else "", str(server["sessions"]) if there else "", str(server["steps"])]
    return [*shared, *([] if lasting else heard), server["note"]]


def _cache(server: Mapping[str, Any]) -> str:
    used, budget = size(server["cache"]), server["budget"]
    return used if budget is None else f"{used} of {size(budget)}"


def _head(snapshot: Mapping[str, Any]) -> str:
    """Return the line above the map: blocks, bytes, workers by state, and missing blocks."""
    blocks, workers = counted(snapshot["count"], "block"), counted(len(snapshot["servers"]), "worker")
    if snapshot["over"]:
        return f"this swarm is over; it had {blocks}, {size(snapshot['bytes'])}, and {workers}"
    states = [server["state"] for server in snapshot["servers"]]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lost = missing(snapshot)
    return (
        f"{blocks}, {size(snapshot['bytes'])}; {workers}"
        f"{f': {told}' if told else ''}{f'; nobody has {_blocks(lost)}' if lost else ''}"
    )


def _session(snapshot: Mapping[str, Any], *, lasting: bool) -> list[str]:
    """Return the lines about the current session and its route."""
    lines, session = [], snapshot["session"]
    if snapshot["over"]:
        return []
    if session is not None:
        told = [*([] if lasting else [session["state"]]), counted(session["tokens"], "token")]
        if not lasting and session["rate"] and session["state"] != "idle":
            told.append(f"{session['rate']:.1f} tokens/s")
        name = "session" if lasting else f"session {session['id']}"
        lines.append(f"{name}: {', '.join(told)}")
    if snapshot["route"]:
        way = (f"{name} {_numbers([MapPart(begin, end, 'route')])}" for name, begin, end in snapshot["route"])
        lines.append(f"route: {' → '.join(way)}")
    return lines


def users(clients: Iterable[Mapping[str, Any]], *, lasting: bool = False) -> list[str]:
    """Return a line for each client of a swarm; with ``lasting``, only with the number of its sessions."""
    return [_user(client, lasting=lasting) for client in clients]


def _user(client: Mapping[str, Any], *, lasting: bool) -> str:
    sessions = counted(client["sessions"], "session")
    if lasting:
        return f"used by {_PROCESS.sub('another program', client['name'])}: {sessions}"
    rate = f", {client['rate']:.1f} tokens/s" if client["rate"] else ""
    cache = f", {size(client['cache'])} of caches" if client["cache"] else ""
    written, waiting = client["texts"]
    texts = f", over HTTP {counted(written, 'text')}, and {waiting} wait" if written or waiting else ""
    return f"used by {client['name']}: {sessions}{rate}{cache}{texts}"


def _legend(snapshot: Mapping[str, Any]) -> str:
    route, over = snapshot["route"], snapshot["over"]
    drawn = [part for server in snapshot["servers"] for part in parts(server, route, over=over)]
    seen = {part.kind for part in [*drawn, *missing(snapshot)]}
    return legend((colour, _KINDS[kind]) for kind, colour in _COLOURS.items() if kind in seen)


def _blocks(runs: Sequence[MapPart]) -> str:
    """Return blocks as text: ``block 3`` or ``blocks 0-4, 7``."""
    return f"{plural(sum(run.end - run.begin for run in runs), 'block')} {_numbers(runs)}"


def _numbers(runs: Iterable[MapPart]) -> str:
    """Return the numbers of blocks as text: ``0-4, 7``."""
    return ", ".join(f"{run.begin}" if run.end - run.begin == 1 else f"{run.begin}-{run.end - 1}" for run in runs)
