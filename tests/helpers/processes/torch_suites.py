"""The process that runs torch's own test suites on nbdist: `conformance/zygote.py`, and how tests talk to it."""

import json
import os
import subprocess
import sys

import pytest

from helpers.suite.python_path import TESTS, python_path


class Zygote:
    """Runs one case after the other; its standard error goes to the file ``log``."""

    def __init__(self, log):
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "conformance" / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **python_path(TESTS)},
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
