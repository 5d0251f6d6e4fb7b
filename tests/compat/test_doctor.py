"""``python -m nbdist doctor``."""

import os
import re
import subprocess
import sys

from compat.processes import python


def examined(**environment):
    done = python("-m", "nbdist", "doctor", check=False, **environment)
    assert not done.stderr
    return done.returncode, {line[:18].strip(): line[18:].strip() for line in done.stdout.splitlines()}


def test_it_shows_what_there_is(tmp_path):
    code, found = examined(NBDIST_RUNTIME_DIR=str(tmp_path), NBDIST_SECRET_FILE="")
    assert code == 0
    assert found["runtime directory"] == str(tmp_path)
    assert found["torch"].startswith("2.")
    assert {found[name] for name in ("unix sockets", "CURVE", "memfd", "pidfd")} == {"yes"}
    assert "this host only" in found["secret"]
    assert "each agent shares up to" in found["shared memory"]
    assert found["open files"].startswith("at most ")
    assert re.match(r"free ones from \d+ to \d+; hosts of one cluster must reach", found["ports"])
    assert found["GPUs"]
    assert found["NCCL"]
    assert not any(name.startswith("agent") for name in found)


def test_what_is_wrong_is_said_below_its_line_with_the_remedy(tmp_path):
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 240; exec "$0" -m nbdist doctor', sys.executable],
        env={**os.environ, "NBDIST_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = lines.index("open files         at most 240 files")
    assert re.match(r" {19}\d+ of at most 240 files are open\. Raise the limit with ulimit -n 65536", lines[at + 1])


def test_it_shows_which_agents_run(tmp_path):
    code = f"""
import sys
from nbdist import rpc
options = rpc.RpcBackendOptions(init_method="file://{tmp_path}/store")
rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
print("ready", flush=True)
sys.stdin.read()
rpc.shutdown()
"""
    environment = {"NBDIST_RUNTIME_DIR": str(tmp_path / "run")}
    agent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert agent.stdout.readline() == "ready\n"
        _, found = examined(**environment)
        assert sys.executable in found[f"agent of {agent.pid}"]
        agent.kill()
        agent.wait(30)
        _, found = examined(**environment)
        assert "died" in found[f"agent of {agent.pid}"]
    finally:
        agent.kill()
        agent.communicate()


def test_what_keeps_agents_from_working_is_said(tmp_path):
    deep = tmp_path / ("x" * 100)
    code, found = examined(NBDIST_RUNTIME_DIR=str(deep))
    assert code == 1
    assert "NBDIST_RUNTIME_DIR" in found["runtime directory"]
    code, found = examined(NBDIST_RUNTIME_DIR=str(tmp_path), NBDIST_SECRET_FILE=str(tmp_path / "none"))
    assert code == 1
    assert "NBDIST_SECRET_FILE" in found["secret"]
