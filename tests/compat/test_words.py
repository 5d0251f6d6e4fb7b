"""Errors in torch's class and text, raised from nbdist's own. Each was provoked in torch 2.13 to see both."""

import pytest

WORLD = """
import sys, time, types
import torch
import nbdist.compat
nbdist.compat.install()
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from nbdist.testing import World

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        raise ValueError("simulated")

def fails(x):
    return Fails.apply(x).sum()

def told(use):
    try:
        use()
    except Exception as error:
        print("heard", f"{type(error).__name__}: {error}".splitlines()[0])
        print("heard from", type(error.__cause__).__name__)

world = World(2)
with world, world[0].activate():
"""

ROWS = {
    "an error inside of a backward pass, elsewhere": (
        """
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", fails, args=(torch.ones(2, requires_grad=True),))
        told(lambda: dist_autograd.backward(context_id, [loss]))
        """,
        ["RuntimeError: Error on Node 0: Error on Node 1: simulated", "from ValueError"],
    ),
    "an error inside of a backward pass, here": (
        """
    with dist_autograd.context() as context_id:
        loss = fails(torch.ones(2, requires_grad=True))
        told(lambda: dist_autograd.backward(context_id, [loss]))
        """,
        ["RuntimeError: Error on Node 0: simulated", "from ValueError"],
    ),
    "an error inside of an RRef's backward pass": (
        """
    with dist_autograd.context() as context_id:
        loss = rpc.remote("worker1", fails, args=(torch.ones(2, requires_grad=True),))
        told(lambda: loss.backward(context_id))
        """,
        ["RuntimeError: Error on Node 1: simulated", "from NoneType"],
    ),
    "rank 0.5 as a destination": (
        """
    for use in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        told(lambda: use(0.5, max, args=(1, 2)))
        """,
        ["ValueError: Cannot get WorkerInfo from name 0.5", "from UsageError"] * 3,
    ),
    "rank 0.5 as a worker's name": (
        """
    told(lambda: rpc.get_worker_info(0.5))
        """,
        ["TypeError: get_worker_info(): incompatible function arguments. Invoked with: 0.5", "from UsageError"],
    ),
    "a module that the callee lacks": (
        """
    lacking = types.ModuleType("lacking")
    exec("def run(): pass", vars(lacking))
    sys.modules["lacking"] = lacking
    from nbdist.wire.pickling import names
    resolve = names.resolve
    def elsewhere(name):
        del sys.modules["lacking"]
        return resolve(name)
    for use in (rpc.rpc_sync, lambda *call: rpc.rpc_async(*call).wait(), lambda *call: rpc.remote(*call).to_here()):
        sys.modules["lacking"], names.resolve = lacking, elsewhere
        told(lambda: use("worker1", lacking.run))
        """,
        ["RuntimeError: Error on Node 1: ModuleNotFoundError: No module named 'lacking'", "from DecodeError"] * 3,
    ),
    "an open file as an argument": (
        """
    with open(__import__("os").devnull) as file:
        for use in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            told(lambda: use("worker1", list, args=([file],)))
        for way in ("rpc_sync", "rpc_async", "remote"):
            told(lambda: getattr(rpc.remote("worker1", list), way)().append(file))
        """,
        ["TypeError: cannot pickle '_io.TextIOWrapper' object", "from EncodeError"] * 6,
    ),
    "other arguments that Python's pickler refuses": (
        """
    told(lambda: rpc.rpc_sync("worker1", list, args=((x for x in ()),)))
        """,
        ["TypeError: cannot pickle 'generator' object", "from EncodeError"],
    ),
    "an RRef after shutdown": (
        """
    kept, mine = rpc.remote("worker1", torch.ones, args=(2,)), rpc.RRef(1)
    kept.to_here()
    rpc.api._delete_all_user_and_unforked_owner_rrefs()
    told(lambda: kept.to_here())
    told(lambda: kept._serialize())
    world[0].close("has shut down")
    told(lambda: kept.to_here())
    told(lambda: kept.rpc_sync().sum())
    told(lambda: kept.remote().sum())
    told(lambda: mine.to_here())
    told(lambda: kept.local_value())
        """,
        [
            "RuntimeError: {user} has been deleted. Cannot call to_here() on it after deletion.",
            "from RRefError",
            "RuntimeError: {user} has been deleted. Cannot call fork an UserRRef after deletion.",
            "from RRefError",
            "RuntimeError: {user} has been deleted. Cannot call to_here() on it after deletion.",
            "from RRefError",
            *["RuntimeError: Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
              "`rpc.init_rpc`)?", "from RRefError"] * 3,
            "RRefError: For {user}, can't call localValue() on user WorkerInfo(id=0, name=worker0). "
            "Call it on owner WorkerInfo(id=1, name=worker1)",
            "from NoneType",
        ],
    ),
}  # fmt: skip
USER = "UserRRef(rref_id={0}0), fork_id={0}1))".format("GloballyUniqueId(created_on=0, local_id=")


@pytest.mark.parametrize("row", ROWS)
def test_an_error_has_torchs_class_and_text(lines, row):
    code, expected = ROWS[row]
    assert _heard(lines, code) == [line.format(user=USER) for line in expected]


def _heard(lines, code):
    """What ``told`` printed; what the workers echo stands between its lines."""
    printed = lines(WORLD + code.rstrip())
    return [line.removeprefix("heard ") for line in printed if line.startswith("heard ")]


def test_a_function_that_the_callees_module_lacks(lines):
    code = """
    import colorsys
    from nbdist.wire.pickling import names
    resolve = names.resolve
    def elsewhere(name):
        kept = vars(colorsys).pop("extra", None)
        try:
            return resolve(name)
        finally:
            colorsys.extra = kept
    names.resolve = elsewhere
    exec("def extra(): pass", vars(colorsys))
    try:
        rpc.rpc_sync("worker1", colorsys.extra)
    except RuntimeError as error:
        print(type(error).__name__, type(error.__cause__).__name__)
        print(str(error).split("<module")[0])
        print("Default RPC pickler does not serialize" in str(error), "callee modules." in str(error))
    """
    heard = lines(WORLD + code)[-4:]
    assert heard == [
        "RuntimeError DecodeError",
        "AttributeError: On WorkerInfo(id=1, name=worker1):",
        "AttributeError(\"Can't get attribute 'extra' on ",
        "True True",
    ]


LEAKS = """
    mine = rpc.RRef(1)
    with world[1].activate():
        theirs = rpc.rpc_sync("worker0", rpc.RRef, args=(2,))
    rpc.api._ignore_rref_leak = {ignore}
    told(lambda: rpc.api.shutdown(graceful=False))
    print("heard the end")
"""


@pytest.mark.parametrize(("ignore", "heard"), [(False, True), (True, False)])
def test_shutdown_tells_of_references_that_were_never_let_go(lines, ignore, heard):
    """torch lets go of all references in an orderly shutdown; whoever does not wait for that may leak."""
    fork = "GloballyUniqueId(created_on=0, local_id={})"
    leak = f"RuntimeError: Leaking RRef {fork.format(1)} with fork Id {fork.format(2)}"
    assert _heard(lines, LEAKS.format(ignore=ignore)) == [*([leak, "from RRefError"] if heard else []), "the end"]


def test_an_orderly_shutdown_lets_go_by_the_function_that_torch_names(lines):
    """torch's suite replaces it to see a leak."""
    code = """
    import torch, nbdist.compat
    nbdist.compat.install()
    import torch.distributed.rpc as rpc
    import threading
    from nbdist.testing import World
    rpc.api._ignore_rref_leak = False
    for replaced in (False, True):
        world = World(2)
        with world:
            with world[1].activate():
                theirs = rpc.rpc_sync("worker0", rpc.RRef, args=(2,))
            other = threading.Thread(target=world[1].ending.end, args=(20,))
            if replaced:
                world[1].ending.release = lambda: None
            other.start()
            try:
                with world[0].activate():
                    rpc.shutdown(timeout=20)
                print("no leak")
            except RuntimeError as error:
                print(str(error).split("Globally")[0], type(error.__cause__).__name__)
            other.join(20)
    """
    assert lines(code) == ["no leak", "Leaking RRef  RRefError"]
