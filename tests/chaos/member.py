"""A member of a world of plain scripts: it calls the others in several threads until the storm is over.

python -m chaos.member WORKLOAD NAME ID COUNT SEED
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from typing import Any

from helpers.processes import stacks

import nbdist
from chaos import phases, recorder, tasks
from chaos.calling import Caller
from chaos.calls import EXPECTED, Calls
from chaos.leaks import MUST_BE_NOTHING, wait_for_nothing
from chaos.ledger import Noted, Settled
from chaos.passes import Passes
from nbdist import rpc

WORKLOADS: dict[str, Any] = {"calls": Calls, "passes": Passes}


def main() -> None:
    """Take part in the storm, phase by phase."""
    workload, name, id, count, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    stacks.listen()
    recorder.ready()
    options = rpc.RpcBackendOptions(init_method=f"file://{recorder.folder() / 'store'}", rpc_timeout=30)
    rpc.init_rpc(name, rank=id, rpc_backend_options=options)
    others = [f"worker{number}" for number in range(count) if number != id]
    caller = Caller(name)
    works = [
        WORKLOADS[workload](caller, others, random.Random(f"{seed}/{name}/{thread}"))
        for thread in range(WORKLOADS[workload].THREADS)
    ]
    threads = [threading.Thread(target=_storm, args=(name, work)) for work in works]
    phases.arrive(name, os.getpid())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.write(Settled(name, os.getpid(), time.monotonic()))
    phases.mark(phases.SETTLE, name)
    phases.wait_for(phases.CHECK)
    _once_more(name, works[0])
    for work in works:
        work.let_go()
    phases.mark(phases.CHECK, name)
    phases.wait_for(phases.RELEASE)
    wait_for_nothing(name, lambda: tasks.left(MUST_BE_NOTHING))
    phases.mark(phases.RELEASE, name)
    phases.wait_for(phases.LEAVE)
    rpc.shutdown(timeout=30)


def _storm(name: str, work: Any) -> None:
    """Work until the storm is over; only the errors that a storm explains may come."""
    while not phases.has_come(phases.SETTLE):
        try:
            work.step()
        except AssertionError as error:
            recorder.write(Noted("wrong", name, str(error)[:500]))
        except (*EXPECTED, nbdist.RemoteError, nbdist.DecodeError, LookupError) as error:
            if not _is_expected(error):
                recorder.write(Noted("other error", name, traceback.format_exc()[-1500:]))
            time.sleep(0.05)
        except BaseException:
            recorder.write(Noted("other error", name, traceback.format_exc()[-1500:]))
            time.sleep(0.5)


def _is_expected(error: BaseException) -> bool:
    if isinstance(error, nbdist.DecodeError):  # shared memory could not be opened, as a strike filled the file table
        return "files open, its limit" in str(error)
    return isinstance(error, EXPECTED) or any(kind.__name__ in str(error) for kind in EXPECTED)


def _once_more(name: str, work: Any) -> None:
    try:
        work.once_more()
    except BaseException:
        recorder.write(Noted("failed afterwards", name, traceback.format_exc()[-1500:]))


if __name__ == "__main__":
    main()
