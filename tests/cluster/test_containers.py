"""A cluster inside of a container's limits: little /dev/shm, no HOME, an odd user, files that cannot be written.

The limits are the kernel's own: a mount namespace and a control group, which only root can make.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ODD_USER = 54321
"""A user id that has no entry in /etc/passwd, as OpenShift and some JupyterHubs give."""

SCRIPT = """
import os, pathlib
import torch
import nbdist
from nbdist import rpc

def beyond(tensor):
    return float(tensor.sum())

with nbdist.Cluster(2) as cluster:
    cluster.execute("x = torch.full((2,), float(rank)); dist.all_reduce(x)")
    print(cluster.pull("x", "worker1").tolist())
    print(rpc.rpc_sync("worker1", beyond, args=(torch.ones(25_000_000),)))  # 100 MB, more than /dev/shm has
    print(rpc.rpc_sync("worker0", beyond, args=(rpc.rpc_sync("worker1", torch.ones, args=(25_000_000,)),)))
print("left", len(list(pathlib.Path(os.environ["NBDIST_RUNTIME_DIR"]).glob("run*"))))
"""


def contained(code, folder, *, group=""):
    """Run a script of Python in a container: its output, and its exit status.

    Its /dev/shm has 64 MB, all other files but those in the folder are read-only, and its user has no name, no home
    and no rights. ``group`` is a line of shell that joins a control group.
    """
    if os.getuid() != 0:
        pytest.skip("only root can make a mount namespace")
    work = Path(folder)
    os.chown(work, ODD_USER, ODD_USER)
    (work / "script.py").write_text(code)
    python = work / "python" / Path(sys.executable).resolve().relative_to(sys.base_prefix)  # root's may be out of reach
    setup = f"""
        set -e
        {group}
        mount --make-rprivate /
        mount -t tmpfs -o size=64m none /dev/shm
        mount --bind {work} {work}
        mkdir -p {work}/python
        mount --bind {shlex.quote(sys.base_prefix)} {work}/python
        mount -o remount,ro,bind /
        cd {work}
        exec setpriv --reuid {ODD_USER} --regid {ODD_USER} --clear-groups --no-new-privs --bounding-set=-all \
            env -i PATH=/usr/bin:/bin NBDIST_RUNTIME_DIR={work}/run TMPDIR={work} \
            PYTHONPATH={shlex.quote(os.pathsep.join(sys.path))} {python} {work}/script.py
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", setup], capture_output=True, text=True, timeout=150, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no container can be made here: {done.stderr}")
    return done


@pytest.fixture
def folder():
    """A folder whose path the odd user may go along."""
    with tempfile.TemporaryDirectory(prefix="nbdist-tests-") as made:
        yield made


def test_a_cluster_of_a_user_without_name_home_and_rights(folder):
    done = contained(SCRIPT, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["[1.0, 1.0]", "25000000.0", "25000000.0"]
    assert done.stdout.splitlines()[-1] == "left 0"
    assert not done.stderr


LIMITED = """
import os
import nbdist
from nbdist import rpc
from nbdist.channel import machine

def threads():
    import torch
    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

with nbdist.Cluster(1) as cluster:
    print(rpc.rpc_sync("worker0", threads), machine.limits())
"""


@contextlib.contextmanager
def control_groups(**values):
    """Make a control group of version 1 for each controller, with a limit: the lines of shell that join them."""
    made = []
    try:
        for controller, (name, value) in values.items():
            group = Path(f"/sys/fs/cgroup/{controller}/nbdist-test-{os.getpid()}")
            try:
                group.mkdir()
                made.append(group)
                (group / name).write_text(str(value))
            except OSError as error:
                pytest.skip(f"no control group of version 1 can be made here: {error}")
        yield "\n".join(f"echo $$ > {group}/cgroup.procs" for group in made)
    finally:
        for group in made:
            group.rmdir()


def test_threads_follow_the_limit_of_cores(folder):
    if os.cpu_count() < 2:
        pytest.skip("needs two cores")
    limits = {"cpu": ("cpu.cfs_quota_us", 100_000), "memory": ("memory.limit_in_bytes", 3 * 2**30)}
    with control_groups(**limits) as group:
        done = contained(LIMITED, folder, group=group)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"('1', 1) 1 of {os.cpu_count()} cores and 3.2 GB of ")
