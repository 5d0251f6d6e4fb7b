"""What the parts for other hosts refuse, each with its reason, and what the store of several hosts says at its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from helpers.hosts.other_hosts import can_make_hosts
from helpers.waiting import wait_until
from msgspec import structs

from nbdist.channel.contract import ChannelError
from nbdist.channel.entrance import knock
from nbdist.channel.secret import Secret
from nbdist.cluster.hosts import admission
from nbdist.cluster.hosts import hub as hubs
from nbdist.cluster.hosts.admission import describe_myself
from nbdist.cluster.hosts.group_board import Boards, BoardStore
from nbdist.cluster.hosts.interfaces import interface_of, own_address_towards
from nbdist.cluster.hosts.invitations import Invitation
from nbdist.cluster.hosts.joining import join
from nbdist.cluster.hosts.keeper import _places_of_host
from nbdist.cluster.hosts.launchers import ray as ray_launcher
from nbdist.cluster.hosts.launchers.ray import RayLauncher
from nbdist.cluster.spec import Spec
from nbdist.errors import RendezvousError, UsageError, WorkerLost
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.start import start_agent
from nbdist.testing import World
from nbdist.wire.messages import GiveBack


def refused_ray(spec: Spec, monkeypatch, **init):
    """Connect to a Ray that is none: ``init`` is what it does."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_launcher._connect(SimpleNamespace(is_initialized=lambda: False, __file__="/lib/ray/__init__.py", **init), spec)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ports": (1, 2)}, r"ports is for the launcher join or ray, not for local: leave it out, or name"),
        ({"host": "10.0.0.1", "gpu_ids": (0,)}, r"the launcher local gives each worker .* out, or leave host out"),
        ({"launcher": "join", "placement": "spread"}, r"placement is for the launcher ray, not for join"),
        ({"launcher": "ray", "gpu_ids": (0,)}, r"the launcher ray gives each worker GPUs of its host"),
        (
            {"launcher": "join", "ports": (9, 8)},
            r"ports are two numbers from 1 to 65535, the smaller first, not \(9, 8",
        ),
        ({"launcher": "join", "ports": (0, 8)}, r"ports are two numbers"),
        ({"launcher": "ray", "gpus_per_worker": -1.0}, r"gpus_per_worker must be 0 or more, not -1"),
        ({"launcher": "ray", "gpus_per_worker": float("nan")}, r"gpus_per_worker must be 0 or more, not nan"),
        ({"launcher": "ray", "placement": "near"}, r"placement is pack or spread, not 'near'"),
    ],
)
def test_options_that_do_not_fit(options, text):
    with pytest.raises(UsageError, match=text):
        Spec(**options).check()


def test_devices_are_found_where_the_workers_run():
    assert Spec(3, launcher="join", backend="nccl").devices() == [("cpu", None)] * 3


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"-n must be 1 or more, not 0"):
        join("file", 0, None)
    with pytest.raises(UsageError, match=r"the invitation cannot be written to .*/none/file: No such file"):
        Invitation("tcp://a:1", "key", "token", 1, "now").write(Path(tmp_path, "none", "file"))
    with pytest.raises(UsageError, match=r"this host cannot reach no\.such\.host\.invalid: "):
        own_address_towards("tcp://no.such.host.invalid:1")
    with pytest.raises(ChannelError, match=r"the address nonsense of the cluster cannot be used: "):
        knock("nonsense", Secret(b"a secret of some length", shared_off_host=True).curve("entrance").public, b"", 0.1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UsageError, match=r"the launcher ray needs Ray, which is not installed: pip install 'nbdist\[ray"
    ):
        RayLauncher(Spec(launcher="ray"), lambda name, how: None)


def test_a_ray_that_does_not_start_or_answer(monkeypatch):
    def fail(**options):
        raise ConnectionError(f"nobody listens at {options['address']}")

    with pytest.raises(UsageError, match=r"Ray cannot be reached at somewhere:6379: nobody listens at somewhere:6379"):
        refused_ray(Spec(launcher="ray", address="somewhere:6379"), monkeypatch, init=fail)
    with pytest.raises(UsageError, match=r"Ray cannot start on this machine: nobody listens at local"):
        refused_ray(Spec(launcher="ray"), monkeypatch, init=fail)


@pytest.mark.parametrize("error", [RuntimeError("too slow"), KeyboardInterrupt()])
def test_a_ray_that_does_not_start_leaves_no_process(monkeypatch, error):
    """Nor one that Ctrl-C stops while it starts. A child that is not Ray's stays."""
    sleep = "import time; time.sleep(60)"
    began = []

    def fail(**options):
        for name in ("/lib/ray/raylet", "/home/ray/other"):
            began.append(subprocess.Popen([sys.executable, "-c", sleep, name]))
            wait_until(psutil.Process(began[-1].pid).cmdline)  # the kernel shows it a little later
        raise error

    with pytest.raises((UsageError, KeyboardInterrupt)):
        refused_ray(Spec(launcher="ray"), monkeypatch, init=fail)
    assert len(began) == (4 if isinstance(error, RuntimeError) else 2)  # after an error of Ray's it tries again
    for rays, other in zip(began[::2], began[1::2], strict=True):
        assert not psutil.pid_exists(rays.pid)
        assert other.poll() is None
        other.kill()
        other.wait()


def test_a_ray_that_starts_at_the_second_try_is_used(monkeypatch):
    errors = [RuntimeError("too slow"), None]

    def begin(**options):
        if (error := errors.pop(0)) is not None:
            raise error

    refused_ray(Spec(launcher="ray"), monkeypatch, init=begin)
    assert not errors


def test_a_message_to_an_agent_that_was_never_met_is_refused():
    with World(1) as world, pytest.raises(WorkerLost, match=r"an unknown worker \(2a\) is not connected"):
        world[0].post(42, GiveBack([]))


def test_an_agent_that_cannot_reach_the_one_that_it_is_to_meet_says_so():
    with World(1) as world:
        far = structs.replace(world[0].me, host="far", addresses=["tcp://127.0.0.1:1"], incarnation=7, world_size=None)
    options = RpcBackendOptions(secret="a secret of some length", rpc_timeout=0.5)
    with pytest.raises(RendezvousError, match=r"no answer from worker0: see whether its host can be reached"):
        start_agent("one", 1, None, options, present=[far])


@pytest.mark.parametrize(
    ("environment", "workers", "found"),
    [
        ({}, 3, (0, 3)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, (1, 2)),  # torchrun
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 4, (4, 8)),
        ({"SLURM_LOCALID": "2"}, 1, (2, 3)),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 1, (0, 4)),
        ({"LOCAL_RANK": "x"}, 2, (0, 2)),
    ],
)
def test_several_keepers_of_one_host_have_places_of_their_own(environment, workers, found):
    assert _places_of_host(environment, workers) == found


# -- the board --------------------------------------------------------------------------------------


@pytest.fixture
def store():
    """A store at a board of this process, without RPC between."""
    boards = Boards()
    boards.make(1)

    made = BoardStore(1, boards.act)
    made.boards = boards
    return made


def test_a_board_refuses_an_operation_that_it_lacks(store):
    with pytest.raises(UsageError, match=r"a board has no operation 'explode'"):
        store._do("explode")


def test_a_board_that_has_ended_or_is_gone_says_so_in_every_wait(store):
    store.boards.end(1, "worker1 was killed")
    with pytest.raises(RendezvousError, match="worker1 was killed"):
        store.get("never")
    with pytest.raises(RendezvousError, match="worker1 was killed"):
        store.set("a", "b")
    store.boards.remove(1)
    with pytest.raises(RendezvousError, match="has been removed"):
        store.wait(["never"])


def test_a_request_that_no_program_of_nbdist_sends_gets_no_answer(tmp_path, caplog):
    caplog.set_level("DEBUG")
    unused = dict.fromkeys(("on_arrival", "on_gone", "on_end", "on_parcels"))
    hub = hubs.Hub("127.0.0.1", tmp_path, None, **unused)
    try:
        invitation = hub.invite(60.0, 1)
        with pytest.raises(ChannelError):
            knock(invitation.address, invitation.key.encode(), b"x", 0.5)
        assert hub.entrance.refused == 1
        assert "a request at the entrance is none of nbdist's" in caplog.text
    finally:
        hub.close()


def test_a_keeper_that_is_lost_while_it_arrives_is_reported_once(tmp_path, monkeypatch):
    arrived, gone = [], []
    unused = dict.fromkeys(("on_end", "on_parcels"))
    hub = hubs.Hub(
        *("127.0.0.1", tmp_path, None),
        on_arrival=lambda: arrived.append(True),
        on_gone=lambda member, why: gone.append((member.token, why)),
        **unused,
    )
    try:
        with World(1) as world:
            record = structs.replace(world[0].me, incarnation=7)
        seen = [record]
        monkeypatch.setattr(hub.agent, "member", lambda incarnation: seen.pop() if seen else None)
        monkeypatch.setattr(hub.agent, "fate", lambda incarnation: "was switched off")
        invitation = hub.invite(60.0, 1)
        request = admission.NEWCOMER + msgspec.msgpack.encode(describe_myself(invitation.token, 1))
        answer = knock(invitation.address, invitation.key.encode(), request, 10.0)
        hub.arrive(admission.decode_answer(answer).id, 7, "127.0.0.1", "far")
        hub._lost(record, "was switched off")
        assert (arrived, gone, hub.members) == ([], [(invitation.token, "was switched off")], [])
    finally:
        hub.close()


def test_sigterm_ends_a_keeper_wherever_it_comes(tmp_path, monkeypatch):
    """Also while the main thread holds the lock of the event for which it is about to wait."""
    held, ended = threading.Lock(), threading.Event()

    class Keeper:
        host, why = "127.0.0.1", ""

        def __init__(self, *_):
            pass

        def run(self):
            with held:
                signal.raise_signal(signal.SIGTERM)
            assert ended.wait(10)

        def finish(self, why):
            assert held.acquire(timeout=10)
            held.release()
            ended.set()

    for name, stand_in in {"Keeper": Keeper, "prepare": lambda **_: None, "read_invitation": lambda _: None}.items():
        monkeypatch.setattr(f"nbdist.cluster.hosts.joining.{name}", stand_in)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert join("file", 1, None) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.0.2") == "lo"
    assert interface_of("203.0.113.99") is None
    assert interface_of("no address") is None


@pytest.mark.skipif(not can_make_hosts(), reason="only root can add addresses, and only where the kernel allows it")
def test_the_interface_of_a_second_address_is_found():
    look = "from nbdist.cluster.hosts.interfaces import interface_of as of"
    add = "for n in $(seq 1 100); do ip address add 203.0.113.$n/32 dev lo label lo:$n; done"
    say = f"{look}; print(of('203.0.113.1'), of('203.0.113.99'), of('203.0.113.101'))"
    command = ["unshare", "-n", "sh", "-c", f'{add}; "$0" -c "$1"', sys.executable, say]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "lo lo None\n"
