"""What every channel promises, held against each of them."""

import contextlib
import secrets
import threading
from itertools import count

import pytest
from helpers.abuse.interrupts import Interrupts
from helpers.threads import in_thread

from nbdist.channel.contract import Channel, ChannelError
from nbdist.channel.local import LocalChannel
from nbdist.channel.secret import Secret
from nbdist.channel.zeromq import ZeroMqChannel
from nbdist.testing import Faults, FaultyChannel, Network

SOON = 30.0  # seconds; only a failing test waits that long
SECRET = Secret(secrets.token_bytes(32), shared_off_host=True)
numbers = count()


def label():
    return f"contract-{next(numbers)}"


def inprocess():
    network = Network()
    return network.open


def ipc():
    return lambda: ZeroMqChannel(label(), SECRET)


def tcp():
    return lambda: ZeroMqChannel(label(), SECRET, local=False, host="127.0.0.1")


def both():
    return lambda: ZeroMqChannel(label(), SECRET, host="127.0.0.1")


def local():
    return lambda: LocalChannel(ZeroMqChannel(label(), SECRET), max_message=1 << 40)


def local_and_tcp():
    return lambda: LocalChannel(ZeroMqChannel(label(), SECRET, host="127.0.0.1"), max_message=1 << 40)


def around_zeromq():
    return lambda: LocalChannel(ZeroMqChannel(label(), SECRET), max_message=1 << 40, uses_sockets=False)


def faulty():
    network = Network()
    return lambda: FaultyChannel(network.open(), Faults())


@pytest.fixture(params=[inprocess, ipc, tcp, both, local, local_and_tcp, around_zeromq, faulty])
def open_channel(request):
    """Opens channels that can reach each other; all are closed at the end."""
    make = request.param()
    with contextlib.ExitStack() as channels:

        def open_one():
            channel = make()
            channels.callback(channel.close)
            return channel

        yield open_one


def receive(channel):
    """The next message; wake-ups do not count."""
    for _ in range(1000):
        frames = channel.receive(SOON)
        if frames is not None:
            return frames
    raise AssertionError("nothing came")


def test_a_send_that_is_interrupted_spoils_no_other(open_channel):
    """Ctrl-C at any moment of one: it may arrive or not, but whole, and the next ones do."""
    here, there = open_channel(), open_channel()
    link = here.connect(there.addresses)
    numbers, seen, spoilt = count(), [], []

    def send():
        number = next(numbers)
        frames = [b"%d" % number, bytes([number % 251]) * (number * 7919 % 300_000), b"end"]
        link.send(frames, "test")

    def read():
        while (frames := receive(there)) != [b"last"]:
            number = int(frames[0])
            seen.append(number)
            if frames[1:] != [bytes([number % 251]) * (number * 7919 % 300_000), b"end"]:
                spoilt.append(number)
        return True

    read_all = in_thread(read)
    interrupts = Interrupts()
    try:
        interrupts.during_many(send, 1000)
    finally:
        interrupts.close()
    for _ in range(10):
        send()
    link.send([b"last"], "test")
    assert read_all.result(SOON)
    assert spoilt == []
    assert len(set(seen)) == len(seen)
    assert len(seen) > 100
    last = next(numbers)
    assert [number in seen for number in range(last - 10, last)] == [True] * 10


def test_it_is_a_channel(open_channel):
    channel = open_channel()
    assert isinstance(channel, Channel)
    assert channel.addresses
    assert all(isinstance(address, str) for address in channel.addresses)
    channel.addresses.clear()
    assert channel.addresses, "the list is the caller's own"


@pytest.mark.parametrize(
    "frames",
    [
        [b"one"],
        [b""],
        [b"", b""],
        [b"", b"x", b""],
        [b"head", bytes(range(256)), b"tail"],
        [b"%d" % number for number in range(300)],
        [bytes(70_000), b"", bytes(300_000)],
        [bytes([number]) * number for number in range(1, 255)],
    ],
    ids=["one", "empty", "two empty", "empty around", "three", "many", "large", "all sizes"],
)
def test_frames_arrive_whole(open_channel, frames):
    here, there = open_channel(), open_channel()
    link = here.connect(there.addresses)
    for _ in range(3):
        link.send(frames, "call")
    for _ in range(3):
        received = receive(there)
        assert received == frames
        assert all(type(frame) is bytes for frame in received)


def test_64_mb_arrive_whole(open_channel):
    here, there = open_channel(), open_channel()
    frames = [b"head", secrets.token_bytes(1 << 20) * 64, b"tail"]
    link = here.connect(there.addresses)
    received = in_thread(lambda: receive(there))
    link.send(frames, "call")
    assert received.result(SOON) == frames


def test_views_are_sent_as_they_are_at_the_call(open_channel):
    here, there = open_channel(), open_channel()
    for size in (10, 400_000):
        link, memory = here.connect(there.addresses), bytearray(b"x" * size)
        link.send([b"head", memoryview(bytes(memory))], "call")
        memory[:] = b"y" * size
        assert receive(there) == [b"head", b"x" * size]


def test_a_channel_reaches_itself(open_channel):
    channel = open_channel()
    channel.connect(channel.addresses).send([b"me"], "call")
    assert receive(channel) == [b"me"]


def test_many_threads_send_at_once(open_channel):
    """Messages of one frame and of many, small and large, through one link and through several."""
    there, threads, each = open_channel(), 8, 60
    here = open_channel()
    shared = here.connect(there.addresses)
    start = threading.Barrier(threads)

    def send(number):
        link = shared if number % 2 else here.connect(there.addresses)
        start.wait(SOON)
        for index in range(each):
            body = b"%d" % number * (1 + index * (2000 if index % 7 == 0 else 1))
            link.send([b"%d/%d" % (number, index), *[body] * (index % 4)], "call")

    workers = [in_thread(lambda number=number: send(number)) for number in range(threads)]
    seen = set()
    for _ in range(threads * each):
        head, *bodies = receive(there)
        number, index = map(int, head.split(b"/"))
        assert len(bodies) == index % 4
        assert all(set(body) == set(b"%d" % number) for body in bodies)
        seen.add((number, index))
    assert len(seen) == threads * each
    for worker in workers:
        worker.result(SOON)


def test_many_senders(open_channel):
    there, senders = open_channel(), [open_channel() for _ in range(5)]
    for index, sender in enumerate(senders):
        sender.connect(there.addresses).send([b"%d" % index], "call")
    assert {receive(there)[0] for _ in senders} == {b"%d" % index for index in range(5)}


def test_nobody_else_gets_it(open_channel):
    here, there, third = open_channel(), open_channel(), open_channel()
    here.connect(there.addresses).send([b"x"], "call")
    assert receive(there) == [b"x"]
    assert third.receive(0) is None


# --- waiting --------------------------------------------------------------------------------------


def test_a_receive_ends_when_its_time_is_up(open_channel):
    channel = open_channel()
    for timeout in (0, 0.001, 0.02):
        assert channel.receive(timeout) is None


@pytest.mark.parametrize("timeout", [None, SOON])
def test_a_wake_ends_a_receive(open_channel, timeout):
    channel = open_channel()
    for _ in range(5):
        received = in_thread(lambda: channel.receive(timeout))
        channel.wake()
        assert received.result(SOON) is None


def test_a_wake_before_a_receive_counts(open_channel):
    channel = open_channel()
    channel.wake()
    assert channel.receive(None) is None


def test_no_wake_loses_a_message(open_channel):
    here, there = open_channel(), open_channel()
    link = here.connect(there.addresses)
    stop = threading.Event()

    def disturb():
        while not stop.is_set():
            there.wake()
            stop.wait(0.0005)

    disturbing = in_thread(disturb)
    try:
        for number in range(200):
            link.send([b"%d" % number], "call")
        assert {receive(there)[0] for _ in range(200)} == {b"%d" % number for number in range(200)}
    finally:
        stop.set()
        disturbing.result(SOON)


# --- the end --------------------------------------------------------------------------------------


def test_closing_ends_a_receive(open_channel):
    for timeout in (None, SOON):
        channel = open_channel()
        entered = threading.Event()

        def wait(channel=channel, entered=entered, timeout=timeout):
            entered.set()
            return channel.receive(timeout)

        received = in_thread(wait)
        assert entered.wait(SOON)
        channel.close()
        assert received.result(SOON) is None


def test_a_closed_channel_receives_nothing_more_and_can_be_closed_and_woken_again(open_channel):
    here, there = open_channel(), open_channel()
    there.close()
    assert there.receive(None) is None
    assert there.receive(SOON) is None
    there.close()
    there.wake()
    here.wake()


def test_waking_a_closed_channel_writes_to_nobodys_file(open_channel, tmp_path):
    """The number of its own pipe is free again, and somebody else's by now."""
    channel = open_channel()
    channel.close()
    with contextlib.ExitStack() as files:
        opened = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(64)]
        channel.wake()
        del opened
    assert all(not path.read_bytes() for path in tmp_path.iterdir())


def test_sending_to_a_closed_channel_neither_hangs_nor_fails_otherwise(open_channel):
    here, there = open_channel(), open_channel()
    link = here.connect(there.addresses)
    link.send([b"before"], "call")
    there.close()
    with contextlib.suppress(ChannelError):
        for _ in range(100):
            link.send([b"after", bytes(10_000)], "call")
    here.close()


def test_sending_from_a_closed_channel_neither_hangs_nor_fails_otherwise(open_channel):
    here, there = open_channel(), open_channel()
    link = here.connect(there.addresses)
    here.close()
    with contextlib.suppress(ChannelError):
        link.send([b"late"], "call")
    with contextlib.suppress(ChannelError):
        here.connect(there.addresses).send([b"late"], "call")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_closed_link_neither_hangs_nor_fails_otherwise(open_channel, at_once):
    here, there = open_channel(), open_channel()
    link, other = here.connect(there.addresses), here.connect(there.addresses)
    link.close(at_once=at_once)
    link.close(at_once=at_once)
    with contextlib.suppress(ChannelError):
        link.send([b"late"], "call")
    other.send([b"other"], "call")
    for _ in range(3):
        if receive(there) == [b"other"]:
            break
    else:
        raise AssertionError("closing one link has broken another")


def test_what_was_sent_before_closing_arrives(open_channel):
    """A goodbye is the last thing that goes out."""
    here, there = open_channel(), open_channel()
    link = here.connect(there.addresses)
    link.send([b"first"], "call")
    assert receive(there) == [b"first"]
    link.send([b"goodbye"], "goodbye")
    here.close()
    assert receive(there) == [b"goodbye"]


@pytest.mark.parametrize("addresses", [[], ["nonsense"], ["x://y"], ["tcp://not a host:not a port"]], ids=str)
def test_nowhere_cannot_be_reached(open_channel, addresses):
    with pytest.raises(ChannelError):
        open_channel().connect(addresses)


def test_an_address_that_nobody_listens_at_neither_hangs_nor_fails_otherwise(open_channel):
    here, there = open_channel(), open_channel()
    addresses = there.addresses
    there.close()
    with contextlib.suppress(ChannelError):
        here.connect(addresses).send([b"x"], "call")


def test_a_channel_that_is_closed_leaves_no_thread(open_channel):
    before = set(threading.enumerate())
    here, there = open_channel(), open_channel()
    here.connect(there.addresses).send([b"x"], "call")
    receive(there)
    here.close()
    there.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_links_that_were_closed_are_forgotten(open_channel):
    """Strangers who are refused must not add up."""
    import gc
    import weakref

    here, there = open_channel(), open_channel()
    gone = []
    for _ in range(20):
        link = here.connect(there.addresses)
        link.send([b"no"], "refused")
        link.close()
        gone.append(weakref.ref(link))
        del link
    gc.collect()
    assert not any(ref() for ref in gone)
