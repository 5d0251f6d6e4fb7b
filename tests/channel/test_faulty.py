"""Faults on purpose, by kind of message."""

import pytest

from nbdist.channel.contract import ChannelError
from nbdist.testing import Faults, FaultyChannel, Network

SOON = 30.0


def pair(**faults):
    network = Network()
    there = network.open()
    here = FaultyChannel(network.open(), Faults(**faults))
    return here, here.connect(there.addresses), there


def drain(channel):
    found = []
    while (frames := channel.receive(0)) is not None:
        found.append(frames[0])
    return found


def test_the_first_so_many_of_a_kind_fail_for_each_receiver():
    here, link, there = pair(fail={"call": 2})
    for _ in range(2):
        with pytest.raises(ChannelError, match="injected fault: call"):
            link.send([b"x"], "call")
        link.send([b"other kind"], "reply")
    link.send([b"third"], "call")
    assert drain(there) == [b"other kind", b"other kind", b"third"]
    with pytest.raises(ChannelError):
        here.connect(there.addresses).send([b"x"], "call")


def test_drop_and_duplicate():
    _, link, there = pair(drop={"call": 1.0}, duplicate={"reply": 1.0})
    link.send([b"lost"], "call")
    link.send([b"twice"], "reply")
    link.send([b"once"], "ack")
    assert drain(there) == [b"twice", b"twice", b"once"]


def test_a_star_is_any_kind_and_a_word_comes_first():
    _, link, there = pair(drop={"*": 1.0, "ack": 0.0})
    link.send([b"lost"], "call")
    link.send([b"kept"], "ack")
    assert drain(there) == [b"kept"]


def test_a_match_maps_messages_to_words():
    _, link, there = pair(drop={"big": 1.0}, match=lambda kind, frames: "big" if len(frames[0]) > 3 else kind)
    link.send([b"large"], "call")
    link.send([b"s"], "call")
    assert drain(there) == [b"s"]


def test_a_delayed_message_comes_after_those_that_are_not():
    here, link, there = pair(delay={"call": 0.02})
    try:
        link.send([b"late"], "call")
        link.send([b"early"], "reply")
        assert [there.receive(SOON), there.receive(SOON)] == [[b"early"], [b"late"]]
    finally:
        here.close()


def test_reordered_messages_all_come():
    here, link, there = pair(reorder={"*": 1.0}, seed=3)
    try:
        sent = [b"%d" % number for number in range(20)]
        for frame in sent:
            link.send([frame], "call")
        received = [there.receive(SOON)[0] for _ in sent]
        assert sorted(received) == sorted(sent)
        assert received != sent
    finally:
        here.close()


def test_delayed_bytes_are_those_of_the_call():
    here, link, there = pair(delay={"*": 0.01})
    try:
        memory = bytearray(b"x")
        link.send([memoryview(memory)], "call")
        memory[:] = b"y"
        assert there.receive(SOON) == [b"x"]
    finally:
        here.close()


def test_the_same_seed_makes_the_same_faults():
    def run(seed):
        _, link, there = pair(drop={"*": 0.5}, seed=seed)
        for number in range(40):
            link.send([b"%d" % number], "call")
        return drain(there)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert 0 < len(run(1)) < 40


def test_rules_may_change_meanwhile():
    here, link, there = pair()
    here.faults.drop = {"*": 1.0}
    link.send([b"lost"], "call")
    here.faults.drop = {}
    link.send([b"kept"], "call")
    assert drain(there) == [b"kept"]
