"""The unix sockets' own side: room that runs out, messages in pieces, users, deaths and forks."""

import contextlib
import fcntl
import os
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers.processes import file_table, workers
from helpers.threads import in_thread
from helpers.waiting import wait_until
from hypothesis import given
from hypothesis import strategies as st

from nbdist.channel import local, local_link, machine
from nbdist.channel.contract import ChannelError
from nbdist.channel.framing import FrameCutter, head, split
from nbdist.channel.local import LocalChannel
from nbdist.channel.locked_directory import sweep
from nbdist.channel.secret import Secret
from nbdist.channel.zeromq import ZeroMqChannel
from nbdist.errors import ProtocolError

SOON = 30.0
SECRET = Secret(b"the secret of the tests", shared_off_host=True)
BIG = 8 << 20  # bytes; far more than a socket's buffer takes


@pytest.fixture(autouse=True)
def runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def channels(*names, max_message=1 << 40):
    with contextlib.ExitStack() as closing:
        opened = []
        for name in names:
            opened.append(LocalChannel(ZeroMqChannel(name, SECRET), max_message=max_message))
            closing.callback(opened[-1].close)
        yield opened


def path_of(channel):
    return channel.addresses[0].removeprefix("unix://")


def raw(channel):
    """A connection to a channel's socket, without a link."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path_of(channel))
    return sock


def connections(channel):
    """Return how many connections the kernel has at a channel's socket, beside the socket that listens."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {path_of(channel)}") for line in lines) - 1


def unread(sock):
    """Return how many of the bytes sent on a connection, at least, the other end has not read; 0 if it has read all."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]


def whole(*frames):
    return b"".join((head([len(frame) for frame in frames]), *frames))


def receive(channel):
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        frames = channel.receive(SOON)
        if frames is not None:
            return frames
    raise AssertionError("nothing came")


# --- cutting --------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=8), st.data())
def test_messages_are_cut_out_of_pieces_of_any_size(messages, data):
    stream = b"".join(whole(*frames) for frames in messages)
    cutter, cut = FrameCutter(1 << 20), []
    while stream:
        room = None if cutter.large is None else cutter.room
        most = len(stream) if room is None else min(len(stream), len(room))
        size = data.draw(st.integers(1, most))
        piece, stream = stream[:size], stream[size:]
        if room is None:
            cut += cutter.feed(piece)
        else:
            room[:size] = piece
            if (large := cutter.wrote(size)) is not None:
                cut.append(split(large))
    assert cut == messages


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<QI", 1 << 50, 1),
        struct.pack("<QI", 8, 0),
        struct.pack("<QI", 8, 2),
        struct.pack("<QIQ", 8, 1, 5),
        struct.pack("<QIQ", 9, 1, 1 << 60) + b"x",
        b"\xff" * 64,
    ],
    ids=["too long", "no frames", "more frames than bytes", "a frame that is not there", "a huge frame", "noise"],
)
def test_garbage_ends_its_connection_and_no_other(garbage, caplog):
    with pytest.raises(ProtocolError):
        FrameCutter(1 << 30).feed(garbage)
    with channels("door", max_message=1 << 30) as [door]:
        good, bad = raw(door), raw(door)
        bad.sendall(garbage)
        good.sendall(whole(b"fine"))
        assert receive(door) == [b"fine"]
        assert door.receive(0.01) is None
        bad.settimeout(SOON)
        assert bad.recv(1) == b""  # it has been hung up
        assert f"dropped what process {os.getpid()} sent, and its connection: " in caplog.text
        good.sendall(whole(b"still"))
        assert receive(door) == [b"still"]
        good.close()
        bad.close()


def resident():
    return psutil.Process().memory_info().rss


def test_headers_that_announce_large_messages_take_no_memory_and_hold_nobody_up():
    with channels("door") as [door]:
        door.receive(0)
        before = resident()
        large = [raw(door) for _ in range(20)]
        for announced in large:
            announced.sendall(struct.pack("<QIQ", (128 << 20) + 8, 1, 128 << 20) + b"x")
        good = raw(door)
        good.sendall(whole(b"fine"))
        assert receive(door) == [b"fine"]
        while any(map(unread, large)):
            assert door.receive(SOON) is None
        assert resident() - before < 100 << 20


def test_more_than_there_is_memory_for_is_refused(monkeypatch, caplog):
    for announced, told in (
        (machine.memory() + 1, f"a message of {machine.memory() + 1} bytes is too long: this agent accepts"),
        (70 << 20, "a message of 73.4 MB does not fit: the machine has 1.0 KB of memory left"),
    ):
        with channels("door") as [door]:
            good, bad = raw(door), raw(door)
            bad.sendall(struct.pack("<QIQ", announced, 1, announced - 8) + b"x")
            good.sendall(whole(b"fine"))
            assert receive(door) == [b"fine"]
            assert door.receive(0.01) is None
            bad.settimeout(SOON)
            assert bad.recv(1) == b""
            assert told in caplog.text
        monkeypatch.setattr(machine, "available_memory", lambda: 1000)


def test_a_large_message_is_cut_while_another_thread_reads(monkeypatch):
    cutting, go_on, cut = threading.Event(), threading.Event(), split

    def frames(large):
        cutting.set()
        assert go_on.wait(SOON)
        return cut(large)

    monkeypatch.setattr("nbdist.channel.local.split", frames)
    with channels("door") as [door]:
        result = in_thread(lambda: receive(door))
        large = bytes(1 << 20)
        sender = threading.Thread(target=raw(door).sendall, args=(whole(large),))
        sender.start()
        assert cutting.wait(SOON)
        raw(door).sendall(whole(b"small"))
        assert receive(door) == [b"small"]
        go_on.set()
        assert result.result(SOON) == [large]
        sender.join()


def test_a_large_message_whose_frames_do_not_add_up_ends_its_connection_and_no_other():
    with channels("door") as [door]:
        good, bad = raw(door), raw(door)
        in_thread(lambda: bad.sendall(struct.pack("<QIQ", 1 << 20, 1, 5) + bytes((1 << 20) - 8)))
        good.sendall(whole(b"fine"))
        assert receive(door) == [b"fine"]
        while connections(door) == 2:
            assert door.receive(0.05) is None
        bad.settimeout(SOON)
        assert bad.recv(1) == b""
        good.sendall(whole(b"still"))
        assert receive(door) == [b"still"]


def test_a_message_that_is_too_long_ends_its_connection_which_is_made_again():
    with channels("here") as [here], channels("door", max_message=100_000) as [door]:
        link = here.connect(door.addresses)
        link.send([bytes(200_000)], "call")
        assert door.receive(0.05) is None
        deadline = time.monotonic() + SOON
        while (frames := door.receive(0.01)) is None and time.monotonic() < deadline:
            link.send([b"short"], "call")  # those until it notices are lost, as on a wire
        assert frames == [b"short"]


def test_a_broken_link_with_a_full_file_table_loses_messages_as_on_a_wire():
    with channels("here") as [here], channels("door", max_message=100_000) as [door]:
        link = here.connect(door.addresses)
        link.send([bytes(200_000)], "call")  # the door ends the connection
        assert door.receive(0.05) is None
        with file_table.full():
            link.send([b"lost"], "call")  # notices, and closes the socket, for which something else takes the room
            taken = os.dup(0)
            for _ in range(2):
                link.send([b"lost"], "call")
        os.close(taken)
        deadline = time.monotonic() + SOON
        while (frames := door.receive(0.01)) != [b"short"] and time.monotonic() < deadline:
            link.send([b"short"], "call")
        assert frames == [b"short"]


# --- room -----------------------------------------------------------------------------------------


def test_sending_waits_for_nobody():
    with channels("here", "there") as [here, there]:
        link = here.connect(there.addresses)
        began = time.monotonic()
        for number in range(20):
            link.send([b"%d" % number, bytes(BIG)], "call")
        assert time.monotonic() - began < SOON / 3
        for number in range(20):
            first, body = receive(there)
            assert first == b"%d" % number
            assert len(body) == BIG


def test_two_that_send_each_other_much_at_once():
    frames = [b"head", secrets.token_bytes(1 << 20) * 40, b"tail"]
    with channels("here", "there") as [here, there]:
        links = here.connect(there.addresses), there.connect(here.addresses)
        for link in links:
            for _ in range(2):
                link.send(frames, "call")
        received = in_thread(lambda: [receive(here) for _ in range(2)])
        assert [receive(there) for _ in range(2)] == [frames, frames]
        assert received.result(SOON) == [frames, frames]


def test_small_ones_do_not_get_into_a_large_one():
    """Through one link, while the socket has no room; and in order."""
    with channels("here", "there") as [here, there]:
        link = here.connect(there.addresses)
        link.send([b"large", bytes(BIG)], "call")
        for number in range(1000):
            link.send([b"%d" % number] * (number % 3 + 1), "call")
        link.send([bytes(BIG), b"large"], "call")
        assert receive(there) == [b"large", bytes(BIG)]
        for number in range(1000):
            assert receive(there) == [b"%d" % number] * (number % 3 + 1)
        assert receive(there) == [bytes(BIG), b"large"]


def test_threads_that_send_large_ones_through_one_link():
    with channels("here", "there") as [here, there]:
        link = here.connect(there.addresses)
        senders = [
            in_thread(lambda n=n: [link.send([b"%d" % n, bytes([n]) * (n + 1) * 300_000], "call") for _ in range(5)])
            for n in range(6)
        ]
        for _ in range(30):
            number, body = receive(there)
            assert body == bytes([int(number)]) * (int(number) + 1) * 300_000
        for sender in senders:
            sender.result(SOON)


def test_a_slow_one_holds_up_nobody_else():
    with channels("here", "slow", "quick") as [here, slow, quick]:
        here.connect(slow.addresses).send([bytes(BIG)], "call")
        link = here.connect(quick.addresses)
        for number in range(100):
            link.send([b"%d" % number], "call")
            assert receive(quick) == [b"%d" % number]


def test_a_flood_over_one_way_does_not_shut_out_another():
    with channels("here", "there") as [here, there], channels("other") as [other]:
        flood, quiet = here.connect(there.addresses), other.connect(there.addresses)
        zeromq = other.connect(there.addresses[1:])
        for _ in range(20_000):
            flood.send([b"flood"], "call")
        quiet.send([b"quiet"], "call")
        zeromq.send([b"zeromq"], "call")
        seen = [receive(there)[0] for _ in range(20_002)]
        assert seen.index(b"quiet") < 19_000
        assert set(seen) == {b"flood", b"quiet", b"zeromq"}


def test_what_waits_goes_out_before_the_channel_closes():
    with channels("here", "there") as [here, there]:
        link = here.connect(there.addresses)
        link.send([b"much", bytes(BIG)], "call")
        received = in_thread(lambda: [receive(there), receive(there)])
        link.send([b"goodbye"], "goodbye")
        link.close()
        here.close()
        assert received.result(SOON) == [[b"much", bytes(BIG)], [b"goodbye"]]


def test_what_nobody_reads_does_not_keep_a_channel_open():
    with channels("here", "there") as [here, there]:
        here.connect(there.addresses).send([bytes(BIG)], "call")
        began = time.monotonic()
        here.close()
        assert time.monotonic() - began < 5
        assert not [thread for thread in threading.enumerate() if thread.name == "nbdist-outbox"]


# --- who gets in, and who waits -------------------------------------------------------------------


def test_the_socket_is_in_a_directory_of_this_user_and_goes_with_it(runtime):
    with channels("x") as [channel]:
        assert Path(path_of(channel)).parent == runtime / "agent-x"
        assert [address.partition("://")[0] for address in channel.addresses] == ["unix", "ipc", "ipc"]
    assert not list(runtime.glob("agent-*"))


def test_another_users_process_is_turned_away(monkeypatch, caplog):
    with channels("here", "there") as [here, there]:
        monkeypatch.setattr(local, "peer_of", lambda sock: (0, -1))  # as the door sees who knocks
        link = here.connect(there.addresses)
        link.send([b"let me in"], "call")
        assert there.receive(0.05) is None
        assert "another user" in caplog.text
        monkeypatch.setattr(local_link, "peer_of", lambda sock: (0, -1))  # as who knocks sees the door
        with pytest.raises(ChannelError):
            here.connect(there.addresses[:1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_the_kernel_says_who_it_is():
    with channels("there") as [there]:
        path = path_of(there)
        os.chmod(path, 0o777)
        for directory in (Path(path).parent, Path(path).parent.parent):
            os.chmod(directory, 0o755)
        code = f"import os, socket; os.setuid(12345); s = socket.socket(socket.AF_UNIX); s.connect({path!r}); s.recv(1)"
        child = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + SOON
        while child.poll() is None and time.monotonic() < deadline:
            assert there.receive(0.01) is None
        assert child.wait(SOON) == 0  # it got in the door, and was hung up on


def test_an_address_that_is_not_here_leads_to_the_next():
    with channels("here", "there") as [here, there]:
        link = here.connect(["unix:///nowhere/un", *there.addresses[1:]])
        link.send([b"by zeromq"], "call")
        assert receive(there) == [b"by zeromq"]


def test_a_flood_of_connections_leaves_files_to_the_process_and_others_connected(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        with channels("door") as [door]:
            good = raw(door)
            good.sendall(whole(b"first"))
            assert receive(door) == [b"first"]
            with process(FLOOD.format(path=path_of(door), count=400)) as flood:
                assert flood.stdout.readline() == "connected\n"
                good.sendall(whole(b"fine"))
                assert receive(door) == [b"fine"]
                while door.receive(0.05) is not None:
                    pass
                assert connections(door) == 300
                with open(os.devnull):
                    pass
                assert "a connection was turned away: there are 300 already" in caplog.text
            while connections(door) > 1:
                assert door.receive(0.05) is None
            another = raw(door)
            another.sendall(whole(b"another"))
            assert receive(door) == [b"another"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_threads_wait_and_one_is_woken_for_a_message():
    with channels("here", "there") as [here, there]:
        link, heard, ended = here.connect(there.addresses), [], []

        def listen():
            while (frames := there.receive(SOON)) is not None:
                heard.append((frames[0], threading.get_ident()))
            ended.append(threading.get_ident())

        listeners = [in_thread(listen) for _ in range(2)]
        for begin in range(0, 10_000, 200):  # one that finds nothing, for the other has taken it, sleeps on
            for number in range(begin, begin + 200):
                link.send([b"%d" % number], "call")
            deadline = time.monotonic() + SOON
            while len(heard) < begin + 200 and len(ended) < 1 and time.monotonic() < deadline:
                time.sleep(0.001)
        assert ended == []
        assert sorted(int(text) for text, _ in heard) == list(range(10_000))
        there.close()
        for listener in listeners:
            listener.result(SOON)


# --- the end of others ----------------------------------------------------------------------------


def test_half_a_message_of_one_that_has_gone_is_nothing():
    with channels("there") as [there]:
        for cut in (3, 12, 20, 40):
            sock = raw(there)
            sock.sendall(whole(b"x" * 100)[:cut])
            assert there.receive(0.01) is None
            sock.close()
        assert there.receive(0.01) is None
        assert connections(there) == 0
        good = raw(there)
        good.sendall(whole(b"fine"))
        assert receive(there) == [b"fine"]
        good.close()


CHILD = """
import os, sys, time
from nbdist.channel.local import LocalChannel
from nbdist.channel.secret import Secret
from nbdist.channel.zeromq import ZeroMqChannel
secret = Secret(b"the secret of the tests", shared_off_host=True)
channel = LocalChannel(ZeroMqChannel(str(os.getpid()), secret), max_message=1 << 40)
"""


FLOOD = """
import socket
held = []
for _ in range({count}):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    held[-1].connect({path!r})
print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process(code):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD + code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(SOON)
        child.stdin.close()
        child.stdout.close()


def test_a_process_that_is_killed_in_the_middle_of_a_message(runtime):
    with channels("there") as [there]:
        code = f"channel.connect([{there.addresses[0]!r}]).send([bytes(1 << 28)], 'call')\nprint('sent', flush=True)\n"
        with process(code + "time.sleep(100)") as child:
            assert child.stdout.readline() == "sent\n"
            workers.stop(child.pid)  # with the most of the message unsent, however fast the machine is
            assert there.receive(0.05) is None
            assert connections(there) == 1
            child.send_signal(signal.SIGKILL)
            child.wait(SOON)
            deadline = time.monotonic() + SOON
            while connections(there) and time.monotonic() < deadline:
                assert there.receive(0.01) is None
            assert connections(there) == 0
        assert sweep() == 1
        assert [path.name for path in runtime.glob("agent-*")] == ["agent-there"]


def test_sending_to_a_process_that_was_killed_is_lost_as_on_a_wire():
    with channels("here") as [here], process("print(channel.addresses[0], flush=True); time.sleep(100)") as child:
        link = here.connect([child.stdout.readline().strip()])
        link.send([b"x"], "call")
        child.send_signal(signal.SIGKILL)
        child.wait(SOON)
        for _ in range(5):
            link.send([bytes(BIG)], "call")
            link.send([b"x"], "call")
        link.close()


def test_a_forked_process_keeps_nothing_open():
    with channels("here", "there") as [here, there]:
        link = here.connect(there.addresses)
        link.send([b"before"], "call")
        assert receive(there) == [b"before"]
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"forked")
            time.sleep(100)
            os._exit(0)
        try:
            os.close(tell)
            assert os.read(told, 10) == b"forked"
            link.send([b"after"], "call")
            assert receive(there) == [b"after"]
            here.close()
            # The child has not the other end: the connection is seen to end, and said once.
            deadline = time.monotonic() + SOON
            while connections(there) and time.monotonic() < deadline:
                assert there.receive(0.01) is None
            assert connections(there) == 0
            began = time.monotonic()
            assert there.receive(0.05) is None
            assert time.monotonic() - began > 0.04
        finally:
            os.close(told)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_channels_come_and_go_without_leaving_files():
    def come_and_go():
        with channels("one", "other") as [one, other]:
            one.connect(other.addresses).send([b"x", bytes(BIG)], "call")
            assert receive(other)[0] == b"x"

    come_and_go()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        come_and_go()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_who_could_not_be_let_in_at_once_is_let_in_later(caplog):
    with channels("a", "b") as (a, b):
        link = a.connect(b.addresses)
        link.send([b"hello"], "test")
        with file_table.full():
            assert b.receive(0.05) is None
            assert "cannot accept a connection from another agent; will try again soon" in caplog.text
        # As an agent's threads wait: not for long.
        assert wait_until(lambda: b.receive(0.05), within=SOON) == [b"hello"]
