"""Members that meet by ``file://``: no process that is killed, stopped or wrong spoils the file for the others."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers.abuse import mad_member
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.channel.process_watch import started_at
from nbdist.channel.secret import Secret
from nbdist.ids import new_incarnation
from nbdist.rpc.world.meeting_file import MeetingFile
from nbdist.rpc.world.roster import Roster
from nbdist.wire.messages import Record

WRITES = """
import sys, itertools
from nbdist.rpc.world.meeting_file import MeetingFile
file = MeetingFile(sys.argv[1])
for number in itertools.count():
    text = file.compare_set("", "", "").decode()
    file.compare_set("", text, sys.argv[2] * (50_000 + number % 7))
    if not number:
        print("writes", flush=True)
"""


def start(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_a_text_is_set_if_it_is_what_was_expected(tmp_path):
    file = MeetingFile(tmp_path / "members")
    assert file.compare_set("", "", "one") == b"one"
    assert file.compare_set("", "two", "three") == b"one"
    assert MeetingFile(tmp_path / "members").compare_set("", "one", "two") == b"two"
    assert file.compare_set("", "two", "") == b""
    assert file.compare_set("", "", "") == b""
    assert list(tmp_path.iterdir()) == []
    assert file.compare_set("", "", "again") == b"again"


def test_the_last_to_leave_removes_what_an_interrupted_write_left(tmp_path, monkeypatch):
    file = MeetingFile(tmp_path / "members")
    file.compare_set("", "", "one")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.compare_set("", "one", "two")
    assert len(list(tmp_path.iterdir())) == 2
    assert file.compare_set("", "one", "") == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_processes_killed_while_they_write_leave_a_whole_text(tmp_path, kills):
    path = tmp_path / "members"
    chance = random.Random(kills)
    for number in range(kills):
        writers = [start(WRITES, path, letter) for letter in "ab"]
        try:
            for writer in writers:
                assert writer.stdout.readline() == "writes\n"
            time.sleep(chance.random() * 0.02)
        finally:
            for writer in writers:
                writer.kill()
                writer.communicate()
        text = MeetingFile(path).compare_set("", "", "").decode()
        assert set(text) in ({"a"}, {"b"}), f"kill {number} left {text[:20]!r}"
        assert len(text) >= 50_000


def test_a_stopped_process_that_holds_the_lock_is_waited_for_in_vain(tmp_path):
    path = tmp_path / "members"
    hold = (
        "import fcntl, os, sys, time\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('holds', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = start(hold, f"{path}.rpc")
    try:
        assert holder.stdout.readline() == "holds\n"
        with pytest.raises(TimeoutError, match="has held the lock"):
            MeetingFile(path).compare_set("", "", "x")
    finally:
        holder.kill()
        holder.communicate()
    assert MeetingFile(path).compare_set("", "", "x") == b"x"


def test_a_folder_that_does_not_exist_is_an_error_at_once():
    began = time.monotonic()
    with pytest.raises(
        nbdist.RendezvousError, match=r"file:///no/such/folder/f: No such file .*Name a file in a folder"
    ):
        rpc.init_rpc(
            "worker0",
            rank=0,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method="file:///no/such/folder/f"),
        )
    assert time.monotonic() - began < 30  # it was the timeout of a call, 60 s, and deaf to Ctrl-C


def test_ctrl_c_ends_the_wait_for_members_that_do_not_come(tmp_path):
    waits = (
        "import sys\n"
        "from nbdist import rpc\n"
        "print('waits', flush=True)\n"
        "rpc.init_rpc('worker0', rank=0, world_size=2, rpc_backend_options=\n"
        "    rpc.RpcBackendOptions(init_method=f'file://{sys.argv[1]}', rpc_timeout=0))\n"
    )
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{waits}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "members")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdout.readline()
        file = tmp_path / "members.rpc"
        wait_until(lambda: file.exists() and file.stat().st_size)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


def record(id, size):
    """A member of this process; living, as far as others can see."""
    return Record(f"worker{id}", id, new_incarnation(), ["ipc:///x"], "h", os.getpid(), started_at(os.getpid()), size)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_mutated_file_is_refused_in_words(tmp_path, count):
    secret = Secret(b"a secret of the tests, long enough", shared_off_host=False)
    path = tmp_path / "members"
    whole = []
    for size in (None, 1):
        member = record(0, size)
        roster = Roster(lambda: MeetingFile(path), secret, "h")
        deadline = time.monotonic() + 10
        roster.join(member, deadline) if size is None else roster.form(member, deadline)
        whole.append((tmp_path / "members.rpc").read_bytes())
        roster.leave(member)
        assert not (tmp_path / "members.rpc").exists()
    chance = random.Random(count)
    refused = 0
    for number in range(count):
        (tmp_path / "members.rpc").write_bytes(mad_member.scramble(chance.choice(whole), chance))
        roster = Roster(lambda: MeetingFile(path), secret, "h")
        newcomer = record(1, chance.choice([None, 2]))
        try:
            known = roster.join(newcomer, 0.0) if newcomer.world_size is None else roster.form(newcomer, 0.0)
        except (nbdist.RendezvousError, nbdist.SecurityError):
            refused += 1
        else:
            assert {other.name for other in known} <= {"worker0", "worker1"}, f"mutation {number}"
    assert refused > count / 2
