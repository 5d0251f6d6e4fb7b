"""The blocks of a swarm as a module: hidden states in, hidden states out; all of them, or some.

How a block is called is for its model's code to say (masks, positions), so that code runs here, on nothing, and what it
says is noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.swarm import adapter, stateless
from nbdist.swarm.model import Passage, remote_model

if TYPE_CHECKING:
    from nbdist.swarm.swarm import Swarm

__all__ = ["BlockSession", "RemoteSequential"]


class RemoteSequential(nn.Module):
    """Blocks that follow each other, wherever they are.

    >>> blocks = sw.sequential()                    # doctest: +SKIP
    >>> middle = blocks[4:8](blocks[:4](hidden))
    """

    def __init__(self, swarm: Swarm, begin: int = 0, end: int | None = None, passage: Passage | None = None) -> None:
        super().__init__()
        self._swarm = swarm
        self._begin = begin
        self._end = len(swarm) if end is None else end
        self._passage: Passage = passage or remote_model(swarm, "Model", recover=swarm.recover).nbdist

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, which: int | slice) -> RemoteSequential:
        numbers = range(self._begin, self._end)[which]
        if isinstance(numbers, int):
            numbers = range(numbers, numbers + 1)
        if numbers.step != 1 or not numbers:
            raise UsageError(f"{which!r} is not a row of blocks")
        return RemoteSequential(self._swarm, numbers.start, numbers.stop, self._passage)

    def __iter__(self) -> Iterator[RemoteSequential]:
        return (self[number] for number in range(len(self)))

    def extra_repr(self) -> str:
        """Which."""
        return f"blocks {self._begin} to {self._end - 1} of {len(self._swarm)}"

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        prompts: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Through all of them. ``prompts`` (blocks, texts or 1, tokens, width) is added to the first tokens at the
        entrance of each; ``cache`` is that of a `session`."""
        if prompts is not None and prompts.shape[0] != len(self):
            raise UsageError(f"prompts for {prompts.shape[0]} blocks do not fit {len(self)}")
        calls = self._calls(hidden, attention_mask, cache)
        if cache is None:
            return stateless.through(self._swarm, self._begin, hidden, calls, prompts)
        wanted = hidden.requires_grad or (prompts is not None and prompts.requires_grad)
        if torch.is_grad_enabled() and wanted:
            raise UsageError("no gradient comes back through a session: call the blocks without one")
        found: torch.Tensor = cache.nbdist[1].step(
            hidden.detach(), calls, prompts.detach() if prompts is not None else None
        )
        return found

    def _calls(self, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> list[Any]:
        with self._passage.noting() as notes, torch.no_grad():
            self._passage.model(
                inputs_embeds=torch.zeros_like(hidden),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            )
            return notes.calls[self._begin : self._end]

    @contextlib.contextmanager
    def session(self, max_tokens: int = 0) -> Iterator[BlockSession]:
        """Texts that go through token by token: their blocks keep what they need of it, until the end of the block."""
        cache = adapter.new_cache(self._passage.model.config)
        self._swarm.session(cache, self._begin, self._end, expected=max_tokens, recover=self._passage.recover)
        try:
            yield BlockSession(self, cache)
        finally:
            cache.nbdist[1].refuse("this session has ended")
            self._swarm.over(cache.nbdist[1].id)


class BlockSession:
    """A session of some blocks."""

    def __init__(self, blocks: RemoteSequential, cache: Any) -> None:
        self._blocks = blocks
        self.cache = cache
        """What is done to it (`reorder_cache`, `crop`) is done to the blocks' caches."""

    @property
    def tokens(self) -> int:
        """How many have gone through."""
        return int(self.cache.get_seq_length())

    def step(self, hidden: torch.Tensor, prompts: torch.Tensor | None = None) -> torch.Tensor:
        """Take some tokens more through the blocks."""
        found: torch.Tensor = self._blocks(hidden, prompts=prompts, cache=self.cache)
        return found
