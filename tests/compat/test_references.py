"""References in the messages of torch's reducers: one fork for each message that arrives, and no other."""

import pytest
from compat.processes import python

WORLD = """
import gc, io, pickle, time
import torch
import nbdist.compat
nbdist.compat.install()
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from nbdist.testing import World

def forward(module, x):
    return module.forward(x)

def hand_on(module):
    return module

def nothing_is_left(world):
    "Wait until no living agent has forks, children that have not accepted, or values; print what is left after 10 s."
    def left():
        gc.collect()
        found = {}
        for agent in [agent for agent in world if not agent.closed]:
            references, forks = agent.references, agent.references.forks
            counts = (len(forks.users), forks.forks, forks.pending, len(references._values))
            if any(counts):
                found[agent.me.name] = counts
        return found
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(left())

x = torch.ones(1, 2)
world = World(3)
with world, world[0].activate():
    module = RemoteModule("worker2", torch.nn.Linear, args=(2, 2))
"""
END = """
    del module
    nothing_is_left(world)
"""

MESSAGES = {
    "a call of a function of __main__, encoded by name and by value": """
    assert rpc.rpc_sync("worker1", forward, args=(module, x)).shape == (1, 2)
    """,
    "many calls at once": """
    futures = [rpc.rpc_async("worker1", forward, args=(module, x)) for _ in range(20)]
    assert len({future.wait().shape for future in futures}) == 1
    del futures
    """,
    "a call whose function the callee is known to lack": """
    exec("def unknown(module, x): return module.forward(x)", here := {"__name__": "__main__"})
    unknown = here["unknown"]
    for _ in range(2):
        assert rpc.rpc_sync("worker1", unknown, args=(module, x)).shape == (1, 2)
    """,
    "a reply": """
    back = rpc.rpc_sync("worker1", hand_on, args=(module,))
    assert back.forward(x).shape == (1, 2)
    del back
    """,
    "a call that fails to encode": """
    for _ in range(3):
        try:
            rpc.rpc_sync("worker1", forward, args=(module, (x for _ in ())))
        except (TypeError, RuntimeError) as error:
            assert "generator" in str(error)
    """,
    "a reply that fails to encode": """
    def spoiled(module):
        return [module, (i for i in ())]
    try:
        rpc.rpc_sync("worker1", spoiled, args=(module,))
    except (TypeError, RuntimeError) as error:
        assert "generator" in str(error)
    """,
    "a call that is never sent": """
    world[1].close("has had enough")
    for _ in range(3):
        try:
            rpc.rpc_sync("worker1", forward, args=(module, x))
        except RuntimeError as error:
            assert "worker1" in str(error)
    """,
    "a call whose second encoding Ctrl-C ends": """
    class Interrupting:
        encoded = 0
        def __reduce__(self):
            Interrupting.encoded += 1
            if Interrupting.encoded == 2:
                raise KeyboardInterrupt
            return int, ()
    try:
        rpc.rpc_sync("worker1", forward, args=(module.module_rref, Interrupting()))
    except KeyboardInterrupt:
        pass
    assert Interrupting.encoded == 2
    """,
    "a call to a worker that dies before it reads": """
    kept = module.module_rref._serialize()
    del kept
    future = rpc.rpc_async("worker1", time.sleep, args=(30,))
    late = rpc.rpc_async("worker1", forward, args=(module, x))
    world[1].close("has had enough")
    for call in (future, late):
        try:
            call.wait()
        except RuntimeError:
            pass
    del future, late, call
    """,
    "a class of the program's own that serializes its reference": """
    class Holder:
        def __init__(self, rref):
            self.rref = rref
        def __reduce__(self):
            return rpc.PyRRef._deserialize, (self.rref._serialize(),)
    assert rpc.rpc_sync("worker1", rpc.RRef.owner_name, args=(Holder(module.module_rref),)) == "worker2"
    """,
    "a pickle that comes back": """
    data = pickle.dumps(module.module_rref._serialize())
    copy = rpc.PyRRef._deserialize(pickle.loads(data))
    assert copy.owner_name() == "worker2"
    del copy
    """,
}


@pytest.mark.parametrize("message", MESSAGES, ids=[*MESSAGES])
def test_no_fork_is_left_after(lines, message):
    assert lines(WORLD + MESSAGES[message].rstrip() + END)[-1] == "{}"


def test_a_serialized_reference_is_rebuilt_once(lines):
    code = """
    data = module.module_rref._serialize()
    rpc.PyRRef._deserialize(data)
    try:
        rpc.PyRRef._deserialize(data)
    except RuntimeError as error:
        print(type(error).__name__, "serialize the RRef again" in str(error))
    """
    assert lines(WORLD + code) == ["RRefError True"]


PROGRAM = """
import sys
import torch
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule

def train(module, epochs):
    return [module.forward(torch.ones(1, 2)).shape[1] for _ in range(epochs)]

def work(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        module = RemoteModule("worker2", torch.nn.Linear, args=(2, 3))
        futures = [rpc.rpc_async(f"worker{trainer}", train, args=(module, 3)) for trainer in (1, 2)]
        print([future.wait() for future in futures], flush=True)
    rpc.shutdown(timeout=30)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=3)
"""


def test_a_world_ends_after_remote_modules_went_to_functions_of_main(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python("-m", "nbdist", "run", tmp_path / "program.py", tmp_path / "store")
    assert done.stdout == "[[3, 3, 3], [3, 3, 3]]\n"
