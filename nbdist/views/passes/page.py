"""Turns a backward pass into the JSON that the page of its live view reads. Pure: a pass in, data out.

::

    outline     does not change while the pass runs: nodes, links, messages      sent once for a pass
    snapshot    the progress, in the order of the outline's nodes                sent after every change
    detail      the histogram of the node that the user has chosen
"""

from __future__ import annotations

import math
from typing import Any

from nbdist.autograd.graph.events import Key
from nbdist.views.drawing.folding import name_of
from nbdist.views.passes.backward import Backward
from nbdist.views.passes.remarks import remarks

# The letters of the states in a snapshot; ``backward.js`` reads them.
_CODES = {"unused": "u", "waiting": "w", "ready": "r", "running": "g", "halted": "h", "done": "d"}


def outline(found: Backward) -> dict[str, Any]:
    """Return the parts of a pass that do not change while it runs, as JSON. Links refer to nodes by their index."""
    trace = found.plan.trace
    workers = {worker: number for number, worker in enumerate(trace.nodes)}
    nodes = [
        {
            "w": workers[key[0]],
            "n": key[1],
            "name": name_of(node),
            "label": node.label or "",
            "kind": node.kind,
            "module": node.module or "",
            "line": node.line or "",
            "shape": f"{node.dtype}{list(node.shape)}" if node.shape is not None else "",
            "waits": found.plan.waits_for.get(key, 0),
            "notes": node.notes,
        }
        for key, node in found.nodes.items()
    ]
    index = {key: number for number, key in enumerate(found.nodes)}
    edges = {edge.autograd_message_id: edge for edge in trace.edges}
    return {
        "workers": list(trace.nodes),
        "nodes": nodes,
        "links": [[index[key], index[target]] for key, target, message in found.links() if message is None],
        "messages": [
            {"from": index[key], "to": index[target], "bytes": edges[message].nbytes, "call": edges[message].function}
            for key, target, message in found.links()
            if message is not None
        ],
        "unreachable": trace.unreachable,
    }


def snapshot(found: Backward) -> dict[str, Any]:
    """Return the progress of a pass as JSON: states, times and norms, in the order of the outline's nodes."""
    used = {edge.autograd_message_id for edge in found.plan.edges}
    index = {key: number for number, key in enumerate(found.nodes)}
    return {
        "states": "".join(_CODES[found.state_of(key)] for key in found.nodes),
        "got": list(found.got.values()),
        "ms": [_ms(found.seconds.get(key)) for key in found.nodes],
        **({"gpu": [_ms(found.on_gpu.get(key)) for key in found.nodes]} if found.on_gpu else {}),
        "norms": [_number_for_json(found.norm.get(key)) for key in found.nodes],
        "for": {index[key]: waits for key in found.nodes if (waits := found.waits(key))},
        "path": [index[key] for key in found.critical_path()],
        "bad": index[blamed] if (blamed := found.failed or found.blamed()) is not None else None,
        "messages": [
            [message, found.messages.get(message, "expected" if message in used else "unused")]
            for _, _, message in found.links()
            if message is not None
        ],
        "shares": [
            {
                "worker": share.worker,
                "nodes": share.nodes,
                "done": share.done,
                "busy": _ms(share.busy),
                "idle": _ms(share.idle),
                **({"gpu": _ms(share.on_gpu)} if share.on_gpu is not None else {}),
                "for": share.waits_for,
            }
            for share in found.shares()
        ],
        "remarks": [
            [part.text if part.node is None else [part.text, index[part.node]] for part in remark]
            for remark in remarks(found)
        ],
    }


def detail(found: Backward, key: Key) -> dict[str, Any]:
    """Return the histogram of the gradients that a node was given, as JSON; an empty dict if it is not known."""
    if (histogram := found.histogram.get(key)) is None:
        return {}
    return {"node": list(key), "low": histogram.low, "high": histogram.high, "counts": histogram.counts}


def _number_for_json(norm: float | None) -> float | str | None:
    """Return a norm with five digits for JSON; NaN and infinity, which JSON lacks, as text; None for None."""
    if norm is None:
        return None
    return float(f"{norm:.5g}") if math.isfinite(norm) else str(norm)


def _ms(seconds: float | None) -> float | None:
    return round(seconds * 1000, 4) if seconds is not None else None
