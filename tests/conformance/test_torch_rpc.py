"""torch's own tests of RPC, unmodified, out of the installed wheel, on nbdist."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def names(file):
    lines = (line.partition("#")[0].strip() for line in (HERE / file).read_text().splitlines())
    return [line for line in lines if line]


class Zygote:
    """The process that runs torch's tests."""

    def __init__(self, log):
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.suites = self.answer()["ready"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the process that runs torch's tests has ended:\n{self.log.read_text()}")
        return json.loads(line)

    def run(self, test, output):
        self.process.stdin.write(json.dumps({"test": test, "output": str(output)}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    process = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield process
    process.close()


@pytest.mark.parametrize("name", names("torch_rpc.txt"))
def test_suite(zygote, tmp_path, name):
    output = tmp_path / "output"
    answer = zygote.run(name, output)
    if answer["problem"]:
        summary = f"{name} {answer['problem']} after {answer['seconds']} s"
        pytest.fail(f"{summary}\n{output.read_text()}", pytrace=False)
