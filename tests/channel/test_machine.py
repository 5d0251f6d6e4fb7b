"""How many cores and how much memory a process may use, on machines and in containers of several kinds."""

import importlib.util
import os
import subprocess
import sys

import pytest

import nbdist.channel.machine

GB = 10**9


@pytest.fixture
def machine():
    """Load the module anew: it reads some files once in a process."""
    spec = importlib.util.spec_from_file_location("fresh_machine", nbdist.channel.machine.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path, monkeypatch, machine):
    """Write the control groups of a machine that has 64 cores and 100 GB; the process may run on all cores."""
    pages = {"SC_PAGE_SIZE": 4000, "SC_PHYS_PAGES": 100 * GB // 4000}
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def write(texts):
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_a_machine_without_control_groups(machine, files):
    assert (machine.cores(), machine.memory(), machine.limits()) == (64, 100 * GB, "")
    assert machine.available_memory() == 100 * GB


def test_a_container_of_version_2(machine, files):
    files(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {50 * GB // 1024} kB\n",
            "groups/memory.max": f"{4 * GB}\n",
            "groups/memory.current": f"{3 * GB}\n",
            "groups/memory.stat": f"anon 5\ninactive_file {2 * GB}\n",
            "groups/cpu.max": "250000 100000\n",
        }
    )
    assert machine.cores() == 2
    assert machine.memory() == 4 * GB
    assert machine.available_memory() == 3 * GB, "files that were read are dropped before a process is killed"
    assert machine.limits() == "2 of 64 cores and 4.0 GB of 100 GB of memory"


def test_the_lowest_limit_of_all_groups_counts(machine, files):
    files(
        {
            "proc/self/cgroup": "0::/user.slice/session/job\n",
            "groups/memory.stat": "",
            "groups/user.slice/memory.max": f"{8 * GB}\n",
            "groups/user.slice/memory.current": f"{7 * GB}\n",
            "groups/user.slice/cpu.max": "max 100000\n",
            "groups/user.slice/session/memory.max": "max\n",
            "groups/user.slice/session/job/memory.max": f"{6 * GB}\n",
            "groups/user.slice/session/job/memory.current": f"{2 * GB}\n",
            "groups/user.slice/session/job/cpu.max": "50000 100000\n",
        }
    )
    assert machine.memory() == 6 * GB
    assert machine.available_memory() == 1 * GB, "the outer group is nearly full"
    assert machine.cores() == 1, "half a core is one thread"


@pytest.mark.parametrize("inside", ["", "docker/0123/"])
@pytest.mark.parametrize("together", ["cpu", "cpu,cpuacct"])
def test_version_1(machine, files, inside, together):
    """In a container the folder of the group's name is often missing, and the top is the group's own."""
    files(
        {
            "proc/self/cgroup": f"9:memory:/docker/0123\n4:{together}:/docker/0123\n0::/\n",
            f"groups/memory/{inside}memory.limit_in_bytes": f"{2 * GB}\n",
            f"groups/memory/{inside}memory.usage_in_bytes": f"{GB}\n",
            f"groups/memory/{inside}memory.stat": "total_inactive_file 0\n",
            f"groups/{together}/{inside}cpu.cfs_quota_us": "300000\n",
            f"groups/{together}/{inside}cpu.cfs_period_us": "100000\n",
        }
    )
    assert machine.memory() == 2 * GB
    assert machine.available_memory() == GB
    assert machine.cores() == 3
    assert machine.limits() == "3 of 64 cores and 2.0 GB of 100 GB of memory"


def test_version_1_without_limits(machine, files):
    files(
        {
            "proc/self/cgroup": "9:memory:/\n4:cpu:/\n",
            "groups/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "groups/cpu/cpu.cfs_quota_us": "-1\n",
            "groups/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert (machine.cores(), machine.memory(), machine.limits()) == (64, 100 * GB, "")


@pytest.mark.parametrize("text", ["", "nonsense", "0::/../other\n", "0::/is/not/there\n"])
def test_groups_that_cannot_be_read_set_no_limit(machine, files, text):
    files({"proc/self/cgroup": text, "groups/cpu.max": "nonsense", "groups/memory.max": ""})
    assert (machine.cores(), machine.memory(), machine.limits()) == (64, 100 * GB, "")


def test_the_cores_that_a_process_may_run_on():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from nbdist.channel import machine; "
    code += "print(machine.cores(), machine.limits())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    number, _, words = done.stdout.strip().partition(" ")
    assert number == "1"
    assert os.cpu_count() == 1 or words.startswith(f"1 of {os.cpu_count()} cores")
