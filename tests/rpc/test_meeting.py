"""Members meet at the address that the URL names, and nowhere else, by ``tcp://`` and ``env://``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers.processes.listening import free_port, listening, reachable
from helpers.suite.python_path import TESTS, python_path

import nbdist
from nbdist import rpc

BEGIN = """
import os, sys, time
import torch, torch.distributed as dist
from helpers.processes.listening import listening, reachable
from nbdist import rpc
from nbdist.rpc import api
rank = int(os.environ["RANK"])
def join(**options):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(**options))
def group():
    dist.init_process_group("gloo")
def use():
    assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), rank)) == 1 + rank
    if dist.is_initialized():
        t = torch.ones(1); dist.all_reduce(t); assert t == 2
"""


def environment(rank: int, port: int, host: str = "127.0.0.1", **more: str) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return {**os.environ, "OMP_NUM_THREADS": "1", **python_path(TESTS), "GLOO_SOCKET_IFNAME": "lo", **own, **more}


def start(code: str, host: str = "127.0.0.1", port: int | None = None, **more: str) -> list[subprocess.Popen[str]]:
    """Start two processes that run ``code``, rank 0 and rank 1 of a world."""
    port = port or free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, "-c", BEGIN + code], env=environment(rank, port, host, **more), **pipes)
        for rank in range(2)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Wait until the processes end; return what each wrote, by rank. All have to succeed."""
    try:
        said = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), said
    return said


# -- where the store listens ----------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch):
    """Join a world of one by a URL, or by the environment; leave it; return where this process listened for it."""
    before = listening([os.getpid()])  # of earlier tests

    def join(url: str, host: str = "", port: int = 0) -> set[str]:
        for name, value in environment(0, port, host).items():
            if name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
                monkeypatch.setenv(name, value)
        options = rpc.RpcBackendOptions(init_method=url)
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            found = listening([os.getpid()]) - before
            assert not reachable(found)
            return {address for address in found if not address.startswith("/")}
        finally:
            rpc.shutdown()

    return join


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.7", "0.0.0.0"])
def test_the_store_listens_at_the_address_and_nowhere_else(alone, host):
    """Every interface means loopback, as long as no other machine takes part."""
    port = free_port()
    address = host if host.startswith("127") else "127.0.0.1"
    assert alone("env://", host, port) == {f"{address}:{port}"}
    assert alone(f"tcp://{host}:{port}") == {f"{address}:{port}"}


def test_a_world_that_could_not_form_leaves_no_listener():
    port = free_port()
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=2)
    with pytest.raises(nbdist.RendezvousError, match="no sign of rank 1"):
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    assert f"127.0.0.1:{port}" not in listening([os.getpid()])


# -- one port for RPC and a process group ---------------------------------------------------------


@pytest.mark.parametrize("order", ["join(); group()", "group(); join()"])
def test_init_rpc_and_init_process_group_share_a_port_in_either_order(order):
    said = finish(start(f"{order}; use(); print(reachable(listening([os.getpid()]))); rpc.shutdown()"))
    # What init_process_group opens itself is torch's, and listens everywhere: SECURITY.md says so. That of torch 2.10
    # also says on standard output how many peers it has.
    everywhere = [
        any(address.startswith(("[::]", "0.0.0.0")) for address in eval(found.splitlines()[-1])) for found, _ in said
    ]
    assert everywhere == [order.startswith("group"), False]


def test_a_port_that_another_program_has_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        with pytest.raises(nbdist.RendezvousError, match=rf"127\.0\.0\.1:{port}, where another program listens"):
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


# -- beyond this machine --------------------------------------------------------------------------


def own_address() -> str | None:
    """Return this machine's address on its network, if it has one; asking for the route sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but loopback")
@pytest.mark.timeout(60)
def test_a_listener_that_never_answers_is_no_store():
    with socket.create_server(("127.0.0.1", 0)) as other:  # its backlog takes the connection
        port = other.getsockname()[1]
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=1)
        with pytest.raises(
            nbdist.RendezvousError, match=rf"127\.0\.0\.1:{port} has not answered as a store within 1 s"
        ):
            rpc.init_rpc("late", rank=1, world_size=2, rpc_backend_options=options)


def test_the_store_leaves_loopback_only_with_a_secret(monkeypatch):
    monkeypatch.delenv("NBDIST_SECRET_FILE", raising=False)
    url = f"tcp://{own_address()}:{free_port()}"
    before = listening([os.getpid()])  # of earlier tests
    for rank in range(2):  # also who does not serve the store hears it at once
        with pytest.raises(nbdist.SecurityError, match="which other machines reach"):
            rpc.init_rpc("alone", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))
    assert not reachable(listening([os.getpid()]) - before)


@pytest.mark.parametrize("host", ["localhost.example", "127.example", "0.0.0.0"])
def test_a_host_that_only_looks_like_loopback_needs_a_secret(monkeypatch, host, tmp_path):
    monkeypatch.delenv("NBDIST_SECRET_FILE", raising=False)
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", host=host)
    with pytest.raises(nbdist.SecurityError, match="need a secret"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


# -- torchrun -------------------------------------------------------------------------------------


def test_under_torchrun_no_rank_tries_to_serve_the_store_before_and_after_a_restart(tmp_path):
    program = tmp_path / "program.py"
    fail_once = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)"
    end = "rpc.shutdown(); dist.destroy_process_group(); print('done')"
    program.write_text(f"{BEGIN}\njoin(); use()\n{fail_once}\ngroup(); use(); {end}\n")
    arguments = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, str(program)],
        env={**environment(0, 1), "TORCH_CPP_LOG_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.count("done") == 2, done.stderr
    assert "failed to bind" not in done.stderr
    assert "failed to listen" not in done.stderr
    assert "Exception raised from" not in done.stderr  # torch's C++ backtraces


# -- the end --------------------------------------------------------------------------------------

LATE = "api.current_agent()._at_close.insert(0, lambda: time.sleep(1))"
"""Makes a member slow between the end of the world and leaving the store."""


def test_a_member_that_leaves_late_finds_the_store_and_prints_no_backtrace():
    said = finish(start(f"join()\nif rank: {LATE}\nrpc.shutdown()"))
    assert [errors for _, errors in said] == ["", ""]


def test_a_member_that_outlives_the_store_prints_no_backtrace():
    code = "join(); use(); print('joined', flush=True); sys.stdin.read()\nrpc.shutdown(graceful=False)"
    port = free_port()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first, second = (
        subprocess.Popen([sys.executable, "-c", BEGIN + code], env=environment(rank, port), **pipes)
        for rank in range(2)
    )
    try:
        assert [process.stdout.readline() for process in (first, second)] == ["joined\n"] * 2
        first.send_signal(signal.SIGKILL)
        first.wait()
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 0
        assert "Exception raised from" not in errors
        assert "c10d" not in errors
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def end_worlds(count: int) -> None:
    """Form and end many worlds at one port, without a pause: a quick member meets the server of the world before."""
    world = "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2); rpc.shutdown()"
    said = finish(start(f"for _ in range({count}): {world}"))
    assert [errors for _, errors in said] == ["", ""]


def test_worlds_follow_each_other_at_one_port():
    end_worlds(20)


@pytest.mark.soak
def test_a_thousand_worlds_follow_each_other_at_one_port():
    end_worlds(1000)


# -- absurd sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10**9, 1 << 62])
def test_a_world_of_absurd_size_costs_nothing_but_its_timeout(size, tmp_path):
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=1)
    began = time.process_time()
    with pytest.raises(nbdist.RendezvousError, match=r"no sign of rank 1, 2, .*, 20 and \d+ more"):
        rpc.init_rpc("alone", rank=0, world_size=size, rpc_backend_options=options)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("size", [1 << 64, 10**400])
def test_a_world_larger_than_any_number_in_a_message_is_refused(size, tmp_path):
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=1)
    with pytest.raises(nbdist.UsageError, match="world_size"):
        rpc.init_rpc("alone", rank=0, world_size=size, rpc_backend_options=options)
    with pytest.raises(nbdist.UsageError, match="rank"):
        rpc.init_rpc("alone", rank=size, rpc_backend_options=options)
