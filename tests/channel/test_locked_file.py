"""The lock of a file excludes others for as long as its holder means it to."""

import os
import signal

from nbdist.channel.locked_file import locked


def test_a_child_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    with locked(tmp_path / "lock", 1.0):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        with locked(tmp_path / "lock", 0.1):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
