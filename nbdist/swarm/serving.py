"""`serve`: loads a model's blocks on workers, and returns the `Swarm` that they form."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbdist import durations, trace
from nbdist.amounts import counted, size
from nbdist.channel.locked_directory import SharedDirectory
from nbdist.channel.secret import runtime_directory
from nbdist.errors import UsageError
from nbdist.rpc import api
from nbdist.swarm import adapter
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.directory import routing
from nbdist.swarm.named_models import folder_of
from nbdist.swarm.placer import Placer, describe
from nbdist.swarm.policy import Policy, Recover, check_amount, check_count, check_function
from nbdist.swarm.server.server import Options
from nbdist.swarm.swarm import Swarm
from nbdist.swarm.weight_file import WeightFile

_numbers = itertools.count()


def serve(
    model: Any,
    workers: Sequence[int | str],
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    recover: Recover = "exact",
    step_timeout: float = 60.0,
    cache_timeout: float = 60.0,
    route_timeout: float = 0.0,
    chunk: int | None = None,
    micro_batch: int | None = None,
    room: int | None = None,
    spend: Callable[[str, int], float] = lambda kind, tokens: 0.0,
    **options: Any,
) -> Swarm:
    """Load a model's blocks on workers and return the swarm that they form, once all blocks are loaded.

    Args:
        model: a transformers model, a folder with one, or ``"smollm2"``. This process writes the weights to a file in
            its runtime directory, unless a folder has them in the right form already. Workers that can read this file
            map it, so workers of one host share its memory, unless they have a GPU or another ``dtype``. They copy
            weights that do not begin at a multiple of 64 bytes in a file of yours; `Swarm.log` says how many bytes.
            Other workers get the weights of their blocks from this process.
        workers: the names or ids of the workers. With more workers than spans, the last workers are not used.
        spans: (begin, end) of the blocks for each worker. By default the blocks are divided so that the largest part
            is as small as possible. Blocks in no span are loaded by some worker when they are first needed.
        recover: how a session continues on another server when its server dies. "exact" replays its steps one by
            one: all later results are equal to the last bit. "fast" replays all steps at once: it is faster, and the
            results are equal within rounding.
        step_timeout: seconds within which a server must answer. A late server is not called for 5 seconds, then for
            twice as long after each further failure in a row, up to 300. Other servers take its place meanwhile.
        cache_timeout: if ``cache_bytes`` limits the caches, seconds to wait for cache memory when a session starts.
        route_timeout: seconds to wait for a worker when no worker can serve a block, such as while all restart.
        chunk: a step of a session with more tokens is split into steps of this size.
        micro_batch: the number of sequences in one part of a call without a cache. Up to 8 parts are computed at the
            same time.
        room: the most bytes of blocks that a worker may have when it takes over blocks from other workers. Blocks that
            ``spans``, `Swarm.join` or `Swarm.move` give to a worker are loaded in any case.
        spend: returns the points to spend on a request of a kind ("step", "forward", "backward") and a number of
            tokens. A server computes requests with more points first: `Options.prioritize`.
        options: the fields of `Options`, such as ``cache_bytes=10**9``.

    Returns:
        The swarm. It ends with `Swarm.close`, or when the swarm and all models made from it are garbage-collected. At
        the end of this process it goes on for other processes that use it: see `connect`.

    Raises:
        UsageError: ``model`` is not a model, the spans do not fit the model or the workers, a worker is unknown or
            named twice, or another argument is not valid.
        TypeError: there is no such option, or a time is not a number.
        NotInitialized: RPC is not running in this process.
        WorkerLost: a worker is dead, or died while it loaded its blocks.
        NbdistError: a worker does not answer.
        Exception: a worker's error of loading, as for a wrong ``device``, is raised unchanged.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> sw = nbdist.swarm.serve(model, workers=["worker0", "worker1"], spans=[(0, 3), (3, 4)])
        >>> print(sw)
        <Swarm of 4 blocks, 165 KB>
          worker0: blocks 0-2
          worker1: block 3
        >>> sw.close()
    """
    policy = Policy.of(locals())
    known = [field.name for field in dataclasses.fields(Options)]
    # `Options(**options)` would raise a TypeError that names Options, which the user did not call.
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"serve() has no argument {unknown[0]!r}; as options it takes {', '.join(known)}")
    servers = Options(**options)
    if not isinstance(workers, Sequence) or isinstance(workers, str):
        raise UsageError(f"workers is a list of names or ids, such as [0, 1], not {workers!r}")
    check_count("largest", servers.largest)
    check_amount("cache_bytes", servers.cache_bytes)
    check_function("prioritize", servers.prioritize)
    durations.positive(servers.session_timeout, "session_timeout")
    tell = trace.steps()
    tell("serve: the model's weights are read ...")
    agent = api.current_agent()
    # A cluster's directory goes with the notebook, as its workers do. Elsewhere, servers may outlive this process.
    base = agent.directory if agent.hosted and agent.directory is not None else runtime_directory()
    label = f"swarm-{os.getpid()}-{agent.me.incarnation:x}-{next(_numbers)}"
    folder = SharedDirectory.make(base, label)
    if isinstance(model, str | Path):
        given = Path(model).absolute() if Path(model).is_dir() else folder_of(str(model))
        checkpoint = adapter.Checkpoint.opened(given, folder.path)
    else:
        adapter.write_checkpoint(model, folder.path)
        checkpoint = adapter.Checkpoint(folder.path)
    journal = Journal()
    if isinstance(checkpoint.weights, WeightFile) and checkpoint.weights.copied:
        journal.tell(
            f"{size(checkpoint.weights.copied)} of weights are copied when they are loaded, not mapped: in "
            f"{checkpoint.folder} they do not begin at multiples of 64 bytes"
        )
    placer = Placer(describe(checkpoint, servers, policy, folder), checkpoint, journal, folder)
    found = Swarm(checkpoint, placer.make_crew(), journal)
    placer.watch(found.crew.publish())
    if spans is None:
        spans = routing.cut(found.sizes, len(workers))
    if len(spans) > len(workers):
        raise UsageError(f"{len(spans)} spans need {len(spans)} workers, but `workers` has only {len(workers)}")
    for begin, end in spans:
        found.check(begin, end)
    names = [api.current_agent().find(worker).name for worker in list(workers)[: len(spans)]]
    if len(set(names)) < len(names):
        raise UsageError(f"each worker serves one span, but some are named twice: {', '.join(names)}")
    with found.crew.working():
        placer.start(workers, spans, tell)
    placer.welcome()
    blocks, workers = counted(len(found), "block"), counted(len(spans), "worker")
    tell(f"serve: {blocks} on {workers}, {size(sum(found.sizes))}.")
    return found
