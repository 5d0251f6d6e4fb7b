"""`%dist_break`: workers stop at places in code that stays as it is."""

import sys
from types import CodeType, SimpleNamespace

import pytest
from helpers.notebook.frontend import Notebook

from nbdist.cluster.worker.breakpoints import Breakpoint, BreakpointsHere

LOSSES = """class Focal:
    def forward(self, x):
        # a comment
        y = x + 1
        return y

def focal(x):
    return Focal().forward(x)
"""
# What a debugger does when the user lets the thread run: it takes all trace functions away.
RECORD = """%%remote
import sys, losses, threading
from nbdist.cluster.worker import breakpoints
stops = []
def _record(frame):
    stops.append((frame.f_code.co_qualname, frame.f_lineno, frame.f_locals.get("x")))
    sys.settrace(None)
    while frame:
        frame.f_trace, frame = None, frame.f_back
breakpoints.stop_at = _record
"""


# --- where ---------------------------------------------------------------------------------------------


def places(text, place, file="/home/me/package/losses.py"):
    """Return where a breakpoint would stop in the code of a file: the name of the code, and the line."""
    breakpoints = BreakpointsHere(SimpleNamespace(events=SimpleNamespace(register=lambda *_: None)))
    breakpoints._all = [Breakpoint(1, *place, "")]

    def look(code):
        yield from ((code.co_qualname, line) for line in breakpoints.stops_in(code))
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from look(each)

    return list(look(compile(text, file, "exec")))


CODE = """import os
def outer(x):
    '''Return.'''

    def inner(y):
        # a comment
        return y
    if x: pass
    return [inner(z)
            for z in range(x)]

@property
def one(self): return 1
X = 1
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (1, [("<module>", 1)]),
        (2, [("outer", 5)]),
        (3, [("outer", 5)]),
        (5, [("outer.<locals>.inner", 7)]),
        (6, [("outer.<locals>.inner", 7)]),
        (7, [("outer.<locals>.inner", 7)]),
        (8, [("outer", 8)]),
        (14, [("<module>", 14)]),
        (15, []),
    ],
)
def test_the_line_at_which_it_stops(line, found):
    assert places(CODE, ("losses.py", line, "")) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("outer", [("outer", 5)]),
        ("losses.outer", [("outer", 5)]),
        ("package.losses.outer", [("outer", 5)]),
        ("inner", [("outer.<locals>.inner", 7)]),
        ("outer.<locals>.inner", [("outer.<locals>.inner", 7)]),
        ("ter", []),
        ("other.outer", []),
    ],
)
def test_the_functions_that_a_name_means(name, found):
    assert places(CODE, ("", 0, name)) == found


@pytest.mark.parametrize(
    ("file", "is_in"), [("losses.py", True), ("package/losses.py", True), ("ses.py", False), ("other.py", False)]
)
def test_the_end_of_a_path(file, is_in):
    assert bool(places(CODE, (file, 8, ""))) == is_in


def test_a_function_of_a_package_needs_its_modules_name():
    file = "/usr/lib/python3/site-packages/torch/optim/sgd.py"
    assert places("def step(self):\n    pass", ("", 0, "step"), file) == []
    assert places("def step(self):\n    pass", ("", 0, "sgd.step"), file) == [("step", 2)]


# --- on workers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "losses.py").write_text(LOSSES)
    with Notebook(folders=[folder]) as notebook:
        notebook.run("%dist_init -n 2", timeout=120)
        notebook.run("import losses")
        notebook.run(RECORD)
        yield notebook


@pytest.fixture(autouse=True)
def _no_breakpoints(request):
    yield
    if "two" in request.fixturenames:
        two = request.getfixturevalue("two")
        assert two.run("%dist_break -d").stdout == "no breakpoints\n"
        two.run("%%remote\nstops.clear()")


def stops(notebook):
    """Return what each worker has stopped at since the last call."""
    found = notebook.run("%remote all stops").result
    notebook.run("%%remote\nstops.clear()")
    return eval(found)


FORWARD = ("Focal.forward", 4)


def test_cells_and_calls_stop_at_a_line(two):
    assert two.run("%dist_break losses.py:3").stdout.endswith("  losses.py:3\n")
    two.run("%%remote\nlosses.focal(5)")
    assert stops(two) == [[(*FORWARD, 5)], [(*FORWARD, 5)]]
    two.run("rpc.rpc_sync('worker0', losses.focal, (1,)), rpc.rpc_sync('worker1', losses.focal, (2,))")
    # From worker to worker, and in a thread.
    two.run("%%remote 0\nrpc.rpc_sync('worker1', losses.focal, (3,))")
    two.run("%%remote 0\nthread = threading.Thread(target=losses.focal, args=(4,))\nthread.start()\nthread.join()")
    assert stops(two) == [[(*FORWARD, 1), (*FORWARD, 4)], [(*FORWARD, 2), (*FORWARD, 3)]]


def test_rank_and_condition(two):
    told = two.run("%dist_break losses:4 -r 1 --if x == 'a b' or x > 3").stdout
    assert told.endswith("  losses.py:4 on worker1 if x == 'a b' or x > 3\n")
    assert two.run("%dist_break").stdout == told
    two.run("%%remote\nfor x in range(6): losses.focal(x)")
    assert stops(two) == [[], [(*FORWARD, 4), (*FORWARD, 5)]]


def test_a_condition_that_fails_stops_and_says_so(two):
    two.run("%dist_break losses.focal -r 0 --if nothing > 1")
    cell = two.run("%%remote 0\nlosses.focal(1)")
    assert "as its condition 'nothing > 1' raises NameError: name 'nothing' is not defined\n" in cell.stderr
    assert stops(two) == [[("focal", 8, 1)], []]


def test_a_hook_of_a_backward_pass(two):
    two.run(
        "%%remote 0\ndef hook(gradient):\n    return gradient * 2\nw = torch.ones(2, requires_grad=True)\n"
        "w.register_hook(hook)"
    )
    two.run("%dist_break hook")
    two.run("%%remote 0\n(w * 3).sum().backward()")
    assert [each[:2] for each in stops(two)[0]] == [("hook", 3)]


def test_a_cell_keeps_its_breakpoint_when_it_runs_again(two):
    code = "%%remote 0\n\ndef step(x):\n    x += 1\n    return x\nfor each in range(3):\n    step(each)\n"
    cell = two.run(code)
    two.run(f"%dist_break {cell.name}:3\n%dist_break {cell.name}:7 --if each == 1")
    two.run(code)
    # A loop goes on with its breakpoints after each stop.
    assert [each[:2] for each in stops(two)[0]] == [("step", 4), ("<module>", 7), ("step", 4), ("step", 4)]


def test_a_function_keeps_its_breakpoint_when_it_is_defined_anew(two, tmp_path):
    two.run("%dist_break train -r 0")
    two.run("%%remote 0\ndef train(x):\n    return x\ntrain(1)")
    two.run("%%remote 0\ndef train(x):\n\n    return x + 1\ntrain(2)")
    assert stops(two)[0] == [("train", 3, 1), ("train", 4, 2)]
    two.run("%dist_break losses.focal -r 0\n%dist_reload losses")
    two.run("%%remote 0\nlosses.focal(3)")
    assert stops(two)[0] == [("focal", 8, 3)]


def test_a_worker_that_starts_again_has_the_breakpoints(two):
    two.run("%dist_break losses.focal")
    two.run("%dist_restart 1", timeout=120)
    two.run(RECORD)
    two.run("%%remote\nlosses.focal(1)")
    assert stops(two) == [[("focal", 8, 1)]] * 2


def test_none_is_left_behind(two):
    two.run("%dist_break losses.py:4\n%dist_break losses.focal")
    two.run("rpc.rpc_sync('worker1', losses.focal, (1,))")
    two.run("%%remote\nlosses.focal(1)")
    numbers = [line.split()[0] for line in two.run("%dist_break").stdout.splitlines()]
    assert two.run(f"%dist_break -d {numbers[0]}").stdout.splitlines()[0].startswith(numbers[1])
    two.run("%dist_break -d")
    two.run("%%remote\nstops.clear()\nlosses.focal(1)")
    assert stops(two) == [[], []]
    left = "[sys.gettrace(), threading.gettrace()]"
    if sys.version_info >= (3, 12):
        left = "[sys.monitoring.get_tool(number) for number in (3, 4)]"
    assert two.run(f"%remote all {left}").result == "[[None, None], [None, None]]"


def test_the_users_debugger_stops_there_and_later_again(two):
    prompts = []

    def give(line, request):
        prompts.append(request["prompt"])
        return line

    commands = ["n", "n", "c", "p 'x is', x", "c", "c"]
    two.answers[:] = [lambda request, line=line: give(line, request) for line in commands]
    # The real debugger, whatever this module's other tests have put in its place.
    two.run("%%remote 1\nfrom nbdist.cluster.worker import debugger\nbreakpoints.stop_at = debugger.stop_at")
    two.run("%dist_break losses.py:4 -r 1")
    try:
        cell = two.run("%%remote\nlosses.focal(5)\nlosses.focal(6)")
        assert [prompt.partition(" (pdb)")[0] for prompt in prompts[:3]] == [
            "worker1 losses.py:4",
            "worker1 losses.py:5",
            "worker1 losses.py:5",
        ]
        assert prompts[3].startswith("worker1 losses.py:4")
        assert "('x is', 6)" in cell.stdout
        two.run("rpc.rpc_sync('worker1', losses.focal, (7,))")
        assert len(prompts) == len(commands)
    finally:
        two.answers.clear()
        two.run("%%remote 1\nbreakpoints.stop_at = _record")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("a-b", "'a-b' is no place such as train.py:41, In[7]:12, step or losses.Focal.forward"),
        ("losses.py:0", "'losses.py:0' is no place such as"),
        ("step --if x +", "--if: 'x +' is not an expression: invalid syntax; it stands last"),
        ("-d 7000", "there is no breakpoint 7000; %dist_break lists them"),
        ("--if x", "write: %dist_break [FILE:LINE | FUNCTION] [-r TARGET] [--if EXPRESSION] | -d [NUMBER]"),
    ],
)
def test_lines_that_are_refused(two, line, told):
    assert told in two.run(f"%dist_break {line}", check=False).traceback
