"""What one member sends, mutated at any place behind the handshake, harms the member that receives it, and others, not.

A member may run code on the others, so this is no door to be guarded but robustness: a bug, a bad cable or a newer
version must not take a whole cluster down. The victim keeps serving, its values stay, and once the mad member is gone
nothing of it is left.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist import rpc
from nbdist.rpc import api

FIRST = (
    "import resource, logging\n"
    # A mutated length ends in MemoryError, and soon: while Python fills 16 GB with zeros no other thread runs, and
    # who joins meanwhile rightly takes the victim for dead.
    "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
    "logging.disable()  # nobody reads its warnings, and a full pipe would stop it\n"
)
SERVE = "import threading; threading.Event().wait(300)"


@pytest.mark.parametrize(("lives", "seed"), [(8, 2), *(pytest.param(80, n, marks=pytest.mark.soak) for n in range(10))])
def test_mutated_messages_of_a_member(lives, seed):
    store = tempfile.mktemp(prefix="nbdist-test-")
    others = workers.Workers()
    try:
        victim = others.start("victim", workers.member("victim", 1, None, store, then=SERVE, first=FIRST))
        options = rpc.RpcBackendOptions(init_method=f"file://{store}")
        rpc.init_rpc("witness", rank=0, world_size=None, rpc_backend_options=options)
        wait_until(lambda: len(api.current_agent().membership.members()) == 2)
        value = rpc.remote("victim", torch.arange, args=(5,))
        assert value.to_here().tolist() == [0, 1, 2, 3, 4]
        lent = rpc.rpc_sync("victim", torch.full, args=((300_000,), 7.0))  # in the victim's shared memory
        mad = others.start(
            "mad", f"from helpers.abuse import mad_member; mad_member.attack({store!r}, 'victim', {seed}, {lives}, 125)"
        )
        sent = 0
        for life in range(lives):
            line = mad.stdout.readline()
            assert line, mad.communicate()[1]
            sent += int(line)
            assert victim.poll() is None, f"it died in life {life}"
            assert rpc.rpc_sync("victim", torch.add, args=(torch.ones(2), life)).tolist() == [life + 1, life + 1]
            assert value.to_here().tolist() == [0, 1, 2, 3, 4]
            assert rpc.rpc_sync("victim", torch.full, args=((300_000,), 9.0)).sum() == 2_700_000
            assert (lent == 7).all()
        assert mad.wait(60) == 0
        assert sent > lives * 60, "it was given up too early for this to be a test"

        ours = {"running_calls": 1, "owned_values": 1, "forks_of_owned": 1}
        expected = {**ours, "used_references": 0, "arena_blocks_held": 0, "pending_calls": 0}

        def held():
            rpc.rpc_sync("victim", gc.collect)  # the arguments of a call that failed lie in the frames of its error
            now = rpc.rpc_sync("victim", workers.statistics)
            assert now["members"] <= 3
            return {name: now[name] for name in expected}

        wait_until(held, equals=expected)
        assert rpc.rpc_sync("victim", workers.resident) < 1000
        del value, lent
    finally:
        if workers.is_running():
            rpc.shutdown(graceful=False)
        others.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)
