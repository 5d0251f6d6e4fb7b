"""Describes a NaN or Inf that a backward pass got from the forward pass: as data, and in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Carried(NamedTuple):
    """A message that brought a NaN or Inf to another worker; `Inherited` has an example."""

    message: int
    """Its ``autograd_message_id`` in the context's `trace`."""
    sender: str
    """The name of the worker that sent the message."""
    function: str
    """The name of the function that the message called, or whose result it brought."""


class Inherited(NamedTuple):
    """A NaN or Inf that the forward pass gave to a node of the backward pass, and how far back it could be followed.

    ``end`` tells what is known about the last node that the search reached, ``node`` on ``worker``:

    ``operation``
        the node made the NaN: none of its inputs held one.
    ``leaf``
        the node is a leaf, such as a parameter, that holds it.
    ``data``
        an input of the node that needs no gradient holds it.
    ``kept``
        the node is a user's Function that has saved it: it was an input that needs no gradient, or the Function made
        it.
    ``unknown``
        the node, or a node behind it, made it: not all inputs were saved. ``node`` is negative if only the worker is
        known.
    ``hidden``
        the values that the node saved are behind hooks, so the backward pass may have made the NaN as well.

    Example:
        >>> w = torch.zeros(1, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     found = rpc.rpc_sync("worker1", torch.log, args=(w - 1,))
        ...     with dist_autograd.watch(context_id, paused=True) as watch:
        ...         handle = dist_autograd.backward_async(context_id, (found * found).sum())
        ...         event = watch.run(until="nan")
        ...         watch.run()
        ...         handle.wait()
        >>> event.inherited.end, event.inherited.name, event.inherited.worker
        ('operation', 'LogBackward0', 'worker1')
        >>> event.inherited.messages
        (Carried(message=..., sender='worker1', function='log'),)
    """

    value: str
    """``NaN`` or ``Inf``."""
    end: str
    worker: str
    node: int = -1
    """The node's number in the context's `trace`."""
    name: str = ""
    """The node's name in torch."""
    messages: tuple[Carried, ...] = ()
    """The messages that carried it, the last one first."""
    perhaps: tuple[Carried, ...] = ()
    """Messages that may have carried it before, if that is not known."""


def told(found: Inherited | None, node: str, where: Callable[[Inherited], str]) -> str:
    """Return a sentence for the user on the first NaN or Inf of a pass, which came up at the node named ``node``."""
    # ``where`` returns the name of the node at which the search of `explain` ended.
    if found is None:
        return f"the first NaN or Inf came up at {node}"
    if found.end == "hidden":
        return (
            f"the first NaN or Inf was seen at {node}, but the forward pass may have made it: the values saved there "
            f"are packed by hooks or recomputed by a checkpoint, and were not "
            f"checked{_phrase_of_doubtful(found)}; {_ADVICE}"
        )
    parts, receiver = [], ""
    for message in found.messages:
        parts.append(f"{f'and to {receiver}' if receiver else 'it came'} {_phrase_of_message(message)}")
        receiver = message.sender
    way = ", ".join(parts)
    end = where(found) if found.node >= 0 else ""
    ends = {
        "operation": f"made by {end}",
        "leaf": f"held by the leaf {end}",
        "data": f"held by an input, which needs no gradient, of {end}",
        "kept": f"kept by {end}, which got it as an input or made it",
        "unknown": f"it came out of {end}{_phrase_of_doubtful(found)}; {_ADVICE}" if end else _ADVICE,
    }
    how = "; ".join(filter(None, (way, ends[found.end])))
    return f"{node} was given {found.value} by the forward pass already: {how}"


_ADVICE = 'context(check="nan") names the operation that made it'


def _phrase_of_doubtful(found: Inherited) -> str:
    return f"; it may have come {' or '.join(map(_phrase_of_message, found.perhaps))}" if found.perhaps else ""


def _phrase_of_message(message: Carried) -> str:
    return f"from {message.sender}, with a call of {message.function}"
