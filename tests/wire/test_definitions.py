"""Functions and classes of __main__: by name where the other side has the same, else by value."""

import gc
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from helpers.processes.mains import CHANGES, FUNCTIONS, Main, run, send

from nbdist import EncodeError, MissingDefinition
from nbdist.wire import codec
from nbdist.wire.pickling import definitions

# --- scripts that every rank runs -----------------------------------------------------------------

SCRIPT = """
    import threading

    calls = []
    lock = threading.Lock()

    def function(x, by=1):
        with lock:
            calls.append(x)
        return x + by

    class Base:
        rate = 0.1

        def __init__(self, x):
            self.x = x

        def add(self, y):
            return self.x + y

        @staticmethod
        def static(x):
            return -x

        @classmethod
        def make(cls, x):
            return cls(x)

        class Inner:
            def hi(self):
                return "hi"

    class Child(Base):
        def add(self, y):
            return super().add(y) * 2
"""


@pytest.fixture
def twins():
    return Main(SCRIPT), Main(SCRIPT)


@pytest.mark.parametrize("name", ["function", "Base", "Child", "Base.Inner"])
def test_the_same_code_goes_by_name(twins, name):
    sender, receiver = twins
    with sender.active():
        sent = definitions.find_named(name)
    received, again = send(sent, sender, receiver)
    assert not again
    with receiver.active():
        assert received is definitions.find_named(name)
    assert received is not sent


def test_locks_and_globals_stay_the_receivers_own(twins):
    sender, receiver = twins
    received, _ = send(sender.function, sender, receiver)
    assert run(receiver, received, 1) == 2
    assert receiver.calls == [1]
    assert sender.calls == []


def test_objects_arrive_as_the_receivers_own_class(twins):
    sender, receiver = twins
    received, again = send([sender.Child(3), sender.Base.Inner()], sender, receiver)
    assert not again
    assert type(received[0]) is receiver.Child
    assert isinstance(received[0], receiver.Base)
    assert type(received[1]) is receiver.Base.Inner
    assert received[0].add(1) == 8


@pytest.mark.parametrize("expression", ["Base.static", "Base.make", "Base(2).add", "Base.add"])
def test_methods_go_by_name_too(twins, expression):
    sender, receiver = twins
    with sender.active():
        sent = eval(expression, sender.module.__dict__)
    received, again = send(sent, sender, receiver)
    assert not again
    assert received.__module__ == "__main__"
    owner = getattr(received, "__self__", None)
    if expression == "Base.make":
        assert owner is receiver.Base
        assert received(5).add(1) == 6
    elif expression == "Base(2).add":
        assert type(owner) is receiver.Base
        assert received(1) == 3
    elif expression == "Base.static":
        assert received is receiver.Base.static
    else:
        assert received is receiver.Base.add


def test_a_definition_the_receiver_lacks_is_named_before_anything_runs():
    sender, receiver = Main("def f(): return 1\nclass C: pass"), Main()
    for value in (sender.f, sender.C, sender.C(), [1, {"k": sender.f}]):
        with sender.active():
            encoded = codec.encode(value)
        assert encoded.payload.definitions
        with receiver.active(), pytest.raises(MissingDefinition):
            codec.decode(encoded.payload, encoded.frames)


def test_what_is_known_to_be_lacking_goes_by_value_at_once():
    sender, receiver = Main("def f(): return 1"), Main()
    with sender.active():
        encoded = codec.encode(sender.f, lacking={sender.digest("f")})
    with receiver.active():
        assert codec.decode(encoded.payload, encoded.frames)() == 1


def test_what_is_known_there_goes_by_name():
    sender = Main("def f(): return 1")
    with sender.active():
        digest = sender.digest("f")
        by_name = codec.encode(sender.f, by_value=True, known={digest})
        by_value = codec.encode(sender.f, by_value=True)
    assert len(by_name.frames[0]) < len(by_value.frames[0])
    with Main().active(), pytest.raises(MissingDefinition):
        codec.decode(by_name.payload, by_name.frames)


def test_by_value_still_prefers_the_receivers_own(twins):
    sender, receiver = twins
    with sender.active():
        encoded = codec.encode((sender.Child, sender.Base(1)), by_value=True)
    with receiver.active():
        cls, made = codec.decode(encoded.payload, encoded.frames)
    assert cls is receiver.Child
    assert type(made) is receiver.Base


def test_what_cannot_go_by_value_goes_by_name(twins):
    sender, receiver = twins
    with sender.active(), pytest.raises(EncodeError, match="lock"):
        codec.encode(sender.function, by_value=True)
    received, _ = send(sender.function, sender, receiver)
    assert received is receiver.function


# --- cells ----------------------------------------------------------------------------------------

CELLS = {
    "function": ("def f(x): return x + 1", 2),
    "lambda": ("f = lambda x: x + 1", 2),
    "defaults": ("def f(x, y=10, *, z=100): return x + y + z", 111),
    "globals": ("step = 5\ndef f(x): return x + step", 6),
    "closure": ("def make(n):\n    def f(x): return x + n\n    return f\nf = make(4)", 5),
    "nested": ("def f(x):\n    def g(y): return y + 1\n    return g(g(x))", 3),
    "recursion": ("def f(x): return 0 if x > 5 else 1 + f(x + 1)", 5),
    "mutual recursion": (
        "def even(x): return True if x == 0 else odd(x - 1)\n"
        "def odd(x): return False if x == 0 else even(x - 1)\n"
        "f = even",
        False,
    ),
    "import inside": ("def f(x):\n    import math\n    return math.floor(x)", 1),
    "import outside": ("import math\ndef f(x): return math.floor(x)", 1),
    "class": (
        "class C:\n    def __init__(self, x): self.x = x\n    def get(self): return self.x\nf = lambda x: C(x).get()",
        1,
    ),
    "super": (
        "class A:\n    def go(self, x): return x\n"
        "class B(A):\n    def go(self, x): return super().go(x) + 1\n"
        "def f(x): return B().go(x)",
        2,
    ),
    "decorated": (
        "import functools\n"
        "def twice(g):\n    @functools.wraps(g)\n    def inner(*a): return g(g(*a))\n    return inner\n"
        "@twice\ndef f(x): return x + 1",
        3,
    ),
    "decorated method": (
        "def plus(n):\n    def wrap(g):\n        def inner(self, x): return g(self, x) + n\n"
        "        return inner\n    return wrap\n"
        "class C:\n    @plus(5)\n    def go(self, x): return x\n"
        "f = lambda x: C().go(x)",
        6,
    ),
    "property": ("class C:\n    @property\n    def p(self): return 7\nf = lambda x: C().p", 7),
    "callable object": ("class C:\n    def __call__(self, x): return x + 1\nf = C()", 2),
    "partial": ("import functools\ndef g(a, b): return a - b\nf = functools.partial(g, 10)", 9),
    "bound method": ("class C:\n    n = 3\n    def go(self, x): return self.n + x\nf = C().go", 4),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass D:\n    x: int\n    y: int = 2\n"
        "def f(x): return dataclasses.asdict(D(x))",
        {"x": 1, "y": 2},
    ),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(x): return E(x).name", "A"),
    "named tuple": ("import collections\nP = collections.namedtuple('P', 'a b')\ndef f(x): return P(x, 2).a", 1),
    "typed named tuple": ("import typing\nclass P(typing.NamedTuple):\n    a: int\ndef f(x): return P(x).a", 1),
    "generator": ("def g(x):\n    yield x\n    yield x + 1\ndef f(x): return list(g(x))", [1, 2]),
    "exception": (
        "class Oops(Exception): pass\ndef f(x):\n    try: raise Oops(x)\n    except Oops as e: return e.args",
        (1,),
    ),
    "abstract": (
        "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def go(self): ...\n"
        "class B(A):\n    def go(self): return 9\ndef f(x): return B().go()",
        9,
    ),
    "module": (
        "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(1, 1)\n"
        "    def forward(self, x): return self.l(x)\n"
        "def f(x): return tuple(M()(torch.ones(x, 1)).shape)",
        (1, 1),
    ),
}


@pytest.mark.parametrize("cell", CELLS)
def test_what_only_the_sender_has_goes_by_value(cell):
    source, expected = CELLS[cell]
    sender, receiver = Main(source), Main()
    received, _ = send(sender.f, sender, receiver)
    assert run(receiver, received, 1) == expected


@pytest.mark.parametrize("cell", CELLS)
def test_what_both_have_goes_by_name_whatever_it_is(cell):
    source, expected = CELLS[cell]
    sender, receiver = Main(source), Main("\n\n" + source)
    received, again = send(sender.f, sender, receiver)
    assert not again
    assert run(receiver, received, 1) == expected


def test_what_goes_by_value_keeps_the_names_of_its_files():
    """Errors and `inspect` find the lines by them; cloudpickle 3.1.3 leaves them out."""
    sender, receiver = Main("def f():\n    def inner(): pass\n    return inner"), Main()
    received, _ = send(sender.f, sender, receiver)
    inner = run(receiver, received)
    assert received.__code__.co_filename == inner.__code__.co_filename == sender.f.__code__.co_filename


def test_instances_of_a_class_sent_twice_are_of_one_class():
    sender, receiver = Main("class C:\n    def __init__(self, x): self.x = x"), Main()
    first, _ = send(sender.C(1), sender, receiver)
    second, _ = send([sender.C(2), sender.C], sender, receiver)
    assert type(first) is type(second[0]) is second[1]


def test_functions_sent_together_share_their_globals():
    sender, receiver = Main("n = 1\ndef up():\n    global n\n    n += 1\ndef get(): return n"), Main()
    (up, get), _ = send([sender.up, sender.get], sender, receiver)
    run(receiver, up)
    assert run(receiver, get) == 2
    assert sender.n == 1


def test_the_latest_definition_wins():
    sender, receiver = Main("def f(): return 'old'"), Main()
    old, _ = send(sender.f, sender, receiver)
    sender.cell("def f(): return 'new'")
    new, _ = send(sender.f, sender, receiver)
    assert run(receiver, new) == "new"
    assert run(receiver, old) == "old"


def test_an_older_definition_there_does_not_win():
    sender, receiver = Main("def f(): return 'sender'"), Main("def f(): return 'receiver'")
    received, again = send(sender.f, sender, receiver)
    assert again
    assert run(receiver, received) == "sender"
    assert receiver.f() == "receiver"


# --- calls of functions, when both sides have cached their digests --------------------------------


def own_call(main, name, known):
    """The usual call of one of `main`'s functions, for a receiver that has the definitions in `known`."""
    with main.active():
        return codec.encode_usual_call(getattr(main, name), (0,), {}, None, known)


def found(main, payload):
    """The function that `main` runs for that call."""
    with main.active():
        return definitions.get_own(*payload.definitions[0])


@pytest.fixture
def same():
    return Main(FUNCTIONS), Main(FUNCTIONS)


@pytest.mark.usefixtures("usual_way")
def test_the_usual_call_of_a_function_names_it_beside_the_body(same):
    sender, receiver = same
    payload, frames = own_call(sender, "plain", {sender.digest("plain")})
    assert payload.definitions == [("plain", sender.digest("plain"))]
    assert codec.decode_early(payload, frames) == (None, (0,), {})
    with sender.active():
        payload, frames = codec.encode_usual_call(
            sender.plain, (torch.ones(2), 3), {"k": "v"}, None, {sender.digest("plain")}
        )
    _, args, kwargs = codec.decode_early(payload, frames)
    assert (args[0].tolist(), args[1], kwargs) == ([1, 1], 3, {"k": "v"})
    assert found(receiver, payload) is receiver.plain


def test_a_function_that_the_receiver_may_lack_goes_the_general_way(same):
    sender, _ = same
    digest = sender.digest("plain")
    assert own_call(sender, "plain", ()) is None
    assert own_call(sender, "plain", {sender.digest("default")}) is None
    with sender.active():
        assert codec.encode_usual_call(sender.plain, (0,), {}, None, {digest}, {digest}) is None


@pytest.mark.parametrize(
    "expression",
    ["lambda x: x", "C.static", "C(), C.static", "by(3)(plain)", "C", "C().method", "functools.partial(plain)"],
)
def test_only_functions_at_the_top_level_take_the_usual_way(same, expression):
    sender, _ = same
    sender.cell("class C:\n    def method(self): pass\n    @staticmethod\n    def static(): pass")
    with sender.active():
        function = eval(expression, sender.module.__dict__)
        everything = type("Everything", (), {"__contains__": lambda *_: True, "__len__": lambda _: 1})()
        assert codec.encode_usual_call(function, (0,), {}, None, everything) is None


@pytest.mark.usefixtures("usual_way")
@pytest.mark.parametrize("change", CHANGES)
def test_a_function_that_changes_is_not_taken_for_what_it_was(same, change):
    (name, source), (sender, receiver) = CHANGES[change], same
    known = {sender.digest(name)}
    for _ in range(3):
        payload, _ = own_call(sender, name, known)
        assert found(receiver, payload) is getattr(receiver, name)
    sender.cell(source)
    assert run(sender, sender.module.__dict__[name], 0) == 2
    assert own_call(sender, name, known) is None
    payload, _ = own_call(sender, name, {sender.digest(name)})
    with pytest.raises(MissingDefinition, match=name):
        found(receiver, payload)
    receiver.cell(source)
    assert found(receiver, payload) is getattr(receiver, name)


@pytest.mark.usefixtures("usual_way")
@pytest.mark.parametrize("change", CHANGES)
def test_a_receiver_that_changes_a_function_has_it_no_more(same, change):
    (name, source), (sender, receiver) = CHANGES[change], same
    payload, _ = own_call(sender, name, {sender.digest(name)})
    for _ in range(3):
        found(receiver, payload)
    receiver.cell(source)
    with pytest.raises(MissingDefinition, match=name):
        found(receiver, payload)


CLASSES = """
class Base:
    rate = 1
    class Inner:
        rate = 1

class Thing(Base):
    def method(self, x=1): return x
    @staticmethod
    def static(x=1): return x
    @property
    def value(self): return 1
"""


@pytest.mark.parametrize(
    "change",
    [
        "Thing.rate = 2",
        "Base.rate = 2",
        "Base.Inner.rate = 2",
        "Thing.method.__defaults__ = (2,)",
        "Thing.static.__code__ = (lambda x: 2).__code__",
        "Thing.value.fget.__code__ = (lambda self: 2).__code__",
        "Base.method = lambda self: 2",
    ],
)
def test_a_class_that_changes_deep_inside_is_not_taken_for_what_it_was(change):
    sender, receiver = Main(CLASSES), Main(CLASSES)
    for _ in range(2):
        assert send(sender.Thing, sender, receiver) == (receiver.Thing, False)
    sender.cell(change)
    received, again = send(sender.Thing, sender, receiver)
    assert again
    assert received is not receiver.Thing


@pytest.mark.usefixtures("usual_way")
def test_what_a_function_assigns_around_itself_is_its_state():
    """A decorator that counts, or computes something once, makes no other function of what it decorates."""
    source = """
        import functools

        def counted(function):
            calls, first = 0, None
            @functools.wraps(function)
            def wrapper(x):
                def note():
                    nonlocal first
                    first = first or x
                nonlocal calls
                calls += 1
                note()
                return calls, first, function(x)
            return wrapper

        @counted
        def f(x): return x
    """
    sender, receiver = Main(source), Main(source)
    known = {sender.digest("f")}
    for number in (1, 2, 3):
        run(sender, sender.f, 9)
        payload, _ = own_call(sender, "f", known)
        assert run(receiver, found(receiver, payload), number) == (number, 1, number)


# --- names that the sender lacks ------------------------------------------------------------------


def test_missing_names_are_looked_up_where_and_when_the_function_runs():
    sender, receiver = Main("def f(): return there"), Main()
    received, _ = send(sender.f, sender, receiver)
    with pytest.raises(NameError, match="there"):
        run(receiver, received)
    receiver.cell("there = 1")
    assert run(receiver, received) == 1
    receiver.cell("there = 2")
    assert run(receiver, received) == 2


def test_missing_names_of_inner_functions_are_too():
    sender = Main("def f():\n    def g(): return there\n    return [g() for _ in range(2)], (lambda: there)()")
    receiver = Main("there = 1")
    received, _ = send(sender.f, sender, receiver)
    assert run(receiver, received) == ([1, 1], 1)


def test_what_the_sender_has_wins_over_the_receivers():
    sender, receiver = Main("n = 'sender'\ndef f(): return n"), Main("n = 'receiver'")
    received, _ = send(sender.f, sender, receiver)
    assert run(receiver, received) == "sender"


def test_builtins_are_builtins():
    sender, receiver = Main("def f(x): return len(x), sum(x), print is not None"), Main()
    received, _ = send(sender.f, sender, receiver)
    assert run(receiver, received, [1, 2]) == (2, 3, True)


# --- large globals --------------------------------------------------------------------------------


def test_a_large_captured_global_warns_once_with_its_name():
    sender = Main("import torch\nweights = torch.zeros(1 << 19)\nsmall = 1\ndef f(): return weights, small")
    with sender.active():
        with pytest.warns(UserWarning, match=r"f uses the global 'weights' of 2\.1 MB") as told:
            codec.encode(sender.f, by_value=True)
        assert told[0].filename == __file__  # the line that sends it
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode(sender.f, by_value=True)


@pytest.mark.parametrize("value", ["bytes(10)", "[0] * 1000", "torch.zeros(9)", "torch", "torch.nn.Linear(2, 2)"])
def test_a_small_global_does_not_warn(value):
    sender = Main(f"import torch\nsmall = {value}\ndef f(): return small")
    with sender.active(), warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.encode(sender.f, by_value=True)


@pytest.mark.parametrize(
    "value", ["bytes(1 << 21)", "['x' * 100] * (1 << 18)", "{'k': torch.zeros(1 << 19)}", "torch.nn.Linear(1024, 1024)"]
)
def test_other_large_globals_warn_too(value):
    sender = Main(f"import torch\nlarge = {value}\ndef f(): return large")
    with sender.active(), pytest.warns(UserWarning, match="large"):
        codec.encode(sender.f, by_value=True)


MADE = """
import functools
import gc, torch
def make(weights):
    small = 1
    def closure(): return weights, small
    return closure
def default(x, weights=torch.zeros(1 << 19), rate=0): return weights
def keyword(*, weights=torch.zeros(1 << 19)): return weights
def plain(weights, x): return weights
def many(first, *rest): return rest
lambdas = [lambda weights=torch.zeros(1 << 19): weights]
"""


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("make(torch.zeros(1 << 19))", r"make\.<locals>\.closure uses the captured variable 'weights' of 2\.1 MB"),
        ("default", "default uses the default argument 'weights' of"),
        ("keyword", "keyword uses the default argument 'weights' of"),
        ("lambdas[0]", "<lambda> uses the default argument 'weights' of"),
        ("functools.partial(plain, torch.zeros(1 << 19))", r"partial\(plain\) uses the argument 'weights' of"),
        ("functools.partial(many, 1, torch.zeros(1 << 19))", r"partial\(many\) uses the argument 'args\[1\]' of"),
        ("functools.partial(plain, x=torch.zeros(1 << 19))", r"partial\(plain\) uses the argument 'x' of"),
        ("functools.partial(max, torch.zeros(1 << 19))", r"partial\(max\) uses the argument 'args\[0\]' of"),
    ],
)
def test_other_large_values_of_a_function_warn_with_their_names(made, told):
    sender = Main(f"{MADE}\nmade = {made}")
    with sender.active():
        with pytest.warns(UserWarning, match=told) as warned:
            codec.encode(sender.made, by_value=True)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode(sender.made, by_value=True)


def test_a_value_with_the_id_of_one_that_is_gone_warns_too():
    seen = set()
    while len(seen) < 20:  # soon, Python uses a place again
        sender = Main(f"{MADE}\nmade = functools.partial(plain, torch.zeros(1 << 19))")
        with sender.active(), pytest.warns(UserWarning, match="uses the argument 'weights' of"):
            codec.encode(sender.made, by_value=True)
        if id(sender.made.args[0]) in seen:
            return
        seen.add(id(sender.made.args[0]))
        del sender
        gc.collect()
    raise AssertionError("Python has used no place again")


@pytest.mark.parametrize("made", ["make(torch.zeros(9))", "functools.partial(plain, torch.zeros(9), x=[1])"])
def test_small_values_of_a_function_do_not_warn(made):
    sender = Main(f"{MADE}\nmade = {made}")
    with sender.active(), warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.encode(sender.made, by_value=True)


def test_a_captured_variable_without_a_value_does_not_warn():
    sender = Main("def make():\n    def inner(): return later\n    return inner\n    later = 1\nmade = make()")
    with sender.active(), warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.encode(sender.made, by_value=True)


def test_a_function_that_goes_by_name_takes_no_global_along():
    sender = Main("import torch\nweights = torch.zeros(1 << 20)\ndef f(): return weights")
    with sender.active(), warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded = codec.encode(sender.f)
    assert sum(map(len, encoded.frames)) < 1000


def test_a_global_that_cannot_be_sent_is_an_encode_error():
    sender = Main("import threading\nlock = threading.Lock()\ndef f():\n    with lock: return 1")
    with sender.active(), pytest.raises(EncodeError, match="lock"):
        codec.encode(sender.f, by_value=True)


# --- digests --------------------------------------------------------------------------------------


def digest(source, name="f"):
    return Main(source).digest(name)


SAME = {
    "place": ("def f(x): return x", "\n\n# comment\n\ndef f(x):  # more\n\n    return x"),
    "comment": ("def f(x):\n    return x + 1", "def f(x):\n    # why\n    return x + 1"),
    "annotations": ("def f(x): return x", "def f(x: int) -> int: return x"),
}
DIFFERENT = {
    "code": ("def f(x): return x + 1", "def f(x): return x - 1"),
    "constant": ("def f(x): return x + 1", "def f(x): return x + 2"),
    "type of constant": ("def f(): return 1", "def f(): return 1.0"),
    "bool": ("def f(): return True", "def f(): return 1"),
    "string": ("def f(): return 'a'", "def f(): return b'a'"),
    "zero": ("def f(): return 0.0", "def f(): return -0.0"),
    "name": ("def f(x): return a", "def f(x): return b"),
    "attribute": ("def f(x): return x.a", "def f(x): return x.b"),
    "default": ("def f(x=1): return x", "def f(x=2): return x"),
    "keyword default": ("def f(*, x=1): return x", "def f(*, x=2): return x"),
    "a default's sign": ("def f(x=+0.0): return x", "def f(x=-0.0): return x"),
    "a default's type": ("def f(x=(1 )): return x", "def f(x=(1.)): return x"),
    "kind of parameter": ("def f(x): return x", "def f(*, x): return x"),
    "positional only": ("def f(x): return x", "def f(x, /): return x"),
    "inner": ("def f():\n    return lambda: 1", "def f():\n    return lambda: 2"),
    "generator": ("def f(): yield 1", "def f(): return 1"),
    "set": ("def f(x): return x in {1, 2}", "def f(x): return x in {1, 3}"),
    "closure": (
        "def make(n):\n    def f(x): return x + n\n    f.__qualname__ = 'f'\n    return f\nf = make(1)",
        "def make(n):\n    def f(x): return x + n\n    f.__qualname__ = 'f'\n    return f\nf = make(2)",
    ),
    "decorated": (
        "def d(g):\n    def w(): return g()\n    return w\n@d\ndef f(): return 1",
        "def d(g):\n    def w(): return g()\n    return w\n@d\ndef f(): return 2",
    ),
    "handler": (
        "def f():\n    try:\n        a()\n        b()\n    except E:\n        return c()",
        "def f():\n    try:\n        a()\n    except E:\n        return c()\n    b()",
    ),
    "class attribute": ("class f:\n    a = 1", "class f:\n    a = 2"),
    "method": ("class f:\n    def m(self): return 1", "class f:\n    def m(self): return 2"),
    "static": (
        "class f:\n    @staticmethod\n    def m(): return 1",
        "class f:\n    @classmethod\n    def m(): return 1",
    ),
    "property": (
        "class f:\n    @property\n    def m(self): return 1",
        "class f:\n    @property\n    def m(self): return 2",
    ),
    "more": ("class f:\n    a = 1", "class f:\n    a = 1\n    b = 1"),
    "bases": ("class f(dict): pass", "class f(list): pass"),
    "base in main": ("class A:\n    x = 1\nclass f(A): pass", "class A:\n    x = 2\nclass f(A): pass"),
    "inner class": ("class f:\n    class I:\n        x = 1", "class f:\n    class I:\n        x = 2"),
}


@pytest.mark.parametrize("pair", SAME)
def test_a_digest_ignores_what_does_not_matter(pair):
    one, another = SAME[pair]
    assert digest(one) == digest(another)


@pytest.mark.parametrize("pair", DIFFERENT)
def test_a_digest_sees_what_matters(pair):
    one, another = DIFFERENT[pair]
    assert digest(one) == digest(one)
    assert digest(one) != digest(another)


def test_a_digest_follows_a_change():
    main = Main("def f(x=1): return x\nclass C:\n    a = 1")
    function, cls = main.digest("f"), main.digest("C")
    main.f.__defaults__ = (2,)
    main.C.a = 2
    assert main.digest("f") != function
    assert main.digest("C") != cls
    main.f.__code__ = (lambda x: x + 1).__code__
    assert main.digest("f") == main.digest("f") != function


def test_a_class_that_refers_to_itself_has_a_digest():
    main = Main("class C:\n    def m(self): return C\nC.self = C\nC.again = C.m")
    assert main.digest("C") == main.digest("C")


DIGESTS = """
    import sys
    from nbdist.wire.pickling import definitions

    def sets(x):
        return x in {"a", "b", "c", "d"}, {"x", ("y", frozenset({"p", "q", "r"}))}

    def defaults(x=frozenset({"a", "b", "c"}), *, y=("k", {"m", "n"})):
        return x, y

    class Slots:
        __slots__ = ("a", "b")
        names = {"u", "v", "w"}
        table = {"k": 1}
        def m(self): return {"a", "b", "c"}

    for name in ("sets", "defaults", "Slots"):
        print(definitions.digest(definitions.find_named(name)))
"""


def test_a_digest_is_the_same_in_every_process(tmp_path):
    found = []
    for seed, start in (("1", ""), ("2", "\n\n\n"), ("77", "x = 1\n")):
        script = tmp_path / f"script{seed}.py"
        script.write_text(start + textwrap.dedent(DIGESTS))
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found.append(done.stdout.split())
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


def test_a_digest_is_of_code_and_not_of_state():
    """A cache that fills up, on the class or around the function, does not make another definition of it."""

    class Caching:
        cache: dict[int, int] = {}  # noqa: RUF012
        seen = []  # noqa: RUF012

        def get(self, key: int) -> int:
            return self.cache.setdefault(key, key)

    before = definitions.digest(Caching)
    Caching.cache[1] = 1
    Caching.seen.append(2)
    assert definitions.digest(Caching) == before
