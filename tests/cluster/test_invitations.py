"""Who may join a cluster, by which invitation and with which versions; what strangers get."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest
import torch
import zmq
from helpers.waiting import wait_for_file

import nbdist
from nbdist import rpc
from nbdist.__main__ import main
from nbdist.channel.contract import ChannelError
from nbdist.channel.entrance import Entrance, Visit, knock
from nbdist.channel.secret import Secret
from nbdist.cluster.hosts import admission, hub
from nbdist.cluster.hosts.admission import check_versions, describe_myself
from nbdist.cluster.hosts.invitations import Invitations, read_invitation
from nbdist.cluster.hosts.keeper import Keeper
from nbdist.errors import SecurityError, UsageError, VersionMismatch


def worker(*arguments: str, **options) -> subprocess.Popen:
    """Start ``python -m nbdist worker`` on this host."""
    return subprocess.Popen([sys.executable, "-m", "nbdist", "worker", *arguments], **options)


# -- the invitation ---------------------------------------------------------------------------------


def test_a_token_is_good_until_it_expires_is_used_up_or_revoked():
    invitations = Invitations()
    token = invitations.invite(100.0, 60.0, 2)
    with pytest.raises(SecurityError, match="has not made this invitation"):
        invitations.use("guessed", 100.0)
    with pytest.raises(SecurityError, match="has 2 uses left, and 3 workers came"):
        invitations.use(token, 100.0, 3)
    invitations.use(token, 159.0)
    with pytest.raises(SecurityError, match=r"expired 30\.00 s ago"):
        invitations.use(token, 190.0)
    invitations.use(token, 160.0)
    with pytest.raises(SecurityError, match="has been used up"):
        invitations.use(token, 100.0)
    other = invitations.invite(100.0, 60.0, 1)
    assert invitations.revoke() == 1
    assert invitations.revoke() == 0
    with pytest.raises(SecurityError, match="has been revoked"):
        invitations.use(other, 100.0)
    for seconds, uses in ((0, 1), (-1, 1), (float("nan"), 1), (1, 0)):
        with pytest.raises(UsageError, match="an invitation"):
            invitations.invite(100.0, seconds, uses)


@pytest.mark.parametrize(
    ("field", "theirs", "said"),
    [
        ("python", "3.99.1", r"has Python 3\.99\.1, and the notebook has 3\."),
        ("nbdist", "9.9", r"has nbdist 9\.9 \(protocol \d+\), and the notebook has "),
        ("protocol", 1, r"\(protocol 1\), and the notebook has "),
        ("torch", "2.9.1+cu128", r"has torch 2\.9\.1\+cu128, and the notebook has 2\."),
        ("torch", "unknown", r"has torch unknown"),
    ],
)
def test_a_newcomer_whose_versions_do_not_fit_is_refused_with_both(field, theirs, said):
    newcomer = describe_myself("token", 1)
    check_versions(newcomer)
    setattr(newcomer, field, theirs)
    with pytest.raises(VersionMismatch, match=said):
        check_versions(newcomer)


def refused(*arguments: str, **options) -> str:
    """Run a worker that is refused; return what it says."""
    process = worker(*arguments, stderr=subprocess.PIPE, text=True, **options)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    return said


def refused_here(file, workers: int = 1) -> str:
    """Join from this process, which takes less time than one of its own; return the error."""
    with pytest.raises(SecurityError) as refusal:
        Keeper(read_invitation(str(file)), workers)
    return str(refusal.value)


def test_a_file_that_is_no_invitation_is_refused_before_anything_is_sent(tmp_path):
    with pytest.raises(UsageError, match=r"the invitation .*/none cannot be read: No such file"):
        read_invitation(str(tmp_path / "none"))
    file = tmp_path / "invitation"
    file.touch(mode=0o600)
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"is no invitation of %dist_invite: Object missing required field"):
        read_invitation(str(file))
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(SecurityError, match=r"others may read or write .*%dist_invite --revoke"):
            read_invitation(str(file))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A cluster of one joined worker of this host, and the file of its first invitation, which is used up."""
    file = tmp_path_factory.mktemp("join") / "invitation.json"
    started = []

    def start() -> None:
        wait_for_file(file)
        started.append(worker("--connect", str(file), "--host", "127.0.0.1"))

    threading.Thread(target=start, daemon=True).start()
    with nbdist.Cluster(1, launcher="join", host="127.0.0.1", invitation=str(file)) as cluster:
        yield cluster, file
    assert started[0].wait(20) == 0


def test_used_up_expired_revoked_and_altered_invitations_are_refused_by_the_notebook(running, tmp_path):
    cluster, first = running
    assert first.stat().st_mode & 0o777 == 0o600
    assert "this invitation has been used up" in refused("--connect", str(first))
    file = tmp_path / "another.json"
    cluster.invite(str(file), expires=0.01)
    time.sleep(0.02)
    assert "this invitation expired" in refused_here(file)
    altered = json.loads(file.read_text()) | {"expires": "2999-01-01 00:00:00 UTC", "uses": 1000}
    file.write_text(json.dumps(altered))
    assert "this invitation expired" in refused_here(file), "what the file says must not matter"
    cluster.invite(str(file))
    assert cluster.revoke_invitations() >= 1
    assert "this invitation has been revoked" in refused_here(file)
    cluster.invite(str(file), uses=2)
    assert "has 2 uses left, and 3 workers came" in refused_here(file, 3)
    file.chmod(0o640)
    assert "others may read or write" in refused_here(file)
    text = json.dumps(json.loads(file.read_text()) | {"token": "x"})
    process = worker("--connect", "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "has not made this invitation" in process.communicate(text, timeout=60)[1]
    assert cluster.evaluate("rank", 0) == 0


def test_a_newcomer_of_another_version_is_refused_by_a_running_cluster(running, tmp_path, monkeypatch):
    cluster, _ = running
    file = tmp_path / "another.json"
    cluster.invite(str(file))
    invitation = read_invitation(str(file))
    newcomer = describe_myself(invitation.token, 1)
    newcomer.python = "3.99.0"
    request = admission.NEWCOMER + admission.msgspec.msgpack.encode(newcomer)
    answer = admission.decode_answer(knock(invitation.address, invitation.key.encode(), request, 10.0))
    assert isinstance(answer.error(), VersionMismatch)
    assert "Python 3.99.0" in answer.why
    cluster.lifecycle.launcher.hub.invitations.use(invitation.token, time.time())  # the refusal has taken no use


def test_the_doctor_says_whether_a_worker_could_join(running, tmp_path, capsys):
    cluster, _ = running
    file = tmp_path / "another.json"
    cluster.invite(str(file))
    assert main(["doctor", "--connect", str(file)]) == 0
    said = capsys.readouterr().out
    for what in (
        "this host          127.0.0.1, interface lo",
        "first answer",
        "latency            ",
        "notebook's clock   ",
        "bandwidth",
        "B/s back",
        "other ports        reached, from both sides",
        ": a worker may join",
    ):
        assert what in said
    cluster.invite(str(file), expires=0.001)
    time.sleep(0.01)
    assert main(["doctor", "--connect", str(file)]) == 1
    assert "the notebook       no: this invitation expired" in capsys.readouterr().out


def test_the_doctor_says_that_the_torch_there_is_another(running, tmp_path, monkeypatch, capsys):
    cluster, _ = running
    file = tmp_path / "another.json"
    cluster.invite(str(file))
    monkeypatch.setattr(torch, "__version__", "2.99.0")  # of the notebook, and of the doctor, which run here
    real = admission.describe_the_notebook

    def older(newcomer, addresses):
        facts = real(newcomer, addresses)
        facts.torch = "2.98.0"
        return facts

    monkeypatch.setattr(admission, "describe_the_notebook", older)
    assert main(["doctor", "--connect", str(file)]) == 0
    assert "torch is 2.99.0 here. Install the same torch on all hosts" in capsys.readouterr().out


def tried(invitation, **fields) -> admission.TrialAnswer | admission.Denied:
    """Send a trial with these fields, and return its answer."""
    trial = admission.Trial(**{"token": invitation.token, **fields})
    request = admission.TRIAL + admission.msgspec.msgpack.encode(trial)
    return admission.decode_answer(knock(invitation.address, invitation.key.encode(), request, 10.0))


def test_trials_move_bytes_for_the_invited_only_and_a_bounded_number(running, tmp_path):
    cluster, first = running
    stranger = read_invitation(str(first))  # used up
    for refusal in (
        tried(stranger, wanted=1 << 20),
        tried(stranger, token="guessed", wanted=1 << 20, port=1, host="::1"),
    ):
        assert isinstance(refusal, admission.Denied)
    file = tmp_path / "another.json"
    cluster.invite(str(file))
    invitation = read_invitation(str(file))
    assert len(tried(invitation, wanted=1000).padding) == 1000
    assert len(tried(invitation, wanted=1 << 40).padding) == 1 << 23, "one answer is bounded"
    assert tried(invitation, wanted=-5).padding == b""
    unreached = tried(invitation, port=1, host="127.0.0.1").unreached
    assert "refused" in unreached
    for host, port in (("no such host.invalid", 1), ("127.0.0.1", -1), ("127.0.0.1", 1 << 40), ("x" * 300, 1)):
        assert tried(invitation, port=port, host=host).unreached
    answers = [tried(invitation, wanted=1 << 23) for _ in range(15)]
    denied = [answer for answer in answers if isinstance(answer, admission.Denied)]
    assert 0 < len(denied) < 15
    assert "have moved" in denied[-1].why
    cluster.lifecycle.launcher.hub.invitations.use(invitation.token, time.time())  # the trials have taken no use


def test_the_doctor_still_answers_when_it_may_measure_no_more(running, tmp_path, capsys):
    cluster, _ = running
    file = tmp_path / "another.json"
    cluster.invite(str(file))
    for _ in range(15):
        tried(read_invitation(str(file)), wanted=1 << 23)
    assert main(["doctor", "--connect", str(file)]) == 0
    said = capsys.readouterr().out
    assert "bandwidth          no: doctors with this invitation have moved" in said
    assert ": a worker may join" in said


def test_what_trials_may_move_is_counted_by_the_minute():
    invitations = Invitations()
    token = invitations.invite(100.0, 600.0, 1)
    with pytest.raises(SecurityError, match="has not made this invitation"):
        invitations.try_out("guessed", 100.0, 1)
    invitations.try_out(token, 100.0, 100_000_000)
    with pytest.raises(SecurityError, match=r"have moved 100 MB within a minute, and may move 128 MB: ask again in 50"):
        invitations.try_out(token, 110.0, 30_000_000)
    invitations.try_out(token, 110.0, 28_000_000)
    invitations.try_out(token, 160.0, 128_000_000)
    invitations.try_out(token, 90.0, 128_000_000)  # the clock was set back
    invitations.use(token, 100.0)
    with pytest.raises(SecurityError, match="has been used up"):
        invitations.try_out(token, 300.0, 1)


# -- strangers --------------------------------------------------------------------------------------


def test_strangers_at_the_entrance_get_nothing_and_harm_nobody(running):
    """Without the public key there is no connection; with it, bytes that nbdist does not send have no answer."""
    _, first = running
    invitation = read_invitation(str(first))
    wrong = Secret(b"another secret of some length", shared_off_host=True).curve("entrance").public
    with pytest.raises(ChannelError, match="no answer"):
        knock(invitation.address, wrong, b"n", 0.3)
    for request in (
        b"",
        b"x",
        b"n",
        b"n\xff\xff",
        b"t",
        b"t\xff",
        b"s" + b"\0" * 100,
        os.urandom(1000),
        b"n" + os.urandom(100_000),
    ):
        with pytest.raises(ChannelError, match="no answer"):
            knock(invitation.address, invitation.key.encode(), request, 0.1)
    host, _, port = invitation.address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for _ in range(200):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(os.urandom(300))
            plain = stack.enter_context(context.socket(zmq.DEALER))
            plain.linger = 0
            plain.connect(invitation.address)
            with contextlib.suppress(zmq.Again):  # the entrance has refused the connection already
                plain.send(b"n" * 1000, zmq.NOBLOCK)
        began = time.monotonic()
        assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1)).tolist() == [2.0, 2.0]
        assert time.monotonic() - began < 5
        assert "this invitation has been" in refused("--connect", str(first))  # whoever knows the key is still heard


def test_the_log_tells_of_few_refusals_in_a_minute_and_of_little_text(running, caplog):
    _, first = running
    invitation = read_invitation(str(first))  # used up
    newcomer = describe_myself(invitation.token, 1)
    newcomer.host = "x" * 100_000
    request = admission.NEWCOMER + admission.msgspec.msgpack.encode(newcomer)
    caplog.clear()
    for _ in range(hub._WARNINGS + 3):
        answer = admission.decode_answer(knock(invitation.address, invitation.key.encode(), request, 10.0))
        assert isinstance(answer, admission.Denied)
    said = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert 0 < len(said) <= hub._WARNINGS
    assert max(map(len, said)) < 300


def test_an_entrance_keeps_to_its_ports_and_says_when_none_is_free():
    keys = Secret(b"a secret of some length", shared_off_host=True).curve("entrance")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ChannelError, match=rf"all ports from {port} to {port} of 127\.0\.0\.1 are taken: name others wi"
        ):
            Entrance("127.0.0.1", keys, lambda request: request, (port, port))
    with pytest.raises(ChannelError, match=r"cannot listen at 203\.0\.113\.77: .*\. Name an address of this machine"):
        Entrance("203.0.113.77", keys, lambda request: request)
    entrance = Entrance("127.0.0.1", keys, lambda request: request[::-1], (port, port))
    assert entrance.address == f"tcp://127.0.0.1:{port}"
    assert knock(entrance.address, keys.public, b"abc", 10.0) == b"cba"
    entrance.close()
    entrance.close()


def test_an_entrance_keeps_nothing_of_requests_and_answers_after_an_error(monkeypatch):
    keys = Secret(b"a secret of some length", shared_off_host=True).curve("entrance")
    entrance = Entrance("127.0.0.1", keys, lambda request: str(len(request)).encode())
    with contextlib.closing(entrance), contextlib.closing(Visit(entrance.address, keys.public)) as visit:
        # A request of many parts is dropped. The next one is read from its beginning.
        visit.socket.send_multipart([bytes(1000)] * 50)
        assert visit.ask(b"abc", 10.0) == b"3"
        assert entrance.refused == 1
        assert visit.ask_all([b"", b"a", b"ab"], 10.0) == [b"0", b"1", b"2"]
        # No memory for a part.
        receive, failing = zmq.Socket.recv, [True]

        def fail(self, *arguments, **options):
            data = receive(self, *arguments, **options)
            if self is entrance.socket and failing:
                failing.pop()
                raise MemoryError
            return data

        monkeypatch.setattr(zmq.Socket, "recv", fail)
        visit.socket.send_multipart([b"lost", b"lost"])
        assert visit.ask(b"abcd", 10.0) == b"4"
        assert (failing, entrance.refused) == ([], 2)
        monkeypatch.undo()
        tracemalloc.start()
        try:
            assert visit.ask(bytes(3 << 20), 10.0) == str(3 << 20).encode()
            assert tracemalloc.get_traced_memory()[0] < 1 << 20
        finally:
            tracemalloc.stop()
    with contextlib.closing(Entrance("127.0.0.1", keys, lambda request: request)) as entrance:
        with pytest.raises(ChannelError, match="no answer"):
            knock(entrance.address, keys.public, bytes(5 << 20), 0.5)
        assert knock(entrance.address, keys.public, b"abc", 10.0) == b"abc"
