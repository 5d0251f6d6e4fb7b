"""Run processes that write to one FolderStore without a pause, and kill one after another in the middle of it.

A program of its own, because it forks: ``store_killing.py FOLDER KILLS SEED``.
"""

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from nbdist.cluster.processes.group_store import FolderStore

BLOCK = 1 << 16
"""Bytes of a value: many pages, so that a kill falls into the middle of a write now and then."""


def write_for_ever(folder: Path, number: int) -> None:
    store = FolderStore(folder)
    turn = 0
    while True:
        turn += 1
        store.set("one byte throughout", bytes([turn % 256]) * BLOCK)
        store.add("sum", 1)
        store.append(f"of {number}", b"ab")
        store.compare_set("word", store.get("word"), b"word" * (turn % 1000 + 1))


def check(store: FolderStore) -> None:
    """See that every value is whole, and that the store can still be written to."""
    value = store.get("one byte throughout")
    assert len(value) == BLOCK, f"{len(value)} bytes"
    assert len(set(value)) == 1, "two values in one"
    assert int(store.get("sum")) >= 0
    word = store.get("word")
    assert word == b"word" * (len(word) // 4)
    before = store.add("mine", 0)
    assert store.add("mine", 1) == before + 1


def main(folder: Path, kills: int, seed: int) -> None:
    moments = random.Random(seed)
    store = FolderStore(folder)
    store.set_timeout(timedelta(seconds=30))
    store.set("one byte throughout", bytes(BLOCK))
    store.set("word", b"word")

    def start(number: int) -> int:
        child = os.fork()
        if not child:
            try:
                write_for_ever(folder, number)
            finally:
                os._exit(1)
        return child

    writers = [start(number) for number in range(2)]
    try:
        for kill in range(kills):
            time.sleep(moments.random() * 0.05)
            victim = moments.randrange(len(writers))
            os.kill(writers[victim], signal.SIGKILL)
            os.waitpid(writers[victim], 0)
            check(store)
            writers[victim] = start(kill + len(writers))
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    for number in range(kills + 2):
        value = store.get(f"of {number}") if store.check([f"of {number}"]) else b""
        assert value == b"ab" * (len(value) // 2)
    print("whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
