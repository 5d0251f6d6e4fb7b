"""The blocks of a swarm, or some of them, as a module from hidden states to hidden states.

Only the model's own code knows how a block is called (masks, positions). So that code runs here on zeros, while
stand-ins for its layers note their arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdist.errors import UsageError
from nbdist.swarm import model_cache
from nbdist.swarm.client import stateless
from nbdist.swarm.client.model import Passage


class RemoteSequential(nn.Module):
    """Consecutive blocks of a swarm as a module. `Swarm.sequential` makes one.

    ``blocks[a:b]`` is a module with some of the blocks, and ``blocks[i]`` a module with a single block. Iteration
    yields modules with one block each. Gradients pass through to the inputs. The module has no parameters.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> sw = nbdist.swarm.serve(model, workers=["worker0", "worker1"])
        >>> blocks = sw.sequential()
        >>> blocks[1:3]
        RemoteSequential(blocks 1 to 2 of 4)
        >>> hidden = torch.randn(2, 5, 32)
        >>> torch.equal(blocks[2:](blocks[:2](hidden)), blocks(hidden))
        True
        >>> with blocks.session(max_tokens=8) as session:
        ...     output = session.step(hidden)
        ...     output = session.step(output[:, -1:])
        ...     session.tokens
        6
        >>> sw.close()
    """

    def __init__(self, passage: Passage, begin: int, end: int) -> None:
        super().__init__()
        self._passage = passage
        self._begin = begin
        self._end = end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, which: int | slice) -> RemoteSequential:
        numbers = range(self._begin, self._end)[which]
        if isinstance(numbers, int):
            numbers = range(numbers, numbers + 1)
        if numbers.step != 1 or not numbers:
            raise UsageError(
                f"{which!r} is not a row of blocks: use an index, or a slice with step 1 that has at least one block"
            )
        return RemoteSequential(self._passage, numbers.start, numbers.stop)

    def __iter__(self) -> Iterator[RemoteSequential]:
        return (self[number] for number in range(len(self)))

    def extra_repr(self) -> str:
        """Return the range of blocks, for the module's repr."""
        return f"blocks {self._begin} to {self._end - 1} of {len(self._passage.crew.sizes)}"

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        prompts: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Take hidden states through all blocks and return the hidden states behind the last one.

        Args:
            hidden: (sequences, tokens, width).
            attention_mask: (sequences, tokens), 0 for padding, as for the model.
            prompts: (blocks, sequences or 1, tokens, width), added to the hidden states of the first tokens before each
                block. In a session, tokens count from its beginning.
            cache: the cache of a `session`, as `BlockSession.step` passes it.

        Raises:
            UsageError: the prompts do not fit, the session has ended, or gradients are wanted in a session.
            NoRoute: no server can serve a block.
            CacheFull: the caches of the session do not fit into a server's memory.
        """
        if hidden.device.type != "cpu":
            mask = attention_mask.cpu() if attention_mask is not None else None
            prompts = prompts.cpu() if prompts is not None else None
            there: torch.Tensor = self(hidden.cpu(), mask, prompts=prompts, cache=cache)
            return there.to(hidden.device)
        if prompts is not None and prompts.shape[0] != len(self):
            raise UsageError(
                f"prompts for {prompts.shape[0]} blocks do not fit {len(self)}: their first dimension counts blocks"
            )
        wanted = hidden.requires_grad or (prompts is not None and prompts.requires_grad)
        if cache is not None and torch.is_grad_enabled() and wanted:
            raise UsageError(
                "no gradient passes through a session: call the blocks without a session, or take the step under "
                "torch.no_grad()"
            )
        calls = self._block_calls(hidden, attention_mask, cache)
        if cache is None:
            return stateless.through(self._passage.crew, self._begin, hidden, calls, prompts)
        recorded, session = cache.nbdist
        with recorded.growing(hidden.shape[0], hidden.shape[1]):
            found: torch.Tensor = session.step(hidden, calls, prompts)
        return found

    def _block_calls(self, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> list[Any]:
        """Return how the model would call each of these blocks, as `LayerCall`s; call no server."""
        with self._passage.noting() as notes, torch.no_grad():
            self._passage.model(
                inputs_embeds=torch.zeros_like(hidden),  # masks and positions depend on the shape only
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            )
            return notes.calls[self._begin : self._end]

    @contextlib.contextmanager
    def session(self, max_tokens: int = 0) -> Iterator[BlockSession]:
        """Open a session with caches on the servers for the duration of a ``with`` block.

        ``max_tokens`` is the number of tokens that the session will have, so that servers can reserve memory; 0 if
        unknown. After the ``with`` block, further steps raise UsageError. `RemoteSequential` has an example.
        """
        cache = model_cache.new_cache(self._passage.model.config)
        sessions = self._passage.sessions
        sessions.begin(cache, self._begin, self._end, expected=max_tokens, recover=self._passage.recover)
        try:
            yield BlockSession(self, cache)
        finally:
            cache.nbdist[1].refuse("this session has ended")
            sessions.over(cache.nbdist[1].id)


class BlockSession:
    """A session through the blocks of a `RemoteSequential`, which takes tokens step by step, made by its `session`."""

    def __init__(self, blocks: RemoteSequential, cache: Any) -> None:
        self._blocks = blocks
        self.cache = cache
        """A DynamicCache of transformers. Its operations (`crop`, `reorder_cache`) change the caches on the servers."""

    @property
    def tokens(self) -> int:
        """The number of tokens in the caches."""
        return int(self.cache.get_seq_length())

    def step(self, hidden: torch.Tensor, prompts: torch.Tensor | None = None) -> torch.Tensor:
        """Take the hidden states of new tokens through the blocks; return the hidden states behind the last block.

        Servers that die are replaced. A step that is refused before it is sent, such as one with gradients, changes
        nothing. After any other error, further steps raise UsageError: begin a new session. For the arguments and
        errors see `RemoteSequential.forward`.
        """
        found: torch.Tensor = self._blocks(hidden, prompts=prompts, cache=self.cache)
        return found
