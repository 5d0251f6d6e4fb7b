"""The map of a swarm: a row for each worker, a column for each block, so that it is seen who has what.

This is its form without a script, for saved notebooks and for places where nobody watches. Pure: a snapshot of a swarm
in, HTML out. A swarm is known by its shape only: its module needs transformers, which a notebook without one need not
have.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple, Protocol

from nbdist.pictures import as_image
from nbdist.views import tables
from nbdist.views.amounts import size

__all__ = ["Mapped", "Part", "as_html", "as_svg", "missing", "parts"]

_ROW = 20
_LETTER = 7
_LONGEST = 24
"""So many letters of a name are drawn."""
_COLOURS = {"route": "#d97706", "held": "#7fb0dd", "away": "#c9ced6", "missing": "#c53030"}
_KINDS = {
    "route": "on the session's route",
    "held": "with a worker",
    "away": "with a worker that is not online",
    "missing": "with nobody",
}
_SERVING = ("online", "draining")
"""Who is in another state has its blocks for nobody."""
_PASSING = re.compile(r"(?<=\bsession) \d+\.\d+|, \d+ ms\b")
"""What a log tells that is another each time: the ids of sessions, and how long it took."""


class Mapped(Protocol):
    """What a map needs of a swarm."""

    def snapshot(self) -> dict[str, Any]:
        """What is known of it; nobody is asked."""
        ...

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called when there is news, until what this returns is called."""
        ...

    def kill(self, name: str) -> None:
        """Kill a worker's process."""
        ...


class Part(NamedTuple):
    """Blocks of a worker that follow each other and are drawn alike."""

    begin: int
    end: int
    kind: str


def parts(server: Mapping[str, Any], route: Iterable[Sequence[Any]]) -> list[Part]:
    """What is drawn of a worker."""
    if server["state"] == "gone":
        return []
    serves = server["state"] in _SERVING
    way = {number for name, begin, end in route if name == server["name"] for number in range(begin, end)}
    return _runs((number, "away" if not serves else "route" if number in way else "held") for number in _held(server))


def missing(snapshot: Mapping[str, Any]) -> list[Part]:
    """The blocks that nobody has."""
    serving = [server for server in snapshot["servers"] if server["state"] in _SERVING]
    held = {number for server in serving for number in _held(server)}
    return _runs((number, "missing") for number in range(snapshot["count"]) if number not in held)


def _held(server: Mapping[str, Any]) -> list[int]:
    return [number for begin, end in server["blocks"] for number in range(begin, end)]


def _runs(numbers: Iterable[tuple[int, str]]) -> list[Part]:
    found: list[Part] = []
    for number, kind in numbers:
        if found and found[-1].end == number and found[-1].kind == kind:
            found[-1] = Part(found[-1].begin, number + 1, kind)
        else:
            found.append(Part(number, number + 1, kind))
    return found


def as_html(snapshot: Mapping[str, Any], *, lasting: bool = False) -> str:
    """The picture, a table and what has happened; if it is to be the same each time, without what a clock has told."""
    lines = [_head(snapshot), *_session(snapshot, lasting=lasting)]
    rows = [_row(server, lasting=lasting) for server in snapshot["servers"]]
    gone = [number for number, server in enumerate(snapshot["servers"]) if server["state"] == "gone"]
    table = tables.as_html(_COLUMNS_LASTING if lasting else _COLUMNS, rows, gone) if rows else ""
    log = "\n".join(_PASSING.sub("", text) if lasting else f"{_clock(at)}  {text}" for at, text in snapshot["log"])
    told = [
        *(f"<div>{escape(line)}</div>" for line in lines),
        f'<div style="overflow:auto">{as_image(as_svg(snapshot))}</div>',
        f'<div style="font-size:85%">{_legend(snapshot)}</div>{table}',
        f'<pre style="max-height:160px;overflow:auto">{escape(log)}</pre>' if log else "",
    ]
    return f'<div style="font-family:sans-serif;font-size:13px">{"".join(told)}</div>'


def as_svg(snapshot: Mapping[str, Any]) -> str:
    """The picture alone; where one points at blocks, it says whose they are."""
    count, servers, lost = snapshot["count"], snapshot["servers"], missing(snapshot)
    rows = [(server["name"], parts(server, snapshot["route"])) for server in servers]
    if lost:
        rows.append(("nobody", lost))
    cell = max(4, min(30, 420 // max(1, count)))
    left = 12 + _LETTER * max((min(len(name), _LONGEST) for name, _ in rows), default=0)
    width, height = left + max(1, count) * cell + 12, _ROW * (len(rows) + 1)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f"<title>{escape(_head(snapshot))}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200) if step * cell >= 24), 500)
    for number in range(0, count, step):
        drawn.append(f'<text x="{left + (number + 0.5) * cell}" y="14" text-anchor="middle">{number}</text>')
    for line, (name, own) in enumerate(rows, 1):
        top = line * _ROW
        shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        drawn.append(f'<text x="4" y="{top + 14}">{escape(shown)}</text>')
        drawn.append(f'<rect x="{left}" y="{top + 2}" width="{count * cell}" height="{_ROW - 4}" fill="#eee"/>')
        drawn += [_drawn(name, part, left, top, cell) for part in own]
    for number in range(1, count):
        x = left + number * cell
        drawn.append(f'<path d="M{x} {_ROW}V{height}" stroke="#fff"/>')
    return "".join([*drawn, "</svg>"])


def _drawn(name: str, part: Part, left: int, top: int, cell: int) -> str:
    inset = 2 if part.kind in ("route", "missing") else 5  # it is not told by the colour alone
    told = f"{_blocks([part])}: {name}" + (", on the session's route" if part.kind == "route" else "")
    return (
        f'<g><title>{escape(told)}</title><rect x="{left + part.begin * cell}" y="{top + inset}" '
        f'width="{(part.end - part.begin) * cell}" height="{_ROW - 2 * inset}" fill="{_COLOURS[part.kind]}"/></g>'
    )


# -- in words -------------------------------------------------------------------------------------

_COLUMNS_LASTING = ("worker", "state", "blocks", "bytes", "")
_COLUMNS = (*_COLUMNS_LASTING[:4], "cache", "sessions", "steps", "")


def _row(server: Mapping[str, Any], *, lasting: bool) -> list[str]:
    """What was only heard at some time is not the same each time."""
    runs = [Part(begin, end, "held") for begin, end in server["blocks"]]
    there = server["state"] != "gone"
    shared = [server["name"], server["state"], _numbers(runs), size(server["nbytes"]) if there else ""]
    heard = [_cache(server) if there else "", str(server["sessions"]) if there else "", str(server["steps"])]
    return [*shared, *([] if lasting else heard), server["note"]]


def _cache(server: Mapping[str, Any]) -> str:
    used, budget = size(server["cache"]), server["budget"]
    return used if budget is None else f"{used} of {size(budget)}"


def _head(snapshot: Mapping[str, Any]) -> str:
    states = [server["state"] for server in snapshot["servers"]]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lost = missing(snapshot)
    return (
        f"{_count(snapshot['count'], 'block')}, {size(snapshot['bytes'])}; {_count(len(states), 'worker')}"
        f"{f': {told}' if told else ''}{f'; nobody has {_blocks(lost)}' if lost else ''}"
    )


def _session(snapshot: Mapping[str, Any], *, lasting: bool) -> list[str]:
    lines, session = [], snapshot["session"]
    if session is not None:
        told = [*([] if lasting else [session["state"]]), _count(session["tokens"], "token")]
        if not lasting and session["rate"] and session["state"] != "idle":
            told.append(f"{session['rate']:.1f} tokens/s")
        name = "session" if lasting else f"session {session['id']}"
        lines.append(f"{name}: {', '.join(told)}")
    if snapshot["route"]:
        way = (f"{name} {_numbers([Part(begin, end, 'route')])}" for name, begin, end in snapshot["route"])
        lines.append(f"route: {' → '.join(way)}")
    return lines


def _legend(snapshot: Mapping[str, Any]) -> str:
    """Of what there is to see."""
    drawn = [part for server in snapshot["servers"] for part in parts(server, snapshot["route"])]
    seen = {part.kind for part in [*drawn, *missing(snapshot)]}
    return " ".join(
        f"<span style='color:{colour}'>■</span> {_KINDS[kind]}" for kind, colour in _COLOURS.items() if kind in seen
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else f'{noun}s'}"


def _blocks(runs: Sequence[Part]) -> str:
    return f"block{'' if sum(run.end - run.begin for run in runs) == 1 else 's'} {_numbers(runs)}"


def _numbers(runs: Iterable[Part]) -> str:
    """Blocks in a row, shortly."""
    return ", ".join(f"{run.begin}" if run.end - run.begin == 1 else f"{run.begin}-{run.end - 1}" for run in runs)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
