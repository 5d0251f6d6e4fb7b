"""Models and functions that the workers of the pipeline's tests run; they have to be importable there."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from typing import TYPE_CHECKING

import numpy
import torch
from torch import nn

if TYPE_CHECKING:
    from nbdist.nn import Pipeline
    from nbdist.nn.pipeline_part import PipelinePart


class Slow(nn.Module):
    """A layer that takes a while, forward and backward."""

    def __init__(self, width: int = 8, seconds: float = 0.01) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, slowly."""
        until = time.monotonic() + self.seconds
        while (left := until - time.monotonic()) > 0:  # in Python, where it can be interrupted
            time.sleep(min(left, 0.01))
        out: torch.Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(self.seconds))
        return out


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return (output - target).square().mean()


def inboxes() -> int:
    """How many steps are under way in this process."""
    from nbdist.nn.inbox import Inbox

    gc.collect()
    return sum(isinstance(one, Inbox) for one in gc.get_objects())


def parts_of(pipe: Pipeline) -> list[PipelinePart]:
    """Return the parts of a pipeline whose workers are all in this process, in the order of their first stages."""
    import pytest  # which a worker does without

    from nbdist.nn.pipeline_part import PipelinePart

    found: list[PipelinePart] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PipelinePart, "train", lambda part, mode: found.append(part))
        pipe.train()
    return sorted(found, key=lambda part: min(part.stages))


class RMSNorm(nn.Module):
    """As in Llama's family."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale to a mean square of one."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """Attention with rotated, shared keys, and a gated feed-forward: SmolLM2's architecture."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.o = nn.Linear(heads * self.size, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        rows, length, _ = x.shape
        seen = self.norm1(x)
        q, k, v = (
            layer(seen).view(rows, length, count, self.size).transpose(1, 2)
            for layer, count in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        )
        q, k = _rotated(q), _rotated(k)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.o(found.transpose(1, 2).reshape(rows, length, -1)))
        seen = self.norm2(x)
        gated: torch.Tensor = self.down(nn.functional.silu(self.gate(seen)) * self.up(seen))
        return x + self.dropout(gated)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[-2], dtype=x.dtype)
    angle = torch.outer(position, 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def gpt(blocks: int = 9, width: int = 288, vocabulary: int = 4096, hidden: int = 768) -> nn.Sequential:
    """A small one with some 10 million parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(Block(width, 9, 3, hidden) for _ in range(blocks)),
        RMSNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )
    return model.double()


def next_token(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a language model."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class _Heap(ctypes.Structure):
    """C's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", "a", "b", "c", "mapped", "d", "e", "used", "f", "g"))


def memory() -> int:
    """Bytes that are in use: what the allocator has put aside comes and goes by tens of megabytes."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Heap
    heap = ask()
    return int(heap.used + heap.mapped)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def draw() -> list[object]:
    """A number of each generator of this process."""
    return [torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist()]
