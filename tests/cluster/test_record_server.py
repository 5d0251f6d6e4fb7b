"""The host of a worker reads the worker's record of collectives at a socket of torch's server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nbdist.cluster.processes.probe import probe
from nbdist.cluster.processes.setup import where_file

WORKER = """
import os, sys
import torch.distributed as dist
from nbdist.cluster.processes.setup import record_socket
from nbdist.cluster.worker.record_server import RecordServer

server = RecordServer()
server.note_forming(record_socket(sys.argv[1], "worker0"))
if child := os.fork():
    print(os.waitpid(child, 0)[1], flush=True)
    sys.stdin.read()
# The child ends as Python does, which frees what modules hold.
"""


@pytest.fixture
def worker():
    """A process with a server, whose child has ended, and its run directory, whose name could be no host's."""
    with (
        tempfile.TemporaryDirectory(prefix="ö" + "x" * 50, dir="/tmp") as folder,  # a socket's path has 107 bytes
        subprocess.Popen(
            [sys.executable, "-c", WORKER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"},
        ) as process,
    ):
        open(where_file(folder, "worker0"), "w").close()
        assert process.stdout.readline() == "0\n"
        yield process, Path(folder)
        process.stdin.close()
        assert process.wait() == 0
        assert "listening" not in process.stderr.read()


def test_a_child_that_ends_leaves_the_server_to_its_parent(worker):
    process, folder = worker
    found = probe(folder, "worker0", process.pid, lambda name, number: None).result(10)
    assert "version" in json.loads(found.record)
    assert found.formed > 0
    assert found.memory


def test_a_process_without_a_socket_tells_no_record(tmp_path):
    open(where_file(str(tmp_path), "worker0"), "w").close()
    found = probe(tmp_path, "worker0", os.getpid(), lambda name, number: None).result(10)
    assert (found.frames, found.record) == ("", b"")
    assert found.memory
