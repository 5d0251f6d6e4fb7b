"""A kernel's output that waits for the notebook: what must arrive does, in order; text beyond a limit is left out."""

import random
import re

import pytest

from nbdist.cluster.jupyter import jupyter_wire
from nbdist.cluster.jupyter.waiting_output import WaitingOutput

KEY = b"the key"


def message(kind, cell, **content):
    header = jupyter_wire.new_header(kind, "session")
    return ["iopub", [b"topic", *jupyter_wire.encode(KEY, header, jupyter_wire.pack(content), parent={"msg_id": cell})]]


def text(number, cell="cell", size=1000):
    return tuple(message("stream", cell, name="stdout", text=f"{number}:" + "x" * size))


def must(number, cell="cell"):
    return tuple(message("status", cell, number=number))


def decoded(parcels):
    return [jupyter_wire.decode(KEY, frames) for _, frames in parcels]


def test_what_fits_arrives_as_it_came():
    waiting = WaitingOutput(KEY, 1 << 20)
    parcels = [text(number) if number % 3 else must(number) for number in range(100)]
    for parcel in parcels:
        waiting.add(parcel)
    taken = []
    while waiting:
        batch = waiting.take(5000)
        assert 1 <= len(batch) <= 6
        taken += batch
    assert taken == parcels


@pytest.mark.parametrize("seed", range(20))
def test_the_middle_of_the_text_is_left_out_and_all_else_arrives_in_order(seed):
    chosen = random.Random(seed)
    waiting = WaitingOutput(KEY, 100_000)
    sent, got = [], []
    for number in range(2000):
        parcel = must(number) if chosen.random() < 0.05 else text(number, cell=f"cell{number // 500}")
        sent.append(parcel)
        waiting.add(parcel)
        if chosen.random() < 0.1:
            got += waiting.take(chosen.randrange(5000))
        assert waiting.nbytes < 200_000
    while waiting:
        got += waiting.take(5000)
    left_out = [parcel for parcel in got if parcel not in sent]
    kept = [parcel for parcel in got if parcel in sent]
    assert kept == [parcel for parcel in sent if parcel in kept], "in order"
    assert [each for each in sent if not jupyter_wire.is_text(each[1])] == [
        each for each in kept if not jupyter_wire.is_text(each[1])
    ]
    assert left_out
    for each in decoded(left_out):
        assert each["msg_type"] == "stream"
        assert re.fullmatch(
            r"\n\.\.\. [\d.]+ [KM]B of output are left out: they came faster than the notebook could read them\n",
            each["content"]["text"],
        )
    assert kept[0] == sent[0]
    assert kept[-1] == sent[-1]
    # A line stands where text is missing, in the cell that printed it.
    for before, line, after in zip(got, got[1:], got[2:], strict=False):
        if line in left_out and before in sent and after in sent and jupyter_wire.is_text(before[1]):
            assert sent.index(after) - sent.index(before) > 1


def test_each_cell_is_told_what_it_lacks():
    waiting = WaitingOutput(KEY, 10_000)
    for cell in ("one", "two"):
        for number in range(50):
            waiting.add(text(number, cell))
    told = [each["parent_header"]["msg_id"] for each in decoded(waiting.take(1 << 30)) if "left out" in str(each)]
    assert told == ["one", "two"]


def test_there_is_no_room_for_more_than_must_arrive():
    waiting = WaitingOutput(KEY, 100_000)
    assert waiting.has_room
    while waiting.has_room:
        waiting.add(("shell", [bytes(1 << 20)]))
    assert len(waiting.take(1 << 30)) == 9  # of 1 MB: 8 MB, and half of the limit
    assert waiting.has_room
