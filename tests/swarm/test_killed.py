"""Workers killed with SIGKILL in the middle of what they are asked: the text goes on as if nothing had been."""

import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from helpers.models import swarm_models
from helpers.processes import workers
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

from nbdist.errors import UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.swarm import adapter, named_models, serve
from nbdist.swarm.client.crew import Gone
from nbdist.swarm.directory.routing import NoRoute
from nbdist.swarm.placer import Placer
from nbdist.swarm.server.server import Options, Server
from nbdist.swarm.server.sources import offer


class At(transformers.StoppingCriteria):
    """Does something behind a certain token."""

    def __init__(self, token, act):
        self.left = token
        self.act = act

    def __call__(self, ids, scores, **_):
        self.left -= 1
        if not self.left:
            self.act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def at(token, act):
    return transformers.StoppingCriteriaList([At(token, act)])


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize(("mode", "token", "victim"), [("greedy", 1, 0), ("beams", 5, 1), ("prompt lookup", 2, 2)])
def test_the_text_is_the_same(three, family, mode, token, victim):
    model = swarm_models.make(family)
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, mode)
    found = swarm_models.generate(remote, mode, stopping_criteria=at(token, lambda: swarm.kill(victim)))
    assert torch.equal(found, expected)
    assert set(swarm.blocks) == {"worker0", "worker1", "worker2"} - {f"worker{victim}"}  # and nobody else is given up
    assert sorted({block for blocks in swarm.blocks.values() for block in blocks}) == list(range(6))
    swarm.close()


def test_a_session_ends_with_its_text_and_not_when_garbage_is_collected(three):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1, 2])
    remote = swarm.causal_lm()
    gc.collect()
    gc.disable()
    try:
        for victim in (1, 2):
            swarm_models.generate(remote, "greedy", stopping_criteria=at(4, lambda: swarm.kill(victim)))  # noqa: B023
            assert "again" in swarm.log[-1]
            assert not swarm.sessions.open()
    finally:
        gc.enable()
    swarm.close()


def test_a_call_to_a_server_that_is_known_to_be_gone_is_freed_at_once(three):
    """Its error is raised where the call is made, whose frame has the call, and the session's cache."""
    swarm = serve(swarm_models.make("llama"), workers=[0, 1, 2])
    member = swarm.crew.member("worker1")
    swarm.kill(1)
    wait_until(lambda: "worker1" not in api.current_agent().membership.names)
    gc.collect()
    gc.disable()
    try:
        asked = swarm.crew.send(member, "info")
        assert isinstance(asked.exception(), WorkerLost)
        left = weakref.ref(asked)
        del asked
        assert left() is None
    finally:
        gc.enable()
    swarm.close()


def test_a_client_that_is_killed_takes_its_sessions_along(three, tmp_path):
    adapter.write_checkpoint(swarm_models.make("llama"), tmp_path)
    server = api.remote("worker1", Server, (offer(adapter.Checkpoint(tmp_path)), Options(), "shared"))
    for client in (0, 2):
        api.rpc_sync(f"worker{client}", swarm_models.begin_a_text, args=(server,))
        assert server.rpc_sync().info().sessions == 1
        server.rpc_sync().open("ours", 0, None, api.current_agent().me.incarnation)
        os.kill(three.workers[client].pid, signal.SIGKILL)
        wait_until(lambda client=client: three.workers[client].lost)
        wait_until(lambda: server.rpc_sync().info().sessions != 2)
        assert server.rpc_sync().info().sessions == 1  # that of who is there
        server.rpc_sync().close("ours")
    server.release()


def test_two_after_each_other_and_one_that_comes_back(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "beams", tokens=20)
    steps = {
        3: lambda: swarm.kill(0),
        6: lambda: swarm.kill(1),
        9: lambda: back(three, swarm),
        12: lambda: swarm.kill(2),
    }
    count = iter(range(1, 100))
    criteria = transformers.StoppingCriteriaList([Each(lambda: steps.get(next(count), lambda: None)())])
    found = swarm_models.generate(remote, "beams", tokens=20, stopping_criteria=criteria)
    assert torch.equal(found, expected)
    assert set(swarm.blocks) == {"worker0"}
    assert "worker2, which had" in "\n".join(swarm.log)
    swarm.kill(0)
    with pytest.raises(NoRoute, match="no server is left"):
        swarm_models.generate(remote, "one")
    swarm.close()


def back(cluster, swarm):
    cluster.restart("0")
    swarm.join(0)


def each_of(steps):
    count = iter(range(1, 1000))
    return transformers.StoppingCriteriaList([Each(lambda: steps.get(next(count), lambda: None)())])


class Each(transformers.StoppingCriteria):
    """Does something behind each token."""

    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores, **_):
        self.act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def test_a_replica_takes_over(three):
    model = swarm_models.make("qwen3")
    swarm = serve(model, workers=[0, 1], spans=[(0, 3), (3, 6)])
    swarm.join(2, 2, 6)
    remote = swarm.causal_lm()
    expected = swarm_models.generate(model, "greedy")
    found = swarm_models.generate(remote, "greedy", stopping_criteria=at(4, lambda: swarm.kill(1)))
    assert torch.equal(found, expected)
    assert swarm.blocks == {"worker0": [0, 1, 2], "worker2": [2, 3, 4, 5]}  # which had to load nothing
    swarm.close()


def test_killed_between_forward_and_backward(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()

    def kill(each):
        if each is remote:
            swarm.kill(1)

    assert torch.equal(*swarm_models.gradients((model, remote), between=kill))
    assert set(swarm.blocks) == {"worker0", "worker2"}
    swarm.close()


def test_a_bad_request_is_an_error_and_nobody_is_given_up(three):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1])
    remote = swarm.causal_lm()
    with pytest.raises(RuntimeError):
        remote(inputs_embeds=torch.zeros(1, 3, 31))
    assert set(swarm.blocks) == {"worker0", "worker1"}
    cache = remote(**swarm_models.one()).past_key_values
    with pytest.raises(RuntimeError):
        remote(inputs_embeds=torch.zeros(1, 3, 31), past_key_values=cache)
    with pytest.raises(UsageError, match="of a call that failed"):
        remote(**swarm_models.one(), past_key_values=cache)
    assert swarm_models.generate(remote, "one").shape == (1, 21)
    swarm.close()


def test_a_worker_that_is_back_before_anybody_has_noticed(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2])
    remote = swarm.causal_lm()

    def die_and_return():
        swarm.kill(1)
        three.workers[1].ended.wait(10)
        three.restart("1")
        swarm.join(1, 2, 4)

    expected = swarm_models.generate(model, "greedy")
    assert torch.equal(swarm_models.generate(remote, "greedy", stopping_criteria=at(4, die_and_return)), expected)
    assert swarm.blocks["worker1"] == [2, 3]
    swarm.close()


def size_of_a_block(model):
    return sum(tensor.nbytes for tensor in model.model.layers[0].state_dict().values())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_span_that_has_to_be_divided(three, victim):
    model = swarm_models.make("llama")
    for recover in ("exact", "fast"):
        swarm = serve(model, workers=[0, 1, 2], recover=recover, room=3 * size_of_a_block(model))
        remote = swarm.causal_lm()
        expected = swarm_models.generate(model, "beams")
        steps = {4: lambda swarm=swarm: swarm.kill(victim)}
        assert torch.equal(swarm_models.generate(remote, "beams", stopping_criteria=each_of(steps)), expected)
        assert sorted(map(len, swarm.blocks.values())) == [3, 3]
        swarm.close()
        three.restart()


def test_nobody_who_is_left_has_room(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1], room=3 * size_of_a_block(model))
    remote = swarm.causal_lm()
    with pytest.raises(NoRoute, match=r"for the weights of block 0: .*; worker0 is gone: .*SIGKILL"):
        swarm_models.generate(remote, "one", stopping_criteria=each_of({2: lambda: swarm.kill(0)}))
    assert set(swarm.blocks) == {"worker1"}
    swarm.close()


def test_one_that_hangs_is_left_alone_for_a_while_and_then_asked_again(three):
    model = swarm_models.make("llama")
    expected = swarm_models.generate(model, "greedy", tokens=20)
    swarm = serve(model, workers=[0, 1, 2], step_timeout=2.0)
    swarm.crew.ban_seconds = 1.5
    remote = swarm.causal_lm()
    pid = swarm.info()["worker1"].pid
    try:
        steps = {4: lambda: os.kill(pid, signal.SIGSTOP)}
        found = swarm_models.generate(remote, "greedy", tokens=20, stopping_criteria=each_of(steps))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert torch.equal(found, expected)
    assert "worker1 did not answer for 2 s: it is left alone for 1.5 s" in "\n".join(swarm.log)
    assert swarm.states["worker1"] in ("banned", "online")
    assert swarm.states["worker0"] == swarm.states["worker2"] == "online"  # nobody who waited for it is to blame
    wait_until(lambda: swarm.states["worker1"], equals="online")
    swarm.move(0, 6, "worker1")
    assert torch.equal(swarm_models.generate(remote, "greedy", tokens=20), expected)
    swarm.close()


def test_one_that_hangs_is_not_waited_for_as_long_as_room_is(three):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[0, 1, 2], step_timeout=2.0, cache_timeout=60.0, cache_bytes=1 << 20)
    remote = swarm.causal_lm()
    pid = swarm.info()["worker1"].pid
    try:
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        found = swarm_models.generate(remote, "greedy")
        assert time.monotonic() - began < 55  # a cache_timeout is 60 s
    finally:
        os.kill(pid, signal.SIGCONT)
    assert torch.equal(found, swarm_models.generate(model, "greedy"))
    swarm.close()


def test_one_that_hangs_before_it_serves_is_not_waited_for_as_long_as_one_that_loads(three, monkeypatch):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1], step_timeout=2.0)
    pid = three.workers[2].pid
    try:
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("nbdist.swarm.placer._NEW_WORKER_SECONDS", 0.5)
            with pytest.raises(Gone, match="worker2 did not answer"):
                swarm.join(2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert swarm.states["worker2"] == "gone"
    swarm.join(2)
    assert swarm.blocks["worker2"] == list(range(6))
    swarm.close()


def test_all_hang(three):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1], step_timeout=0.5)
    remote = swarm.causal_lm()
    pids = [info.pid for info in swarm.info().values()]
    try:
        [os.kill(pid, signal.SIGSTOP) for pid in pids]
        with pytest.raises(NoRoute, match="worker0 is banned: did not answer; asked again in"):
            swarm_models.generate(remote, "one")
    finally:
        [os.kill(pid, signal.SIGCONT) for pid in pids]
    swarm.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["greedy", "beams", "deep prompts"])
def test_every_position_and_every_span(three, mode):
    model = swarm_models.make("llama")
    prompts = torch.randn(6, 1, 4, 32, generator=torch.Generator().manual_seed(0))
    expected, failed = None, []
    for token in range(65):  # behind which it happens; the first time not at all
        for victim in range(3) if token else [None]:
            swarm = serve(model, workers=[0, 1, 2])
            remote = swarm.causal_lm()
            if mode == "deep prompts":
                remote.deep_prompts = prompts
            criteria = at(token, lambda swarm=swarm, victim=victim: swarm.kill(victim))
            way = "greedy" if mode == "deep prompts" else mode
            found = swarm_models.generate(remote, way, tokens=66, stopping_criteria=criteria)
            if victim is None:
                expected = found
                if mode != "deep prompts":
                    assert torch.equal(found, swarm_models.generate(model, way, tokens=66))
                continue
            healthy = [state for name, state in swarm.states.items() if name != f"worker{victim}"]
            if not torch.equal(found, expected) or healthy != ["online", "online"]:
                failed.append((token, victim, swarm.states))
            swarm.close()
            three.workers[victim].ended.wait(10)
            three.restart(str(victim))
    assert failed == []


def test_a_worker_that_was_killed_a_moment_ago_is_lost_and_not_unknown(three):
    model = swarm_models.make("llama")
    os.kill(three.workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        serve(model, workers=[0, 1, 2])  # nobody may have noticed yet
    wait_until(lambda: three.workers[1].lost)
    for named in (1, "worker1"):
        with pytest.raises(WorkerLost, match=r"worker.*1 was killed by SIGKILL"):
            serve(model, workers=[0, named])


def test_a_worker_that_is_killed_while_it_loads_is_lost(three, monkeypatch):
    send, pid = Placer._send_load, three.workers[1].pid

    def sending(placer, member, *span):
        if member.name == "worker1":
            workers.stop(pid)  # so that it has not answered when it is killed
        sent = send(placer, member, *span)
        if member.name == "worker1":
            os.kill(pid, signal.SIGKILL)
        return sent

    monkeypatch.setattr(Placer, "_send_load", sending)
    with pytest.raises(WorkerLost, match="worker1 was killed by SIGKILL"):
        serve(swarm_models.make("llama"), workers=[0, 1, 2])


_PROGRAM = """
import nbdist, sys, time
from helpers.models import swarm_models
from nbdist.swarm import serve

if __name__ == "__main__":
    cluster = nbdist.Cluster(2, backend="none", preload=["nbdist.swarm"]).start()
    swarm = serve(swarm_models.make("llama"), workers=[0, 1])
    print(swarm.checkpoint.folder, flush=True)
    time.sleep(300)
"""


@pytest.mark.timeout(120)
def test_the_weights_go_with_a_program_that_is_killed(tmp_path):
    runtime = tempfile.mkdtemp(prefix="nbdist-", dir="/tmp")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "NBDIST_RUNTIME_DIR": runtime, "TMPDIR": str(temporary), **python_path(TESTS)}
    (tmp_path / "program.py").write_text(_PROGRAM)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        folder = Path(program.stdout.readline().strip())
        assert runtime in str(folder)
        assert (folder / "model.safetensors").exists()
        program.kill()
        wait_until(lambda: [*{*os.listdir(runtime)} - {"secret"}, *os.listdir(temporary)], equals=[])
    finally:
        program.kill()
        program.communicate()
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.mark.parametrize("alive", [True, False])
def test_an_unfinished_copy_of_a_named_model_goes_with_its_maker(tmp_path, monkeypatch, alive):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(named_models._MAKERS, "smollm2", lambda folder: (folder / "config.json").write_text("{}"))
    unfinished = tmp_path / "nbdist" / "smollm2-before"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    with (unfinished / "lock").open("wb") as lock:
        if alive:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert (named_models.folder_of("smollm2") / "config.json").exists()
    assert sorted(path.name for path in (tmp_path / "nbdist").iterdir()) == ["smollm2"] + ["smollm2-before"] * alive
