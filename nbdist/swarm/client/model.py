"""Builds transformers models whose blocks are on servers: the model's own code runs here, except for its layers.

Each layer is replaced by a stand-in (`_StandIn`)::

    embeddings ─► layer 0 ───► layer 1 ───► ... ───► last layer ───► norm, head
                  notes its    notes its             notes its arguments, then sends hidden states and
                  arguments    arguments             all notes to the servers (`Passage.take`), and
                                                     returns the servers' hidden states

All stand-ins but the last one return the hidden states that they received, which the model only passes on.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.swarm import adapter, model_cache, stacking
from nbdist.swarm.adapter import LayerCall
from nbdist.swarm.client import stateless
from nbdist.swarm.client.crew import Gone, Halted
from nbdist.swarm.client.session import Session
from nbdist.swarm.client.sessions import Sessions
from nbdist.swarm.policy import Recover

# Arguments of models that ask for values from inside of the layers, and what the user can do instead.
_NOT_RETURNED = {
    "output_hidden_states": "Swarm.sequential()[:n] returns the hidden states behind the first n layers.",
    "output_attentions": "A model in one process returns attentions.",
    "output_router_logits": "A model in one process returns router logits.",
}


# A BaseException: a model's own code may catch an Exception.
class _Probe(BaseException):
    """Ends a call of a model at its first layer. Carries the hidden states and the arguments of that layer."""


class _Notes(threading.local):
    """The notes of one call of a model. Each thread has its own, since several threads may call the same model."""

    calls: list[LayerCall] = []  # noqa: RUF012 - never changed, only replaced
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the arguments of the previous layer
    cache: Any = None  # among those arguments
    only = False  # True if layers only note their arguments: nothing is sent, and the cache stays unchanged
    expected = 0  # the tokens that the next session will have at its end; 0 if unknown
    halted: Halted = None  # of the next sessions


class Passage:
    """The state that all stand-ins of one model share; the model has it as its attribute ``nbdist``."""

    def __init__(self, sessions: Sessions, model: Any, recover: Recover) -> None:
        self.sessions = sessions
        self.crew = sessions.crew
        self.model = model
        self.recover: Recover = recover
        self.notes = _Notes()
        self.in_tuple: bool | None = None  # whether layers return a tuple; None until `_probe` has asked a server

    def take(self, hidden: torch.Tensor, calls: list[LayerCall], cache: Any) -> torch.Tensor:
        """Take hidden states through all blocks: as a step of the cache's session, or without a cache.

        If gradients are wanted, nothing goes into the servers' caches, and the session of the given empty cache refuses
        further steps. Raises UsageError if the cache has tokens then, or if its session refuses further steps. After an
        error, the cache is as before; if some servers may have taken the step, its session refuses further steps.
        """
        if hidden.device.type != "cpu":  # the model's embedding is on a GPU, but the crew works with CPU tensors
            return self.take(hidden.cpu(), adapter.moved(calls, "cpu"), cache).to(hidden.device)
        # The user's, added to the hidden states of the first tokens before each block.
        prompts: torch.Tensor | None = getattr(self.model, "deep_prompts", None)
        prompts = prompts.cpu() if prompts is not None else None
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or (prompts is not None and prompts.requires_grad))
        if cache is None:
            return stateless.through(self.crew, 0, hidden, calls, prompts)
        recorded: model_cache.RecordedCache
        session: Session
        recorded, session = cache.nbdist
        session.check_usable()
        if wanted and session.tokens:
            raise UsageError(
                "gradients cannot pass through a cache that has tokens: call the model with the whole text and "
                "use_cache=False, or with a new cache under torch.no_grad()"
            )
        with recorded.growing(hidden.shape[0], hidden.shape[1]):  # also with gradients: the model counts these tokens
            if not wanted:
                return session.step(hidden, calls, prompts)
            found = stateless.through(self.crew, 0, hidden, calls, prompts)
            session.refuse(
                "this cache is of a call with gradients, so it has nothing in it: call the model under torch.no_grad() "
                "to fill a new cache"
            )
            return found

    @contextlib.contextmanager
    def noting(self) -> Iterator[_Notes]:
        """Return a context manager in which calls of the model by this thread reach no server and change no cache."""
        self.notes.only = True
        try:
            yield self.notes
        finally:
            self.notes.only = False


class _StandIn(nn.Module):
    """A stand-in for a layer of a model whose block is on a server. The module's docstring draws what it does."""

    def __init__(self, passage: Passage, number: int, count: int, layer: nn.Module) -> None:
        super().__init__()
        vars(self).update(adapter.plain_attributes(layer))  # the model's code may read them
        self._passage = passage
        self._number = number
        self._count = count

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passage = self._passage
        notes = passage.notes
        if self._number and notes.given is not None and adapter.is_same(notes.given, (args, kwargs)):
            cache = notes.cache  # the usual case: all layers are called with the same arguments
            notes.calls.append(notes.calls[-1])
        else:
            cache = notes.cache = model_cache.find_cache([*args, *kwargs.values()])
            told = adapter.strip(args, kwargs, cache)
            if passage.in_tuple is None:  # the first call of a new model, by `_probe`: end it here
                raise _Probe(hidden, told)
            # The first layer begins a call: notes that a call left, which failed before its last layer, are dropped.
            if not self._number:
                notes.calls = []
                if cache is not None and not hasattr(cache, "nbdist"):
                    session = passage.sessions.begin(cache, expected=notes.expected, recover=passage.recover)
                    session.halted = notes.halted
            notes.calls.append(told)
            notes.given = args, kwargs
        if self._number == self._count - 1:
            notes.given = notes.cache = None  # or this thread would keep the cache alive, and its session
            if not notes.only:
                calls, notes.calls = notes.calls, []
                hidden = passage.take(hidden, calls, cache)
        return (hidden,) if passage.in_tuple else hidden


def remote_model(
    sessions: Sessions, checkpoint: adapter.Checkpoint, kind: str, *, recover: Recover, num_labels: int | None = None
) -> Any:
    """Build a transformers model of a kind ("CausalLM", "Model", "SequenceClassification") over a swarm's blocks.

    Its embeddings and head are loaded here, and frozen. A classifier's head that the checkpoint lacks is made anew, to
    be trained; any other missing weight raises UsageError. ``recover`` and ``num_labels`` are as in `Swarm.causal_lm`
    and `Swarm.sequence_classifier`. Calls a server once, and raises `NoRoute` if no server can serve the first block.
    """
    model = adapter.build(checkpoint.config, kind, num_labels)
    path = adapter.find_layers(model)
    parent, _, name = path.rpartition(".")
    passage = Passage(sessions, model, recover)
    count = len(sessions.crew.sizes)
    layers = model.get_submodule(path)
    stand_ins = nn.ModuleList(_StandIn(passage, number, count, layers[number]) for number in range(count))
    setattr(model.get_submodule(parent), name, stand_ins)
    # After the layers are replaced: their weights belong on the servers only.
    checkpoint.fill(model)
    adapter.tie(model)
    adapter.complete(model, kind)
    if kind == "CausalLM":
        if (generation := checkpoint.generation) is not None:
            model.generation_config = generation
        model.generate = _generating(passage, model.generate)
    model.nbdist = passage
    _probe(passage)
    # Last: `_probe` calls a model whose configuration may ask for such values.
    names = list(inspect.signature(model.base_model.forward).parameters)
    model.base_model.register_forward_pre_hook(partial(_refuse_inner_values, passage, names), with_kwargs=True)
    return model


def _refuse_inner_values(
    passage: Passage, names: Sequence[str], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise UsageError if a call of a model asks for values from inside the layers: they stay on the workers."""
    if passage.notes.only:
        return  # the caller does not use the model's result
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # transformers would return an empty tuple, or wrong values, since it looks for them in the stand-ins.
    for name, instead in _NOT_RETURNED.items():
        if (value := given.get(name)) is None:
            value = getattr(model.config, name, None)
        if value:
            raise UsageError(
                f"{name}={value!r} is not possible: the layers of this model run on workers, which return only the "
                "output of their last layer. Leave it out, and set it to False in the model's config and "
                f"generation_config if it is True there. {instead}"
            )


def _probe(passage: Passage) -> None:
    """Call a new model with few tokens, to learn how its layers are called and what they return."""
    model, crew = passage.model, passage.crew
    token = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            model(token, use_cache=False)
    except _Probe as probe:
        hidden, told = probe.args
        with crew.working():
            while passage.in_tuple is None:  # a server may die: then another one is asked
                with contextlib.suppress(Gone):
                    ((span, member),) = crew.way(0, 1)
                    passage.in_tuple = crew.ask(member, "returns_tuple", span.begin, hidden, told)
    crew.layout = stacking.compare(*(_first_layer_call(passage, texts) for texts in (1, 2)))
    # One token through a cache, so that servers learn how large a token's cache is before they reserve memory.
    if crew.options.cache_bytes is not None:
        with torch.no_grad():
            model(token, use_cache=True)


def _first_layer_call(passage: Passage, texts: int) -> LayerCall:
    """Return how the model calls its first layer for ``texts`` sequences of 3 tokens; call no server."""
    mask = torch.ones(texts, 3, dtype=torch.long)
    mask[0, 0] = 0  # with padding, models prepare masks that have rows for each sequence
    with passage.noting() as notes, torch.no_grad():
        passage.model.base_model(
            torch.zeros(texts, 3, dtype=torch.long), attention_mask=mask, use_cache=False, return_dict=True
        )
        return notes.calls[0]


def _generating(passage: Passage, own: Any) -> Any:
    """Make the model's ``generate()``. It tells new sessions how long the text may get: servers reserve memory."""

    def generate(inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        passage.notes.expected = _expected_tokens(passage.model, inputs, kwargs)
        try:
            return own(inputs, *args, **kwargs)
        finally:
            passage.notes.expected = 0

    return generate


def _expected_tokens(model: Any, inputs: Any, kwargs: dict[str, Any]) -> int:
    """Return the tokens that a sequence may have at the end, by the arguments of ``generate`` or its config."""
    config = kwargs.get("generation_config") or model.generation_config
    given = next(
        (each for each in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None), None
    )
    begin = int(given.shape[1]) if isinstance(given, torch.Tensor) else 1
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is not None:
        return begin + int(new)  # it goes before `max_length`, as in transformers
    return max(begin, int(kwargs.get("max_length") or getattr(config, "max_length", None) or 0))
