import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from compat.processes import ENVIRONMENT


@pytest.fixture(scope="module")
def forks():
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forks.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    yield process
    process.communicate(timeout=30)


@pytest.fixture
def lines(forks):
    """Runs code in a process of its own, in which torch but not compat is loaded; the lines that it prints."""

    def run(code):
        forks.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        forks.stdin.flush()
        output, status = json.loads(forks.stdout.readline())
        assert status == 0, output
        return output.splitlines()

    return run
