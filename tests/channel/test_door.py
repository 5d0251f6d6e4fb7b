"""A door and its links: who can connect, whose name is whose, and what a message may be."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest
import zmq
from helpers.suite.python_path import python_path
from helpers.waiting import wait_until

from nbdist.channel.contract import ChannelError
from nbdist.channel.door import NAME_BYTES, Door, DoorLink
from nbdist.channel.secret import CurveKeys


@pytest.fixture
def door():
    """A door that answers each message with the message, twice, and what it took."""
    taken = queue.SimpleQueue()

    def take(who, data):
        taken.put((who, data))
        if data == b"fail":
            raise MemoryError
        made.send(who, data * 2)

    made = Door("127.0.0.1", None, take)
    made.taken = taken
    yield made
    made.close()


@contextlib.contextmanager
def linked(door, key=None):
    answers = queue.SimpleQueue()
    link = DoorLink(door.address, key or door.key, answers.put, lambda: None)
    yield link, answers
    link.close()


def test_both_ends_send(door):
    with linked(door) as (one, ones), linked(door) as (two, twos):
        one.send(b"a"), two.send(b"b")
        assert (ones.get(timeout=10), twos.get(timeout=10)) == (b"aa", b"bb")
        names = {door.taken.get(timeout=10)[0] for _ in range(2)}
        assert {len(each) for each in names} == {NAME_BYTES}
        for who in names:
            door.send(who, b"news")
        assert ones.get(timeout=10) == twos.get(timeout=10) == b"news"


def test_what_is_sent_before_the_end_arrives_although_the_other_end_sends_on():
    for _ in range(5):
        asked, heard = threading.Event(), threading.Event()

        def take(who, data, asked=asked, heard=heard):
            if data == b"first":
                asked.who = who
                asked.set()
                heard.wait(10)

        door = Door("127.0.0.1", None, take)
        with linked(door) as (link, answers):
            link.send(b"first")
            assert asked.wait(10)
            for _ in range(1000):  # more than the door reads ahead
                link.send(bytes(1000))
            time.sleep(0.05)  # they are on their way
            door.send(asked.who, b"the last")
            door.close()
            heard.set()
            assert answers.get(timeout=5) == b"the last"


def test_who_does_not_know_the_key_is_not_heard(door):
    wrong = CurveKeys(*zmq.curve_keypair()).public.decode()
    with linked(door, wrong) as (stranger, _), linked(door) as (link, answers):
        stranger.send(b"let me in")
        link.send(b"x")
        assert answers.get(timeout=10) == b"xx"
        assert door.taken.get(timeout=10)[1] == b"x"
        assert door.taken.empty()


def test_a_name_that_is_in_use_is_nobody_elses(door):
    with linked(door) as (link, answers):
        link.send(b"x")
        assert answers.get(timeout=10) == b"xx"
        who, _ = door.taken.get(timeout=10)
        with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
            thief.linger = 0
            thief.routing_id = who
            CurveKeys(*zmq.curve_keypair()).secure(thief, door.key.encode())
            thief.connect(door.address)
            thief.send(b"mine")
            assert not thief.poll(300)
        door.send(who, b"secret")
        assert answers.get(timeout=10) == b"secret"


def test_a_message_that_fails_or_has_many_parts_harms_no_other(door):
    with linked(door) as (link, answers):
        link.send(b"fail")
        link.send(b"too", b"many")
        link.send(b"x")
        assert answers.get(timeout=10) == b"xx"
        assert door.refused == 2


def test_it_ends_with_its_threads(door):
    with linked(door) as (link, answers):
        link.send(b"x")
        assert answers.get(timeout=10) == b"xx"
    door.close()
    door.close()
    door.send(b"nobody", b"late")
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "nbdist-door"])


def test_addresses_that_cannot_be_used():
    with pytest.raises(ChannelError, match=r"cannot listen at 203\.0\.113\.77"):
        Door("203.0.113.77", None, print)
    with pytest.raises(ChannelError, match="cannot be used"):
        DoorLink("nonsense", CurveKeys(*zmq.curve_keypair()).public.decode(), print, print)


_PROGRAM = """
import sys, time
from nbdist.channel.door import Door
heard = [time.monotonic()]
def tick():
    if time.monotonic() - heard[0] > 4:
        print("silent", flush=True)
def take(who, data):
    heard[0] = time.monotonic()
    door.send(who, data)
door = Door("127.0.0.1", None, take, tick)
print(door.address, door.key, flush=True)
sys.stdin.read()
"""


def test_a_process_that_was_stopped_reads_before_it_counts_silence():
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], text=True, env=os.environ | python_path(), **pipes)
    address, key = process.stdout.readline().split()
    answers = queue.SimpleQueue()
    link = DoorLink(address, key, answers.put, lambda: link.send(b"alive"))
    assert answers.get(timeout=20) == b"alive"
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    time.sleep(3)
    assert process.communicate()[0] == ""
    link.close()
