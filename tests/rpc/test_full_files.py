"""Members whose file table is full for a while: nobody is given up for it, and all of them come back."""

import os
import tempfile
import threading
import time

from helpers.processes import file_table, workers

import nbdist
from nbdist import rpc
from nbdist.rpc.api import current_agent


def test_a_member_that_joins_while_the_file_table_is_full_can_be_called_afterwards(tmp_path, caplog):
    store = tempfile.mktemp(prefix="nbdist-test-")
    go = tmp_path / "go"
    others = workers.Workers()
    rpc.init_rpc("worker0", rank=0, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}"))
    try:
        # The agent's connection to itself takes a file, in another thread and perhaps late: a call waits for it.
        rpc.rpc_sync("worker0", workers.name)
        begin = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
        others.start("late", workers.member("late", 1, None, store, first=begin, then="workers.released.wait(60)"))
        agent, knocked = current_agent(), threading.Event()
        on_stranger = agent.handshake.on_stranger

        def note(message):
            try:
                on_stranger(message)
            finally:
                knocked.set()

        agent.handshake.on_stranger = note
        with file_table.full(room=1) as one_more:  # for the connection that the newcomer makes; none for the way back
            os.mkdir(go)  # takes no file
            deadline = time.monotonic() + 60
            while not knocked.wait(1):
                assert time.monotonic() < deadline
                if "cannot accept a connection" in caplog.text:
                    # A thread that an earlier test of this process left took the room before the newcomer came.
                    caplog.clear()
                    one_more()
            members = {record.incarnation for record in agent.membership.members()}
            assert members <= agent.links.connections.keys(), "a member has no connection"
        deadline = time.monotonic() + 30
        while True:
            try:
                assert rpc.rpc_sync("late", workers.name) == "late"
                break
            except (nbdist.UnknownWorker, nbdist.WorkerLost):
                assert time.monotonic() < deadline, "the newcomer cannot be called"
                time.sleep(0.05)
        assert rpc.rpc_sync("late", workers.call_there, args=("worker0", workers.name)) == "worker0"
        rpc.rpc_sync("late", workers.release)
        others.output("late")
    finally:
        rpc.shutdown(graceful=False)
        others.end()
