"""Shows an examination of a cluster: the facts about each member, the speed of each link, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from nbdist.amounts import duration, size
from nbdist.cluster.examination.examination import Examination
from nbdist.cluster.examination.machine import MachineFacts
from nbdist.cluster.examination.speed import LinkSpeed
from nbdist.views import tables
from nbdist.views.drawing.pictures import themed

# The columns of facts: the name of each, and the text of a cell.
_COLUMNS: tuple[tuple[str, Callable[[MachineFacts], str]], ...] = (
    ("host", lambda facts: facts.host),
    ("nbdist", lambda facts: facts.nbdist),
    ("Python", lambda facts: facts.python),
    ("torch", lambda facts: facts.torch),
    ("GPUs", lambda facts: _gpus(facts)),
    ("NCCL", lambda facts: facts.nccl or "none"),
    ("memory left", lambda facts: f"{size(facts.memory_left)} of {size(facts.memory)}"),
    ("/dev/shm", lambda facts: "none" if facts.shared_files_left is None else size(facts.shared_files_left)),
)
_SHARED_MEMORY = "memory left: large tensors within a host are shared in it; NCCL and DataLoader use /dev/shm instead"
_LINKS = "latency of a small call, there and back, and rate of a large tensor, from the row's member to the column's"


def as_text(found: Examination) -> str:
    """Return an examination as lines of text: two tables, and a line for each finding."""
    lines = [*tables.as_lines(*_members(found)), _SHARED_MEMORY, ""]
    lines += [*tables.as_lines(*_links(found)), _LINKS, ""]
    return "\n".join([*lines, *_findings(found)])


def as_html(found: Examination) -> str:
    """Return an examination as HTML: two tables, and a line for each finding."""
    parts = []
    for table, explained in ((_members(found), _SHARED_MEMORY), (_links(found), _LINKS)):
        parts += [tables.as_html(*table), f'<div style="opacity:.6">{escape(explained)}</div>']
    parts += [f'<div style="overflow-wrap:anywhere">{escape(line)}</div>' for line in _findings(found)]
    return themed(*parts)


def _members(found: Examination) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of members."""
    notebook = found.members[0].name
    rows = []
    for member in found.members:
        link = found.link(notebook, member.name)
        ahead = f"{link.ahead * 1e3:+.1f} ms" if link is not None and link.ahead is not None else ""
        facts = [read(member.facts) if member.facts is not None else "" for _, read in _COLUMNS]
        rows.append([member.name, member.state, member.device, *facts, ahead])
    return ["member", "state", "device", *(name for name, _ in _COLUMNS), "clock"], rows


def _gpus(facts: MachineFacts) -> str:
    if not facts.gpu_count:
        return "none"
    names = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus))  # several GPUs of one kind are named once
    return f"{facts.gpu_count}: {names}" if names else str(facts.gpu_count)


def _links(found: Examination) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the matrix of links: from the member of the row to the member of the column."""
    names = [member.name for member in found.members]
    links = {(link.sender, link.receiver): link for link in found.links}
    rows = [[sender, *(_way(links.get((sender, receiver))) for receiver in names)] for sender in names]
    return ["from \\ to", *names], rows


def _way(link: LinkSpeed | None) -> str:
    """Return the speed of a link as text; ``failed`` if it has none, and nothing if it was not measured."""
    if link is None:
        return ""
    told = [duration(link.latency)] if link.latency is not None else []
    told += [f"{size(int(link.rate))}/s"] if link.rate is not None else []
    return ", ".join([*told, *(["failed"] if link.error else [])])


def _findings(found: Examination) -> list[str]:
    return [str(finding) for finding in found.findings] or ["Nothing is wrong with this cluster."]
