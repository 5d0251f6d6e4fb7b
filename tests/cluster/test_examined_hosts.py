"""The doctor between hosts: a slow line, a closed port, and ``python -m nbdist doctor --connect`` on another host."""

from __future__ import annotations

import subprocess
import threading

import pytest
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.waiting import wait_for_file

import nbdist

pytestmark = pytest.mark.skipif(
    not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A cluster of a worker on each of three hosts, and the hosts. A fourth host has no worker."""
    file = tmp_path_factory.mktemp("hosts") / "invitation.json"
    with hosts(4) as (address, others):

        def start() -> None:
            text = wait_for_file(file)
            for other in others[:3]:
                other.start("-m", "nbdist", "worker", "--connect", "-", stdin=text)

        threading.Thread(target=start, daemon=True).start()
        options = {"launcher": "join", "host": address, "invitation": str(file), "backend": "none"}
        with nbdist.Cluster(3, **options) as cluster:
            yield cluster, others


def about_links(found):
    return [each for each in found.findings if each.topic == "links"]


def doctor(cluster, other, folder) -> tuple[int, dict[str, str]]:
    """Run the doctor on a host, with a new invitation; return its exit status, and its lines by their names."""
    file = folder / "doctor.json"
    cluster.invite(str(file))
    process = other.start("-m", "nbdist", "doctor", "--connect", "-", stdin=file.read_bytes(), stdout=subprocess.PIPE)
    lines = process.stdout.read().decode().splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        name = line[:18].strip() or name
        found[name] = f"{found.get(name, '')}\n{line[19:]}".strip()
    return process.wait(60), found


def test_nothing_is_wrong_at_first(running):
    cluster, _ = running
    found = cluster.examine()
    assert len({each.place for each in found.members}) == 4
    assert len(found.links) == 12
    assert [each for each in found.findings if each.topic in ("members", "links", "clocks", "versions")] == []


def test_the_doctor_on_another_host_tries_the_way_in_both_directions(running, tmp_path):
    cluster, others = running
    code, found = doctor(cluster, others[3], tmp_path)
    assert code == 0, found
    assert found["this host"].startswith(f"{others[3].address}, interface {others[3].interface}")
    assert found["latency"].endswith("there and back")
    assert found["bandwidth"].count("B/s") == 2
    assert found["other ports"] == "reached, from both sides"
    assert found["the notebook"].endswith("a worker may join")


def test_the_doctor_on_another_host_finds_closed_ports(running, tmp_path):
    """Port by port, as a firewall closes them: connections to the entrance pass, others are refused or dropped."""
    cluster, others = running
    other = others[3]
    rule = ("ip", "netns", "exec", other.name, "ip", "route", "add", "blackhole", "10.199.199.0/24")
    assert subprocess.run(rule).returncode == 0
    hub = cluster.lifecycle.launcher.hub
    real = hub.agent.me.addresses[:]
    try:
        hub.agent.me.addresses[:] = ["tcp://10.199.199.1:40000"]
        code, found = doctor(cluster, other, tmp_path)
    finally:
        hub.agent.me.addresses[:] = real
    assert code == 0
    told = found["other ports"].splitlines()
    assert told[0] == "not reached:"
    assert told[1].startswith("this host does not reach 10.199.199.1:40000: ")
    assert "Open all TCP ports between the two hosts" in told[1]
    assert len(told) == 2


def test_a_host_on_a_slow_line_is_found(running, tmp_path):
    cluster, others = running
    others[1].slow_down("4mbit")
    found = cluster.examine()
    slow = about_links(found)
    assert slow, found
    (name,) = set.intersection(*(set(each.about.split(" → ")) for each in slow))
    assert name.startswith("worker")
    assert all("a slow line" in each.remedy for each in slow)
    assert any("B/s elsewhere" in each.problem for each in slow)
    others[3].slow_down("4mbit")
    code, told = doctor(cluster, others[3], tmp_path)
    assert code == 0
    there, back = (part.split()[1] for part in told["bandwidth"].split(", "))
    assert {there, back} == {"KB/s"}


def test_a_host_that_is_cut_off_fails_its_ways_within_bounds(running):
    """The notebook has not noticed yet: the host is suspect after 5 s, and lost after 12 s."""
    cluster, others = running
    others[0].cut()
    found = cluster.examine()
    others[0].mend()
    told = [each for each in found.findings if each.topic in ("members", "links")]
    assert any("does not answer: no answer within 3 s" in each.problem for each in told)
