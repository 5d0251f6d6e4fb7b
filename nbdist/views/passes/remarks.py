"""Makes remarks on what stands out in a backward pass: sentences whose parts may refer to nodes. Pure.

`nbdist.views.passes.report` makes text and HTML of the sentences. The page of the live view makes links of the parts
that refer to nodes::

    critical path, 3 nodes: Sum@notebook → receive@notebook → Exp@worker1
                            ------------   ----------------   -----------
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbdist.amounts import counted, duration, plural
from nbdist.autograd.graph.events import Key
from nbdist.autograd.graph.inherited import Inherited, told
from nbdist.cluster.output.arranger import grouped, say_members
from nbdist.views.drawing.folding import name_of
from nbdist.views.passes.backward import Backward

# The note on the node of a parameter that got a gradient, while an optimizer has others of its model.
UNOWNED = "unowned", "belongs to no optimizer"

_GROWTH_TOLD = 100.0  # by how much a gradient's norm must grow in one node to be told
_SHRINKING_TOLD = 1e-6
_NODES_NAMED = 12  # of a path: its two ends, and the nodes that took the longest


@dataclass(frozen=True)
class SentencePart:
    """A piece of a sentence; if it has a node, the piece is the node's name, and becomes a link."""

    text: str
    node: Key | None = None


Remark = tuple[SentencePart, ...]


def text_of(remark: Remark) -> str:
    """Return a remark, which is a sentence in parts, as plain text.

    >>> text_of((SentencePart("the largest norm was given to "), SentencePart("Exp@worker1", ("worker1", 3))))
    'the largest norm was given to Exp@worker1'
    """
    return "".join(part.text for part in remark)


def remarks(found: Backward) -> list[Remark]:
    """Return sentences about a pass, finished or not: what failed, took long, is not finite, or differs by worker."""
    early = _failed, _critical_path, _slowest, _longest_on_gpu, _first_bad
    late = _largest, _changes, _replicas, _unowned, _unused
    return [remark for make in (*early, *late) for remark in make(found)]


def _failed(found: Backward) -> Iterator[Remark]:
    if found.failed is not None:
        yield SentencePart("the pass failed at "), *_where(found, found.failed)


def _critical_path(found: Backward) -> Iterator[Remark]:
    if not (path := found.critical_path()):
        return
    slow = sorted(path[1:-1], key=lambda key: found.seconds[key])[-(_NODES_NAMED - 2) :]
    shown = {path[0], path[-1], *slow}
    names = [_named(found, key) if key in shown else SentencePart("…") for key in path]
    made = [SentencePart(f"critical path, {counted(len(path), 'node')}: ")]
    for name, _ in itertools.groupby(names):  # neighbours that are not named share an ellipsis
        made += [name, SentencePart(" → ")]
    yield tuple(made[:-1])


def _slowest(found: Backward) -> Iterator[Remark]:
    if (slowest := found.slowest()) is None:
        return
    worker, where, seconds, keys = slowest
    longest = max(keys, key=lambda key: found.seconds[key])
    count = f"{len(keys)} nodes, the longest " if len(keys) > 1 else ""
    said = f"most time, {duration(seconds)}, went into {where} on {worker} ({count}"
    yield SentencePart(said), SentencePart(f"node {longest[1]}", longest), SentencePart(")")


def _longest_on_gpu(found: Backward) -> Iterator[Remark]:
    if found.on_gpu:
        key = max(found.on_gpu, key=lambda key: found.on_gpu[key])
        yield SentencePart(f"the longest on a GPU, {duration(found.on_gpu[key])}, was "), *_where(found, key)


def _first_bad(found: Backward) -> Iterator[Remark]:
    if found.bad is not None and found.inherited is not None:
        yield _inherited(found, found.bad, found.inherited)
    elif found.bad is not None:
        yield SentencePart("the first NaN or Inf came up at "), *_where(found, found.bad)


def _inherited(found: Backward, bad: Key, given: Inherited) -> Remark:
    here, names = _named(found, bad), [_named(found, bad)]

    def where(end: Inherited) -> str:
        key = end.worker, end.node
        if (node := found.nodes.get(key)) is None:
            return f"{end.name}@{end.worker} (node {end.node})"
        names.append(_named(found, key))
        return ", ".join([f"{names[-1].text} (node {end.node})", *filter(None, (node.module, node.line))])

    return _linked(told(given, f"{here.text} (node {bad[1]})", where), names)


def _linked(sentence: str, names: Sequence[SentencePart]) -> Remark:
    """Split a sentence into parts, so that each name is a part. The names occur in the sentence in this order."""
    parts = []
    for name in names:
        before, _, sentence = sentence.partition(name.text)
        parts += [SentencePart(before), name]
    return tuple(part for part in [*parts, SentencePart(sentence)] if part.text)


def _largest(found: Backward) -> Iterator[Remark]:
    if (key := found.largest()) is not None:
        yield SentencePart(f"the largest norm, {found.norm[key]:.4g}, was given to "), *_where(found, key)


def _changes(found: Backward) -> Iterator[Remark]:
    """Yield where gradients grew most, and where they vanished, if they did so strikingly."""
    norms = {key: norm for key, norm in found.norm.items() if math.isfinite(norm)}
    steps = [
        (norms[after] / norms[key], key, after) for key, after, _ in found.links() if norms.get(key) and after in norms
    ]
    if steps and (most := max(steps))[0] > _GROWTH_TOLD:
        yield SentencePart(f"gradients grew most, {most[0]:.0f} times, in "), *_where(found, most[1])
    if steps and (least := min(steps))[0] < _SHRINKING_TOLD:
        told = f", from norm {norms[least[1]]:.4g} to {norms[least[2]]:.4g}"
        yield SentencePart("gradients vanished in "), *_where(found, least[1]), SentencePart(told)


def _replicas(found: Backward) -> Iterator[Remark]:
    """Yield how workers differ, or do not, that run the same graph, as replicas do: each by itself, in their dtypes."""
    graphs = {
        worker: tuple((node.number, node.name) for node in nodes) for worker, nodes in found.plan.trace.nodes.items()
    }
    for graph, workers in grouped(graphs, graphs.__getitem__).items():
        if found.plan.edges or len(workers) < 2:  # the workers of a pass with messages are no replicas
            continue
        for number, _ in graph:
            of_worker = {worker: found.nodes[worker, number].dtype for worker in workers}
            dtypes = grouped(workers, of_worker.__getitem__)
            if len(dtypes) > 1:
                kinds = "; ".join(f"{dtype} on {say_members(names)}" for dtype, names in dtypes.items())
                odd = min(dtypes.values(), key=len)[0]
                yield (
                    SentencePart(f"workers compute in other dtypes ({kinds}), first in "),
                    *_where(found, (odd, number)),
                )
                break
        norms = {worker: tuple(found.norm.get((worker, number)) for number, _ in graph) for worker in workers}
        for values, same in grouped(workers, norms.__getitem__).items():
            if len(same) > 1 and all(norm is not None and math.isfinite(norm) for norm in values) and any(values):
                told = f"the gradients of {say_members(same)} have equal norms to the bit, at each node: they have "
                yield (SentencePart(told + "computed the same, as if on the same data"),)


def _unowned(found: Backward) -> Iterator[Remark]:
    """Yield which parameters got a gradient and belong to no optimizer, once for workers with the same ones."""
    marked = [key for key, node in found.nodes.items() if UNOWNED in node.notes and found.state_of(key) == "done"]
    names = {key: name_of(found.nodes[key]) for key in marked}
    of_worker = {w: sorted(keys, key=names.__getitem__) for w, keys in grouped(marked, lambda key: key[0]).items()}
    for alike, workers in grouped(of_worker, lambda worker: tuple(map(names.get, of_worker[worker]))).items():
        count, keys = counted(len(alike), "parameter"), of_worker[workers[0]][:_NODES_NAMED]
        belong = plural(len(alike), "belongs", "belong")
        made = [SentencePart(f"{say_members(workers)}: {count} got a gradient and {belong} to no optimizer: ")]
        for key in keys:
            made += [SentencePart(names[key], key), SentencePart(", ")]
        yield *made[:-1], SentencePart(f" and {len(alike) - len(keys)} more" if len(keys) < len(alike) else "")


def _unused(found: Backward) -> Iterator[Remark]:
    if count := len(found.plan.unused):
        said = f"{counted(count, 'message')} {plural(count, 'carries', 'carry')} no gradients: no root depends on"
        yield (SentencePart(f"{said} {plural(count, 'its', 'their')} tensors"),)


def _named(found: Backward, key: Key) -> SentencePart:
    """Return a node's name and worker as a part that refers to it: ``Exp@worker1``."""
    return SentencePart(f"{name_of(found.nodes[key])}@{key[0]}", key)


def _where(found: Backward, key: Key) -> Remark:
    """Return parts of a sentence: a node's name, its number, and the module and line of code that made it, if known."""
    node = found.nodes[key]
    made = [part for part in (node.module, node.line) if part]
    return (_named(found, key), SentencePart(f" (node {key[1]})" + (f", made by {', '.join(made)}" if made else "")))
