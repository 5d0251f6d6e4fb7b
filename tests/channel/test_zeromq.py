"""ZeroMQ's own side: directories, litter of the dead, keys, and what does not belong to anybody."""

import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from nbdist.channel.contract import ChannelError
from nbdist.channel.locked_directory import sweep
from nbdist.channel.secret import Secret, runtime_directory
from nbdist.channel.zeromq import ZeroMqChannel, host_identity

SOON = 60.0
SECRET = Secret(b"the secret of the tests", shared_off_host=True)
OTHER = Secret(b"the secret of strangers", shared_off_host=True)


@pytest.fixture(autouse=True)
def runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def agents(runtime):
    return sorted(path.name for path in runtime.iterdir() if path.is_dir())


CHILD = """
import os, signal, sys
from nbdist.channel.secret import Secret
from nbdist.channel.zeromq import ZeroMqChannel
channel = ZeroMqChannel(str(os.getpid()), Secret(b"the secret of the tests", shared_off_host=True))
"""


@contextlib.contextmanager
def process(code):
    """Another process with a channel of its own; it has said the first line that it prints."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD + code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        child.first = child.stdout.readline().strip()
        assert child.first, "the child has died"
        yield child
    finally:
        child.kill()
        child.wait(SOON)
        child.stdin.close()
        child.stdout.close()


WAIT = "print('ready', flush=True); sys.stdin.read()"


# --- directories ----------------------------------------------------------------------------------


def test_the_directories_are_for_this_user_alone(runtime):
    os.chmod(runtime, 0o755)
    channel = ZeroMqChannel("x", SECRET)
    try:
        assert len(channel.addresses) == 2
        for address in channel.addresses:
            path = Path(address.removeprefix("ipc://").removesuffix("#large"))
            for directory in (path.parent, runtime):
                assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert path.is_socket()
        assert agents(runtime) == ["agent-x"]
    finally:
        channel.close()
    assert agents(runtime) == []


def test_a_name_is_taken_once():
    channel = ZeroMqChannel("x", SECRET)
    try:
        with pytest.raises(OSError, match="x"):
            ZeroMqChannel("x", SECRET)
        channel.connect(channel.addresses).send([b"still here"], "call")
        assert channel.receive(SOON) == [b"still here"]
    finally:
        channel.close()


def test_a_channel_that_cannot_listen_leaves_nothing(runtime):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ChannelError, match=r"cannot listen at tcp://192\.0\.2\.1"):
            ZeroMqChannel("x", SECRET, host="192.0.2.1")
    assert agents(runtime) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_an_address_that_cannot_be_used(runtime):
    channel = ZeroMqChannel("x", SECRET)
    try:
        with pytest.raises(ChannelError, match=r"the address tcp://nowhere of another worker cannot be used: Invalid"):
            channel.connect(["tcp://nowhere"])
    finally:
        channel.close()


def test_channels_come_and_go_without_leaving_anything(runtime):
    def files():
        return len(os.listdir("/proc/self/fd"))

    def come_and_go():
        one, other = ZeroMqChannel("one", SECRET), ZeroMqChannel("other", SECRET, host="127.0.0.1")
        one.connect(other.addresses).send([b"x"], "call")
        assert other.receive(SOON) == [b"x"]
        one.close()
        other.close()

    come_and_go()
    before = files()
    for _ in range(10):
        come_and_go()
    assert files() <= before
    assert agents(runtime) == []


# --- litter ---------------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_swept_and_the_living_are_not(runtime):
    living = ZeroMqChannel("living", SECRET)
    try:
        with process(WAIT) as dead, process(WAIT) as alive:
            dead.send_signal(signal.SIGKILL)
            dead.wait(SOON)
            assert agents(runtime) == sorted([f"agent-{dead.pid}", f"agent-{alive.pid}", "agent-living"])
            assert sweep() == 1
            assert agents(runtime) == sorted([f"agent-{alive.pid}", "agent-living"])
            assert sweep() == 0
            link = living.connect([f"ipc://{runtime}/agent-{alive.pid}/in"])
            link.send([b"x"], "call")
    finally:
        living.close()


def test_opening_a_channel_sweeps(runtime):
    with process(WAIT) as dead:
        dead.send_signal(signal.SIGKILL)
        dead.wait(SOON)
    channel = ZeroMqChannel("next", SECRET)
    assert agents(runtime) == ["agent-next"]
    channel.close()


def test_a_forked_child_does_not_keep_its_dead_parents_directory(runtime):
    fork = (
        "child = os.fork()\n"
        "if not child:\n"
        "    print(os.getpid(), flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    with process(fork) as parent:
        child = int(parent.first)
        parent.send_signal(signal.SIGKILL)
        parent.wait(SOON)
        os.kill(child, 0)  # the child lives: it reads from a pipe that is still open
        assert sweep() == 1
        assert agents(runtime) == []


def test_a_forked_child_does_not_remove_its_living_parents_directory(runtime):
    fork = (
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('gone', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with process(fork) as parent:
        assert sweep() == 0
        assert agents(runtime) == [f"agent-{parent.pid}"]


def test_half_made_directories_are_litter_when_they_are_old(runtime):
    for name in ("agent-empty", "new-agent-half"):
        (runtime / name).mkdir()
    assert sweep() == 0
    assert agents(runtime) == ["agent-empty", "new-agent-half"]
    old = time.time() - 3600
    for name in ("agent-empty", "new-agent-half"):
        os.utime(runtime / name, (old, old))
    sweep()
    assert agents(runtime) == []


def test_sweeping_touches_nothing_else(runtime):
    (runtime / "secret").write_text("x")
    (runtime / "mine").mkdir()
    (runtime / "agent-file").write_text("not a directory")
    sweep()
    assert sorted(path.name for path in runtime.iterdir()) == ["agent-file", "mine", "secret"]


def test_many_processes_that_start_and_sweep_at_once_leave_each_other_alone(runtime):
    code = "secret = Secret(b'x' * 16, shared_off_host=True)\n"
    code += "for n in range(30):\n    ZeroMqChannel(f'{os.getpid()}-{n}', secret).close()\n"
    with process(code + "print('done', flush=True)") as one, process(code + "print('done', flush=True)") as other:
        assert one.first == other.first == "done"
        assert one.wait(SOON) == other.wait(SOON) == 0


# --- who gets in ----------------------------------------------------------------------------------


def test_the_best_way_is_chosen():
    local, both = ZeroMqChannel("local", SECRET), ZeroMqChannel("both", SECRET, host="127.0.0.1")
    far = ZeroMqChannel("far", SECRET, local=False, host="127.0.0.1")
    try:
        assert [address.partition(":")[0] for address in both.addresses] == ["ipc", "ipc", "tcp", "tcp"]
        assert [address.partition(":")[0] for address in far.addresses] == ["tcp", "tcp"]
        elsewhere = [f"ipc://{runtime_directory()}/agent-elsewhere/in", *both.addresses[2:]]
        for sender, addresses in ((local, both.addresses), (far, both.addresses), (local, elsewhere)):
            for is_large in (False, True):
                sender.connect(addresses, is_large).send([b"x"], "call")
                assert both.receive(SOON) == [b"x"]
        with pytest.raises(ChannelError):
            local.connect(elsewhere[:1])
        with pytest.raises(ChannelError):
            far.connect(local.addresses)  # one that keeps off this host's files
    finally:
        for channel in (local, both, far):
            channel.close()


def test_a_tcp_door_is_on_the_address_that_was_given():
    channel = ZeroMqChannel("x", SECRET, host="127.0.0.1")
    try:
        assert all(address.startswith("tcp://127.0.0.1:") for address in channel.addresses[2:])
    finally:
        channel.close()


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_ipv6():
    here, there = (ZeroMqChannel(name, SECRET, local=False, host="::1") for name in ("here", "there"))
    try:
        here.connect(there.addresses).send([b"x"], "call")
        assert there.receive(SOON) == [b"x"]
    finally:
        here.close()
        there.close()


def knock(address, keys=None):
    """A stranger's socket that talks to a door."""
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.set(zmq.LINGER, 0)
    if keys is not None:
        (stranger.curve_publickey, stranger.curve_secretkey), stranger.curve_serverkey = keys
    stranger.connect(address)
    stranger.send(b"\x01\x01\x00\x00\x00x")
    return context, stranger


def test_strangers_do_not_get_in_over_tcp():
    """With another secret, other keys, none at all, or garbage instead of the protocol."""
    member, door = ZeroMqChannel("member", SECRET), ZeroMqChannel("door", SECRET, local=False, host="127.0.0.1")
    stranger = ZeroMqChannel("stranger", OTHER, local=False, host="127.0.0.1")
    knocking = []
    try:
        own, public = zmq.curve_keypair(), SECRET.curve("door").public
        for is_large, each in enumerate(door.addresses):
            address = each.removesuffix("#large")
            stranger.connect(door.addresses, bool(is_large)).send([b"other secret"], "call")
            knocking.append(knock(address))
            knocking.append(knock(address, (own, public)))  # even who knows the door's public key
            knocking.append(knock(address, (own, own[0])))
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=SOON) as raw, contextlib.suppress(OSError):
                raw.sendall(secrets.token_bytes(10_000))
                raw.settimeout(SOON)
                while raw.recv(1000):
                    pass  # until the door hangs up
        assert is_large == 1
        for link in (member.connect(door.addresses), member.connect(door.addresses, is_large=True)):
            for number in range(20):
                link.send([b"member %d" % number], "call")
            for number in range(20):
                assert door.receive(SOON) == [b"member %d" % number]
        assert door.receive(0) is None
    finally:
        for context, sock in knocking:
            sock.close(0)
            context.term()
        for channel in (member, door, stranger):
            channel.close()


def test_a_message_that_is_too_long_ends_its_connection_and_no_other():
    door = ZeroMqChannel("door", SECRET, max_message=100_000)
    long, short = ZeroMqChannel("long", SECRET), ZeroMqChannel("short", SECRET)
    try:
        long.connect(door.addresses).send([b"head", bytes(200_000)], "call")
        short.connect(door.addresses).send([b"short"], "call")
        assert door.receive(SOON) == [b"short"]
    finally:
        for channel in (door, long, short):
            channel.close()


def test_garbage_among_large_messages_is_nothing():
    door = ZeroMqChannel("door", SECRET)
    context = zmq.Context()
    sock = context.socket(zmq.PUSH)
    try:
        sock.connect(door.addresses[1].removesuffix("#large"))
        for parts in ([b""], [b"x"], [b"", b""], [b"x" * 20, b"y"], [b"x" * 40, b"y"], [b"x"] * 5):
            sock.send_multipart(parts)
        link = door.connect(door.addresses, is_large=True)
        link.send([b"head", bytes(5_000_000)], "call")
        head, body = door.receive(SOON)
        assert (head, bytes(body)) == (b"head", bytes(5_000_000))
    finally:
        sock.close(0)
        context.term()
        door.close()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"\0\0\0\0", b"\xff" * 4, b"\x02\0\0\0\x01", b"\x01\0\0\0" + b"\xff" * 8, b"\x01" + bytes(11) + b"x"],
    ids=repr,
)
def test_garbage_in_one_part_is_nothing(garbage):
    door = ZeroMqChannel("door", SECRET)
    context = zmq.Context()
    sock = context.socket(zmq.PUSH)
    try:
        sock.connect(door.addresses[0])
        sock.send(garbage)
        assert door.receive(SOON) is None
        door.connect(door.addresses).send([b"fine"], "call")
        assert door.receive(SOON) == [b"fine"]
    finally:
        sock.close(0)
        context.term()
        door.close()


def test_a_host_is_told_from_another():
    assert host_identity() == host_identity()
    with process("from nbdist.channel.zeromq import host_identity\nprint(host_identity(), flush=True)") as other:
        assert other.first == host_identity()


def test_a_channel_closes_while_large_messages_arrive():
    for wait in (0.0, 0.01, 0.03):
        door, sender = ZeroMqChannel("door", SECRET), ZeroMqChannel("sender", SECRET)
        link = sender.connect(door.addresses, is_large=True)
        for _ in range(100):
            link.send([b"head", bytes(300_000)], "call")
        time.sleep(wait)
        closing = threading.Thread(target=door.close, daemon=True)
        closing.start()
        closing.join(SOON)
        assert not closing.is_alive()
        sender.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("free", [3, 17, 31, 33])
def test_few_files_are_an_error_and_not_the_end_of_the_process(host, free):
    """ZeroMQ, and pyzmq before the first message that it does not copy, abort a process that has no files for them."""
    code = f"""
import os, resource
from nbdist.channel.contract import TooManyFiles
from nbdist.errors import ResourceError
SECRET = Secret(b"the secret of the tests", shared_off_host=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1 + {free},) * 2)
try:
    channel = ZeroMqChannel('few', SECRET, host={host!r})
    try:
        channel.connect(channel.addresses, is_large=True).send([bytes(1_000_000)], 'call')
        print('sent', flush=True)
    except TooManyFiles:
        print('no large link', flush=True)
    channel.close()
except ResourceError:
    print('no channel', flush=True)
os._exit(0)
"""
    with process(code) as other:
        assert other.first in ("sent", "no large link", "no channel")
        assert other.wait(SOON) == 0
