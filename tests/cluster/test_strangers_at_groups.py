"""Another user finds no store through which to take a rank in a cluster's process group (G6)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.processes.listening import family, listening, ports

STRANGER = """
import encodings.idna, json, os, socket, struct, sys  # nothing may be imported later: whose files are they?

os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder, *ports = sys.argv[1:]

def error(attempt, *arguments):
    try:
        return repr(attempt(*arguments))
    except Exception as error:
        return type(error).__name__

def is_a_store(port):
    # What a client of torch's TCPStore sends first, and what the server answers.
    try:  # the port may be closed by now
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as server:
            server.settimeout(0.5)
            server.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 1234))
            return server.recv(4) == struct.pack("<I", 1234)
    except (TimeoutError, ConnectionError):
        return False

print(json.dumps({
    "list": error(os.listdir, folder),
    "write": error(open, os.path.join(folder, "key-0"), "wb"),
    "read": error(open, os.path.join(folder, "lock"), "rb"),
    "stores": [port for port in ports if is_a_store(port)],
}))
"""


def attack(cluster):
    """Have the user `nobody` try the folder of the group, and all ports of these processes; return the outcomes."""
    found = ports(listening({*family(os.getpid()), *(worker.pid for worker in cluster.workers)}))
    folder = next(Path(cluster.folder).glob("group-*"), cluster.folder)
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(folder), *map(str, found)], stdout=subprocess.PIPE, check=True, timeout=100
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try it as another user")
def test_a_stranger_finds_no_store_of_a_cluster_at_first_and_after_a_restart(shared_cluster, own_variables):
    denied = dict.fromkeys(("list", "write", "read"), "PermissionError")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # to see that one would be found
    assert attack(shared_cluster) == {**denied, "stores": [str(store.port)]}
    os.kill(shared_cluster.workers[0].pid, signal.SIGKILL)
    assert shared_cluster.workers[0].exited.wait(20)
    shared_cluster.restart("worker0", process_group=True)
    assert attack(shared_cluster) == {**denied, "stores": [str(store.port)]}
    shared_cluster.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size", timeout=60)
