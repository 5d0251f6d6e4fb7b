"""How many Python functions a call costs on its two sides, and how many messages: the same in every run.

Time on a small machine varies by two and more between runs of the same code; these counts do not. They are taken on
agents that ship, over the in-process channel, in one thread (see `stepping`), so without what threads and sockets
add. A change that raises a count fails here. One that lowers a count lowers the number below as well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.suite.python_path import TESTS, python_path

from nbdist.wire import quick

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or not torch.__version__.startswith("2.13.") or not quick.USUAL_IS_ON,
    reason="the counts are those of the short way on Python 3.11 and torch 2.13, whose own functions count too",
)

EXPECTED = {
    # case: calls of functions by the caller and by all others, messages
    "empty": (35, 30, 2),
    "empty, of __main__": (43, 36, 2),
    "empty, from a cell": (35, 34, 2),
    "small tensor": (38, 33, 2),
    "remote().to_here()": (110, 112, 4),
    "step": (277, 321, 7),
    "ten hops, SMART": (1439, 1365, 43),
    "ten hops, FAST": (1483, 1411, 43),
}


@pytest.fixture(scope="module")
def counted():
    script = Path(__file__).with_name("counting.py")
    environment = {**os.environ, **python_path(TESTS)}
    found = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, check=True, timeout=240)
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", EXPECTED)
def test_what_a_call_costs(counted, case):
    counts, messages = counted[case]
    assert len(set(map(tuple, counts))) == 1, f"it is not the same in each run: {counts}"
    assert (*counts[0], messages) == EXPECTED[case]
