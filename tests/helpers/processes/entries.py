"""What the worker processes of tests/cluster do."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def tell(path: str, word: str) -> None:
    """Say where, who and what one is."""
    facts = {
        "word": word,
        "pid": os.getpid(),
        "session": os.getsid(0),
        "variable": os.environ.get("NBDIST_TEST_VARIABLE"),
        "directory": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "random": random.random(),
        "interruptible": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "stdin": sys.stdin.read(),
        "preloaded": "fractions" in sys.modules,
        "collects": gc.isenabled(),
        "frozen": gc.get_freeze_count() > 1000,
    }
    draft = Path(path + ".new")
    draft.write_text(json.dumps(facts))
    draft.rename(path)
    print("told", flush=True)
    print("and complained", file=sys.stderr)


def sleep(path: str = "") -> None:
    """Be idle."""
    if path:
        Path(path).touch()
    time.sleep(600)


def hold_the_gil(path: str = "") -> None:
    """Be in a C call that lets nobody run."""
    if path:
        Path(path).touch()
    ctypes.PyDLL(None).sleep(600)


def with_children(path: str) -> None:
    """Have a child of one's own, and one that has left for another session."""
    child = subprocess.Popen(["sleep", "601"])
    stray = subprocess.Popen(["sleep", "602"], start_new_session=True)
    draft = Path(path + ".new")
    draft.write_text(f"{child.pid} {stray.pid}")
    draft.rename(path)
    while True:  # Python handles a signal that comes just before a sleep begins only after that sleep
        time.sleep(0.1)


def ignore_signals(path: str) -> None:
    """Give way to nothing that can be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(path).touch()
    time.sleep(600)


def leave(code: str) -> None:
    """Exit with a code."""
    sys.exit(int(code))


def crash(number: str) -> None:
    """End by a signal."""
    os.kill(os.getpid(), int(number))
    time.sleep(600)


def fail() -> None:
    """Raise."""
    raise ValueError("nothing works")


def start_a_thread() -> None:
    """Make this process one that must not be forked."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
