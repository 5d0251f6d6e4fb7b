"""What reaches a kernel, the zygote or a secret from outside: frames at the ports, and what others may read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zmq
from helpers.abuse import mad_member

import nbdist
import nbdist.channel.secret
from nbdist.cluster.errors import CellError
from nbdist.cluster.jupyter.jupyter_wire import decode, encode, new_header, pack
from nbdist.errors import ProtocolError

PORTS = ("shell", "control", "stdin", "hb")
REQUESTS = {
    "kernel_info_request": {},
    "execute_request": {"code": "1 + 1", "silent": False, "store_history": False, "user_expressions": {"a": "1"}},
    "complete_request": {"code": "tor", "cursor_pos": 3},
    "inspect_request": {"code": "torch", "cursor_pos": 5, "detail_level": 0},
    "is_complete_request": {"code": "for x in y:"},
    "comm_open": {"comm_id": "a", "target_name": "nobody", "data": {}},
    "comm_msg": {"comm_id": "a", "data": {"method": "update"}},
    "comm_info_request": {},
    "history_request": {"output": False, "raw": True, "hist_access_type": "tail", "n": 3},
    "interrupt_request": {},
    "input_reply": {"value": "x", "status": "ok"},
}


def mutated(key: bytes | None, chance: random.Random, port: str = "shell") -> list[bytes]:
    """Return a request of Jupyter's, mutated: before it is signed with the key, or after that, or signed wrongly.

    None of them executes code or interrupts at the control port: whoever holds the key may have a kernel do so beside
    the cell of the moment, by design. That cell would then find the value of the other code as its own, or end.
    """
    kinds = [kind for kind in REQUESTS if port != "control" or kind not in ("execute_request", "interrupt_request")]
    kind = chance.choice(kinds)
    content = dict(REQUESTS[kind])
    header = new_header(kind, "stranger")
    if key is not None and chance.random() < 0.7:
        for fields in (content, header):
            if fields and chance.random() < 0.6:
                name = chance.choice(list(fields))
                fields[name] = chance.choice([None, -1, 1 << 70, "x" * 300, [], {}, [[]], True, 1e308])
                if chance.random() < 0.3:
                    del fields[name]
        return encode(key, header, pack(content), parent=header)
    frames = encode(key or b"a guess", header, pack(content))
    at = chance.randrange(len(frames))
    frames[at] = mad_member.scramble(frames[at], chance)
    if chance.random() < 0.2:
        del frames[chance.randrange(len(frames))]
    return frames


def answer(cluster: nbdist.Cluster) -> int:
    """Return what a cell on worker0 evaluates to.

    A stranger's cell that fails has the kernel give up the cells behind it: whoever holds the key may ask for that, and
    the cell says so. A mutated cell does it by chance, so the cell is run again.
    """
    while True:
        try:
            return cluster.evaluate("40 + 2", "worker0", timeout=60)
        except CellError as error:
            if [each.name for each in error.errors] != ["Aborted"]:
                raise


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(300)
def test_mutated_frames_at_a_kernels_ports(count):
    chance = random.Random(count)
    with nbdist.Cluster(2, backend="none") as cluster:
        pids = [worker.pid for worker in cluster.workers]
        connection = json.loads((Path(cluster.folder) / "worker0-1.json").read_text())
        context = zmq.Context()
        sockets = {}
        for name in PORTS:
            sockets[name] = context.socket(zmq.DEALER if name != "hb" else zmq.REQ)
            sockets[name].linger = 0
            sockets[name].connect(f"ipc://{connection['ip']}-{connection[f'{name}_port']}")
        try:
            for number in range(count):
                key = connection["key"].encode() if number % 2 else None
                port = chance.choice(PORTS[:3])
                with contextlib.suppress(zmq.Again if port == "stdin" else ()):  # full: no cell asks for input
                    sockets[port].send_multipart(mutated(key, chance, port), zmq.NOBLOCK if port == "stdin" else 0)
                if not number % 25:
                    with socket.socket(socket.AF_UNIX) as raw:  # garbage below ZeroMQ
                        raw.connect(f"{connection['ip']}-{chance.randint(1, 5)}")
                        raw.sendall(chance.randbytes(200))
                if not number % 250:
                    assert answer(cluster) == 42
            assert answer(cluster) == 42
            assert nbdist.rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2
            assert [worker.pid for worker in cluster.workers] == pids
        finally:
            context.destroy(0)


def test_mutated_messages_of_a_kernel_are_refused_in_words():
    chance = random.Random(3)
    for _ in range(5000):
        frames = mutated(b"the key", chance)
        try:
            message = decode(b"the key", frames)
        except ProtocolError:
            continue
        assert isinstance(message["msg_id"], str)
        assert isinstance(message["parent_header"], dict)
        assert isinstance(message["parent_header"].get("msg_id", ""), str)
        assert isinstance(message["content"], dict)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found


def sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(file)
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target[8:-1])
    return found


def test_no_other_process_reaches_the_zygotes_line():
    """It has no name, workers do not inherit it, and what a process without this user's rights opens is refused."""
    with nbdist.Cluster(2, backend="none") as cluster:
        zygote = cluster.lifecycle.launcher.processes
        inode = os.readlink(f"/proc/self/fd/{zygote.line.socket.fileno()}")[8:-1]
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        (line,) = [fields for fields in lines if fields[6] == inode]
        assert len(line) == 7, f"the line to the zygote has a name, by which others may connect to it: {line[7:]}"
        assert int(line[3], 16) & 0x10000 == 0, "it accepts connections"
        holders = [pid for pid in descendants(os.getpid()) if inode in sockets_of(pid)]
        assert holders == [os.getpid()]
        # The zygote's own end has another inode: the zygote alone has it, and none of its workers.
        ends = sockets_of(zygote.pid)
        shared = set.intersection(*[sockets_of(worker.pid) for worker in cluster.workers]) & ends
        assert not shared, f"both workers hold sockets of the zygote's: {shared}"
        assert open_as_nobody(f"/proc/{zygote.pid}/fd") == "PermissionError"


def open_as_nobody(path: str) -> str:
    """Try to list a folder as the user `nobody`; return the name of the error, or what is there."""
    if os.getuid() != 0:
        pytest.skip("only root can try it as another user")
    code = (
        "import os, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n    print(os.listdir(sys.argv[1]))\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout.strip()


def test_no_secret_is_where_others_may_read_it(monkeypatch, tmp_path):
    """Neither in the environment nor the command line of a process, nor in logs, nor in the traceback of an error."""
    secret = "a secret of this test, long enough"
    file = tmp_path / "secret"
    file.write_text(secret)
    file.chmod(0o600)
    monkeypatch.setenv("NBDIST_SECRET_FILE", str(file))
    with nbdist.Cluster(2, backend="none") as cluster:
        folder = Path(cluster.folder)
        secrets = [secret, *(json.loads(found.read_text())["key"] for found in folder.glob("worker*.json"))]
        own = Path(os.environ["NBDIST_RUNTIME_DIR"]) / "secret"
        secrets += [own.read_text()] if own.exists() else []
        derived = nbdist.channel.secret.Secret.find(None)
        for role in ("door", "member"):
            secrets.append(derived.curve(role).private.decode())
        secrets += [derived.derive("sign").hex()]
        assert len(secrets) >= 6
        cluster.execute("import logging; logging.getLogger('nbdist').setLevel('DEBUG')")
        shown = {}
        with pytest.raises(ZeroDivisionError) as caught:
            cluster.execute("rpc.rpc_sync('worker1', lambda: 1 / 0)", "worker0")
        shown["error"] = f"{caught.value!r} {caught.value}"
        shown["repr"] = cluster.evaluate(
            "repr(vars(rpc.api.current_agent())) + repr(rpc.api.current_agent().options)", "worker0"
        )
        for pid in [os.getpid(), *descendants(os.getpid())]:
            for name in ("cmdline", "environ"):
                shown[f"{name} of {pid}"] = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
        for log in folder.glob("*.log"):
            shown[log.name] = log.read_text(errors="replace")
        assert len(shown) >= 8
        for where, text in shown.items():
            for number, one in enumerate(secrets):
                assert one not in text, f"secret {number} is in the {where}"
        for private in [*folder.glob("worker*.json"), folder]:
            assert not private.stat().st_mode & 0o077, f"others may read {private}"


def test_an_error_about_a_secret_does_not_show_it(monkeypatch):
    options = nbdist.rpc.RpcBackendOptions(
        secret="a secret of this test, long enough", init_method="file:///no/folder/x"
    )
    with pytest.raises(nbdist.RendezvousError) as caught:
        nbdist.rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    assert "a secret of this test" not in f"{caught.value!r} {options!r}"
