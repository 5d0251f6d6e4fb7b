"""Measures how much of a call's CPU time an extension in C could save at most: that of framing, envelope and body.

It times what the package does to turn a usual call and its answer into bytes and back, on both sides, in a loop. An
extension that took no time at all would save that much. `make bench` measures the CPU time of a whole call, which is
several times as much: benchmarks/README.md, "Would an extension in C pay?".
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbdist.channel import framing
from nbdist.wire import codec
from nbdist.wire.messages import Call, Envelope, Mode, Reply, decode_envelope, encode_envelope
from nbdist.wire.pickling import names

_CALLS = 20_000
_ROUNDS = 11


def microseconds(step: Callable[[], Any]) -> float:
    """Return how long one step takes: the median over the rounds."""
    return statistics.median(timeit.repeat(step, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e6


def joined(frames: Sequence[Any]) -> bytes:
    """Return the bytes of a message, as a link sends them."""
    return b"".join([framing.head([*map(len, frames)]), *frames])


def message_parts(envelope: Callable[[], Envelope], frames: Sequence[Any]) -> dict[str, float]:
    """Return what a message takes beside its body, by part, and in it the parts of both sides."""
    first = encode_envelope(envelope())
    whole = joined([first, *frames])
    cutter = framing.FrameCutter(1 << 30)
    return {
        "envelope written": microseconds(lambda: encode_envelope(envelope())),
        "frames joined": microseconds(lambda: joined([first, *frames])),
        "frames cut": microseconds(lambda: cutter.feed(whole)),
        "envelope read": microseconds(lambda: decode_envelope(first)),
    }


def measure(function: Any, args: tuple[Any, ...], result: Any) -> dict[str, dict[str, float]]:
    """Return the parts of a call and of its answer, in microseconds."""
    named = names.describe(function)
    label, body = named.label, named.name
    encoded, returned = codec.encode_usual_call(body, args, {}, None), codec.encode_usual_result(result, None)
    if encoded is None or returned is None:
        raise ValueError(f"{label} is no usual call")
    (call, frames), (answer, back) = encoded, returned
    asked = message_parts(
        lambda: Envelope(1, 2, 7, 7, 6, [], Call(7, Mode.CALL, label, call, False, None, None, "cell", None), [], []),
        frames,
    )
    told = message_parts(lambda: Envelope(2, 1, 7, 7, 7, [], Reply(7, True, answer), [], []), back)
    asked["body written"] = microseconds(lambda: codec.encode_usual_call(body, args, {}, None))
    asked["body read"] = microseconds(lambda: codec.decode_early(call, frames))
    told["body written"] = microseconds(lambda: codec.encode_usual_result(result, None))
    told["body read"] = microseconds(lambda: codec.decode_early(answer, back))
    return {"call": asked, "answer": told}


def main() -> None:
    """Print the table."""
    tensor = torch.ones(3)
    for title, parts in {
        "empty call": measure(abs, (), None),
        "torch.add of a small tensor": measure(torch.add, (tensor, 1), tensor),
    }.items():
        total = sum(sum(side.values()) for side in parts.values())
        print(f"{title}: {total:.1f} µs")
        for side, found in parts.items():
            print(f"  {side}: " + ", ".join(f"{what} {took:.1f}" for what, took in found.items()))


if __name__ == "__main__":
    main()
