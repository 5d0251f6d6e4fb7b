"""Functions and classes that only the caller's ``__main__`` has, as a notebook's: what comes back is what went."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

HERE = os.path.dirname(__file__)

WORKER = """
import sys
from nbdist import rpc
exec(sys.argv[2])
rpc.init_rpc("worker1", rank=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
sys.stdin.read()
"""

CALLER = """
import abc, dataclasses, enum, functools, gc, json, sys, time, weakref
import torch
import nbdist.rpc.api
from nbdist import rpc
facts = {}
exec(sys.argv[2])
rpc.init_rpc("worker0", rank=0, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
while "worker1" not in [member.name for member in rpc.api.current_agent().members()]:
    time.sleep(0.01)
def call(function, *args):
    return rpc.rpc_sync("worker1", function, args=args)
def ident(x):
    return x
{program}
rpc.shutdown()
print(json.dumps(facts))
"""


def run(tmp_path, program, both=""):
    """Run a program on worker0; return its ``facts``. Worker1 has the definitions ``both``, and no others."""
    path = tmp_path / "caller.py"
    path.write_text(CALLER.replace("{program}", textwrap.dedent(program)))
    (tmp_path / "worker.py").write_text(WORKER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [f"file://{tmp_path}/store", textwrap.dedent(both)]
    command = [sys.executable, str(tmp_path / "worker.py"), *arguments]
    worker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    try:
        done = subprocess.run(
            [sys.executable, str(path), *arguments], env=environment, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        worker.kill()
        worker.communicate()


def test_a_class_that_comes_back_is_the_callers_own_as_it_was(tmp_path):
    facts = run(
        tmp_path,
        """
        LOG, SCALE = [], 1.0

        class Base:
            registry = {}
            def __init_subclass__(cls):
                Base.registry[cls.__name__] = cls

        class Item(Base):
            made = 0
            hits = []
            def __init__(self):
                Item.made += 1
            def log(self):
                LOG.append(SCALE)

        class Failed(Exception):
            def scale(self):
                return SCALE

        def fail():
            raise Failed("x")

        item, hits = Item(), Item.hits
        future = rpc.rpc_async("worker1", ident, args=(item,))
        for _ in range(5):
            Item()
        back = future.wait()
        facts["type"] = type(back) is Item
        facts["made"] = Item.made
        facts["hits"] = Item.hits is hits
        facts["registry"] = Base.registry["Item"] is Item
        try:
            call(fail)
        except Failed as error:
            SCALE = 10.0
            facts["scale"] = error.scale()
        Item().log()
        facts["log"] = LOG
        """,
    )
    assert facts == {"type": True, "made": 6, "hits": True, "registry": True, "scale": 10.0, "log": [10.0]}


def test_the_state_of_a_class_stays_on_a_worker_and_its_code_is_the_latest(tmp_path):
    facts = run(
        tmp_path,
        """
        SCALE = 1
        class Server:
            store = {}
            @classmethod
            def put(cls, key, value):
                cls.store[key] = value * SCALE
                return dict(cls.store)
        facts["first"] = call(Server.put, "a", 1)
        SCALE = 10
        facts["second"] = call(Server.put, "b", 1)
        facts["here"] = Server.store
        Server.store = 5
        Server.put = classmethod(lambda cls: cls.store)
        facts["changed"] = call(Server.put)
        """,
    )
    assert facts == {"first": {"a": 1}, "second": {"a": 1, "b": 10}, "here": {}, "changed": 5}


def test_what_the_caller_changes_in_a_class_reaches_the_worker(tmp_path):
    facts = run(
        tmp_path,
        """
        SCALE = 1
        class timed:
            def __init__(self, function): self.function = function
            def __get__(self, obj, cls): return functools.partial(self.function, obj)
        def other(self):
            return "other"
        class Shape(abc.ABC):
            pass
        class Config:
            sizes = [64]
            options = {"lr": 0.1}
            mean = torch.zeros(1)
            weight = torch.nn.Parameter(torch.ones(1))
            seen = []
            @timed
            def scale(self):
                return SCALE
            def all(self):
                self.seen.append(1)
                return [self.sizes, self.options["lr"], float(self.mean), float(self.weight), self.scale(), self.seen]
        class Circle:
            pass
        def is_shape(shape):
            return isinstance(Circle(), shape)
        def look(config):
            return config.all()
        facts["before"] = [call(look, Config()), call(is_shape, Shape)]
        Config.sizes, SCALE = [128], 10
        Config.options["lr"] = 0.5
        Config.mean = torch.ones(1)
        Config.weight.data += 4
        Shape.register(Circle)
        facts["after"] = [call(look, Config()), call(is_shape, Shape)]
        Config.scale = timed(other)
        facts["last"] = call(look, Config())[-2:]
        """,
    )
    assert facts["before"] == [[[64], 0.1, 0.0, 1.0, 1, [1]], False]
    assert facts["after"] == [[[128], 0.5, 1.0, 5.0, 10, [1, 1]], True]
    assert facts["last"] == ["other", [1, 1, 1]]


def test_a_local_class_and_one_with_a_class_in_it_keep_their_state(tmp_path):
    facts = run(
        tmp_path,
        """
        def make():
            class Server:
                store = []
                def put(self): self.store.append(1); return len(self.store)
            return Server
        class Outer:
            class Options:
                store = []
            def put(self): self.Options.store.append(1); return len(self.Options.store)
        Local, other = make(), make()
        facts["puts"] = []
        for _ in range(3):
            facts["puts"].append([call(each.put, each()) for each in (Local, other, Outer)])
            call(gc.collect)
        """,
    )
    assert facts == {"puts": [[1, 1, 1], [2, 2, 2], [3, 3, 3]]}


def test_a_class_that_was_defined_again_and_again_is_not_kept(tmp_path):
    facts = run(
        tmp_path,
        """
        def live(): return sum(isinstance(each, type) and each.__name__ == "Server" for each in gc.get_objects())
        for number in range(20):
            class Server:
                def put(self): return 1
            call(Server.put, Server())
        call(gc.collect)
        facts["live"] = call(live)
        """,
    )
    assert 1 <= facts["live"] <= 5


def test_a_function_that_a_worker_has_changed_comes_back_changed(tmp_path):
    facts = run(
        tmp_path,
        """
        def train():
            train.loss = 3
            return train
        def changed(f):
            f.__defaults__ = (5,)
            return f
        def number(x=1):
            return x
        facts["results"] = [call(train).loss, call(changed, number)(), number(), call(ident, number) is number]
        """,
    )
    assert facts == {"results": [3, 5, 1, True]}


def test_a_function_that_a_worker_calls_back_is_the_callers_own(tmp_path):
    facts = run(
        tmp_path,
        """
        log, best = [], 0
        def record(x):
            global best
            log.append(x)
            best = max(best, x)
            return len(log)
        @functools.cache
        def remembered(x):
            log.append(-x)
            return x
        def train(steps):
            made = [rpc.rpc_sync("worker0", record, args=(i,)) for i in range(steps)]
            return made, [rpc.rpc_sync("worker0", remembered, args=(7,)) for _ in range(2)]
        facts["results"] = call(train, 3)
        facts["log"], facts["best"] = log, best
        """,
    )
    assert facts == {"results": [[1, 2, 3], [7, 7]], "log": [0, 1, 2, -7], "best": 2}


BOTH = """
import enum, functools, torch, dataclasses

class C:
    def f(self): return 1
class Mode(enum.Enum):
    A, B = 1, 2
class K:
    act = torch.relu
    @functools.cached_property
    def v(self): return "old"
    @functools.lru_cache
    def w(self): return "old"
    step = functools.partialmethod(lambda self, k: k, 1)
@dataclasses.dataclass
class D:
    x: object = dataclasses.field(default_factory=list)
@functools.lru_cache
def fib(n): return "old"
def scale(dtype=torch.float32): return str(dtype)
def apply(op=torch.add): return op.__name__
def use(c): return c.f()
def make(): return C()
def run(k): return [k.act.__name__, k.v, k.w(), k.step()]
def name_of(m): return m.name
"""


def test_a_definition_that_differs_in_what_is_no_bytecode_is_another_one(tmp_path):
    facts = run(
        tmp_path,
        """
        facts["old"] = [call(name_of, Mode.A), call(run, K()), call(fib, 1), call(scale), call(apply)]
        class Mode(enum.Enum):
            A, B = 2, 1
        class K:
            act = torch.tanh
            @functools.cached_property
            def v(self): return "new"
            @functools.lru_cache
            def w(self): return "new"
            step = functools.partialmethod(lambda self, k: k, 2)
        @dataclasses.dataclass
        class D:
            x: object = dataclasses.field(default_factory=dict)
        @functools.lru_cache
        def fib(n): return "new"
        @functools.lru_cache
        def only_here(n): return fib(n)
        def scale(dtype=torch.float64): return str(dtype)
        def apply(op=torch.mul): return op.__name__
        def make_d(): return D().x
        facts["new"] = [call(name_of, Mode.A), call(run, K()), call(fib, 1), call(scale), call(apply)]
        facts["more"] = [call(make_d), call(only_here, 1), call(lambda: only_here(1))]
        """,
        BOTH,
    )
    assert facts["old"] == ["A", ["relu", "old", "old", 1], "old", "torch.float32", "add"]
    assert facts["new"] == ["A", ["tanh", "new", "new", 2], "new", "torch.float64", "mul"]
    assert facts["more"] == [{}, "new", "new"]


def test_a_result_of_a_class_that_was_replaced_here_arrives(tmp_path):
    facts = run(
        tmp_path,
        """
        held = rpc.remote("worker1", make)
        held.to_here()
        facts["before"] = call(use, C())
        class C:
            def f(self): return 2
        facts["made"] = [call(make).f(), call(make).f(), held.to_here().f()]
        """,
        BOTH,
    )
    assert facts == {"before": 1, "made": [1, 1, 1]}


@pytest.mark.parametrize("kind", ["dataclass", "plain"])
def test_instances_with_slots_come_back(tmp_path, kind):
    facts = run(
        tmp_path,
        f"""
        if {kind!r} == "dataclass":
            @dataclasses.dataclass(slots=True)
            class Slotted:
                x: int = 1
        else:
            class Slotted:
                __slots__ = ("x",)
                def __init__(self, x):
                    self.x = x
        back = call(ident, Slotted(3))
        facts["x"], facts["type"] = back.x, type(back) is Slotted
        """,
    )
    assert facts == {"x": 3, "type": True}


def test_an_error_with_a_cause_keeps_no_frame_alive(tmp_path):
    facts = run(
        tmp_path,
        """
        def fail():
            import builtins, torch, weakref
            large = torch.ones(10)
            builtins.known = weakref.ref(large)
            try:
                {}[large.sum()]
            except KeyError as error:
                raise ValueError("x") from error
        def look():
            import builtins, gc
            gc.collect()
            return builtins.known() is None
        rref = rpc.remote("worker1", fail)
        try:
            rref.to_here()
        except ValueError:
            pass
        facts["freed"] = call(look)
        """,
    )
    assert facts == {"freed": True}
