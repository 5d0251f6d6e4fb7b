"""A transformers model whose blocks are elsewhere: its own code runs here, but for what is in the layers.

Each layer is replaced by one that notes how it is called, and hands on what it was given; the last one sends all of
that on its way, and hands on what comes back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.swarm import adapter, stacking, stateless
from nbdist.swarm.adapter import LayerCall
from nbdist.swarm.crew import Gone
from nbdist.swarm.session import Recover

if TYPE_CHECKING:
    from nbdist.swarm.session import Session
    from nbdist.swarm.swarm import Swarm

__all__ = ["Passage", "remote_model"]


class _Probe(BaseException):
    """Ends a call of a model when it has come to its first layer; what that was given."""


class _Notes(threading.local):
    calls: list[LayerCall] = []  # noqa: RUF012 - never changed, only replaced
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What the layer before was given, and"""
    cache: Any = None
    """the cache among it."""
    only = False
    """Whether layers note only how they are called."""
    expected = 0


class Passage:
    """What the stand-ins of one model have in common."""

    def __init__(self, swarm: Swarm, model: Any, recover: Recover) -> None:
        self.swarm = swarm
        self.model = model
        self.recover: Recover = recover
        self.notes = _Notes()
        self.in_tuple: bool | None = None

    def take(self, hidden: torch.Tensor, calls: list[LayerCall], cache: Any) -> torch.Tensor:
        """Through all blocks."""
        prompts: torch.Tensor | None = getattr(self.model, "deep_prompts", None)
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or (prompts is not None and prompts.requires_grad))
        if cache is not None:
            session: Session = cache.nbdist[1]
            if not wanted:
                return session.step(hidden.detach(), calls, prompts.detach() if prompts is not None else None)
            if session.tokens:
                raise UsageError("no gradient comes back through a cache: call the model with use_cache=False")
            session.refuse("this cache is of a call that gradients come back from, and has nothing in it")
        return stateless.through(self.swarm, 0, hidden, calls, prompts)

    @contextlib.contextmanager
    def noting(self) -> Iterator[_Notes]:
        """For the block, layers do nothing but note how they are called."""
        self.notes.only = True
        try:
            yield self.notes
        finally:
            self.notes.only = False


class _StandIn(nn.Module):
    """A layer that is elsewhere."""

    def __init__(self, passage: Passage, number: int, count: int) -> None:
        super().__init__()
        self._passage = passage
        self._number = number
        self._count = count

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passage = self._passage
        notes = passage.notes
        if self._number and notes.given is not None and adapter.is_same(notes.given, (args, kwargs)):
            cache = notes.cache  # nearly always: all layers are called in one way
            notes.calls.append(notes.calls[-1])
        else:
            cache = notes.cache = adapter.find_cache([*args, *kwargs.values()])
            told = adapter.strip(args, kwargs, cache)
            if passage.in_tuple is None:
                raise _Probe(hidden, told)
            if not self._number:
                notes.calls = []
                if cache is not None and not hasattr(cache, "nbdist"):
                    passage.swarm.session(cache, expected=notes.expected, recover=passage.recover)
            notes.calls.append(told)
            notes.given = args, kwargs
        if self._number == self._count - 1:
            notes.given = notes.cache = None
            if cache is not None:
                cache.nbdist[0].grow(hidden.shape[0], hidden.shape[1])
            if not notes.only:
                calls, notes.calls = notes.calls, []
                hidden = passage.take(hidden, calls, cache)
        return (hidden,) if passage.in_tuple else hidden


def remote_model(swarm: Swarm, kind: str, *, recover: Recover, num_labels: int | None = None) -> Any:
    """A model of a swarm, with the head of that kind."""
    model = adapter.build(swarm.checkpoint.config, kind, num_labels)
    path = adapter.find_layers(model)
    parent, _, name = path.rpartition(".")
    passage = Passage(swarm, model, recover)
    count = len(swarm)
    setattr(
        model.get_submodule(parent), name, nn.ModuleList(_StandIn(passage, number, count) for number in range(count))
    )
    swarm.checkpoint.fill(model)
    model.tie_weights()
    adapter.complete(model, kind)
    if kind == "CausalLM":
        if (generation := swarm.checkpoint.generation) is not None:
            model.generation_config = generation
        model.generate = _Generate(passage, model.generate)
    model.nbdist = passage
    _probe(passage)
    return model


def _probe(passage: Passage) -> None:
    """Find out what a layer hands on; and, if caches are counted, how large they are, with one token."""
    model, swarm = passage.model, passage.swarm
    token = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            model(token, use_cache=False)
    except _Probe as probe:
        hidden, told = probe.args
        with swarm.crew.working():
            while passage.in_tuple is None:
                with contextlib.suppress(Gone):
                    ((span, member),) = swarm.crew.way(0, 1)
                    passage.in_tuple = swarm.crew.ask(member, "returns_tuple", span.begin, hidden, told)
    swarm.layout = stacking.compare(*(_called(passage, texts) for texts in (1, 2)))
    if swarm.crew.options.cache_bytes is not None:
        with torch.no_grad():
            model(token, use_cache=True)


def _called(passage: Passage, texts: int) -> LayerCall:
    """How the first layer is called for so many texts, of which the first begins with padding."""
    mask = torch.ones(texts, 3, dtype=torch.long)
    mask[0, 0] = 0
    with passage.noting() as notes, torch.no_grad():
        passage.model.base_model(
            torch.zeros(texts, 3, dtype=torch.long), attention_mask=mask, use_cache=False, return_dict=True
        )
        return notes.calls[0]


class _Generate:
    """`generate()`, which says how long the text is going to be, so that there is room for it from the start."""

    def __init__(self, passage: Passage, own: Any) -> None:
        self._passage = passage
        self._own = own

    def __call__(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        notes = self._passage.notes
        notes.expected = self._expected(inputs, kwargs)
        try:
            return self._own(inputs, *args, **kwargs)
        finally:
            notes.expected = 0

    def _expected(self, inputs: Any, kwargs: dict[str, Any]) -> int:
        config = kwargs.get("generation_config") or self._passage.model.generation_config
        given = next(
            (each for each in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None), None
        )
        begin = int(given.shape[1]) if isinstance(given, torch.Tensor) else 1
        new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
        if new is not None:
            return begin + int(new)
        return max(begin, int(kwargs.get("max_length") or getattr(config, "max_length", None) or 0))
