"""Nothing listens where other machines or other users reach it, in clusters, RPC worlds, swarms and notebooks (G6)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Set

import psutil
import pytest
from helpers.models import swarm_models
from helpers.notebook.frontend import Notebook
from helpers.processes.listening import family, free_port, listening, ports, reachable

import nbdist
from nbdist.swarm import serve

MEMBER = """
import sys
from nbdist import rpc
rank = int(sys.argv[1])
for url in sys.argv[2:]:
    options = rpc.RpcBackendOptions(init_method=url)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    print("joined", flush=True)
    sys.stdin.readline()
    rpc.shutdown()
"""


def other_interface() -> str:
    """Return the name of an interface that is not loopback, for gloo to be misled with."""
    return next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")


def seen(pids: Iterable[int], earlier: Set[str] = frozenset()) -> set[str]:
    """Return where processes listen, but for ``earlier``. There is something, and nobody else may reach any of it."""
    found = listening(pids) - earlier
    assert found
    assert not reachable(found)
    return found


@pytest.fixture
def earlier() -> set[str]:
    """Where this process listens already: the gloo group of a DDP module does so even after its end."""
    return listening([os.getpid()])


def test_a_store_of_torchs_own_would_be_found(earlier):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ports(reachable(listening([os.getpid()]) - earlier)) == [store.port]
    del store


def test_sockets_that_other_users_reach_would_be_found(tmp_path, earlier):
    tmp_path.chmod(0o755)
    (tmp_path / "closed").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as closed, socket.socket(socket.AF_UNIX) as abstract:
        closed.bind(str(tmp_path / "closed" / "socket"))
        abstract.bind("\0nbdist-test")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.bind(("0.0.0.0", 0))
            for listener in (closed, abstract):
                listener.listen()
            found = listening([os.getpid()]) - earlier
            assert str(tmp_path / "closed" / "socket") in found
            assert reachable(found) == {"@nbdist-test", f"0.0.0.0:{udp.getsockname()[1]}"}


# -- a cluster, with a swarm ----------------------------------------------------------------------


def test_a_cluster_and_a_swarm_listen_on_loopback_and_in_their_folder(monkeypatch, earlier):
    """Only gloo has ports, and only in workers, whatever interface the environment names for it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", other_interface())
    with nbdist.Cluster(2) as cluster:
        everybody = {*family(os.getpid()), *(worker.pid for worker in cluster.workers)}
        swarm = serve(swarm_models.make("llama"), workers=[0, 1])
        swarm_models.generate(swarm.causal_lm(), "greedy")
        cluster.execute("subgroup = dist.new_group([0, 1]); dist.all_reduce(torch.ones(1), group=subgroup)")
        found = seen(everybody, earlier)
        gloo = {worker.name: ports(seen([worker.pid])) for worker in cluster.workers}
        assert all(gloo.values())
        assert ports(found) == sorted(port for each in gloo.values() for port in each)

        before = cluster.workers[1].pid
        psutil.Process(before).kill()
        assert cluster.workers[1].exited.wait(20)
        cluster.restart("worker1", process_group=True)
        cluster.execute("dist.all_reduce(torch.ones(1))")
        assert cluster.workers[1].pid != before
        seen({*family(os.getpid()), *(worker.pid for worker in cluster.workers)}, earlier)


# -- a world of plain processes -------------------------------------------------------------------


def test_an_rpc_world_listens_on_loopback_and_in_its_folder(tmp_path):
    """Only rank 0 has a port, and only one: at the address that the URL names."""
    port = free_port()
    urls = {f"tcp://localhost:{port}": [port], "env://": [port], f"file://{tmp_path}/meet": []}
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    members = [
        subprocess.Popen([sys.executable, "-c", MEMBER, str(rank), *urls], env=environment, **pipes)
        for rank in range(2)
    ]
    try:
        for expected in urls.values():
            assert [member.stdout.readline() for member in members] == ["joined\n"] * 2
            found = [seen(family(member.pid)) for member in members]
            assert [ports(addresses) for addresses in found] == [expected, []]
            for member in members:
                member.stdin.write("\n")
                member.stdin.flush()
        assert [member.wait(60) for member in members] == [0, 0]
    finally:
        for member in members:
            member.kill()
            member.communicate()


# -- a notebook -----------------------------------------------------------------------------------


def test_a_notebooks_extension_and_its_cluster_add_no_port_but_gloos():
    with Notebook() as notebook:
        kernel = {psutil.Process(notebook.pid).pid}
        own = ports(seen(kernel))  # the kernel's channels, which ipykernel binds and its own key protects
        notebook.run("%dist_init -n 2 -t 60\n%dist_panel")
        notebook.run("%%remote\ndist.all_reduce(torch.ones(1))")
        assert ports(seen(kernel)) == own
        notebook.run("from nbdist import Cluster")
        workers = eval(notebook.run("[worker.pid for worker in Cluster.current.workers]").result)
        everybody = {*family(notebook.pid), *workers}
        assert len(everybody) > 3
        found = seen(everybody)
        assert ports(found) == sorted(own + ports(seen(workers)))
        notebook.run("%dist_shutdown")
        assert ports(seen(kernel)) == own
