"""Tests keep their sockets and their secret in a directory of their own, and leave none behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

_runtime = tempfile.mkdtemp(prefix="nbdist-tests-", dir="/tmp")
os.environ["NBDIST_RUNTIME_DIR"] = _runtime

# Whoever runs the tests in the background has them ignore Ctrl-C, and all that they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    shutil.rmtree(_runtime, ignore_errors=True)
