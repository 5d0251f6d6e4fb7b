"""Lines of magics: what they mean, and errors that say how to write them."""

from __future__ import annotations

import contextlib
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.cluster.spec import Spec
from nbdist.cluster.targets import parse_targets
from nbdist.errors import UsageError
from nbdist.magics.lines import READERS, parse_init, parse_value, read

FOUR = ["worker0", "worker1", "worker2", "worker3"]
USAGE = "%%remote [TARGET] [-a] [-o NAME] [-t SECONDS] [--group-outputs] [--fail-fast] [--progress-after SECONDS]"


def cell(line):
    return read("%%remote", line)


def cell_line(targets=None, **options):
    plain = {"noblock": False, "out": None, "timeout": None, "group_outputs": False, "local": False}
    plain |= {"fail_fast": False, "progress_after": 10.0}
    return Namespace(targets=targets, **{**plain, **options})


# -- %%remote -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("", cell_line()),
        ("   ", cell_line()),
        ("0", cell_line("0")),
        ("0,2", cell_line("0,2")),
        ("worker1", cell_line("worker1")),
        ("all", cell_line("all")),
        (":", cell_line(":")),
        ("::2", cell_line("::2")),
        ("0:2", cell_line("0:2")),
        ("[0-2]", cell_line("[0-2]")),
        ("-1", cell_line("-1")),
        ("-2:", cell_line("-2:")),
        ("-1,0", cell_line("-1,0")),
        ("[-1]", cell_line("[-1]")),
        ("'0,2'", cell_line("0,2")),
        ('"worker1"', cell_line("worker1")),
        ("-a", cell_line(noblock=True)),
        ("--noblock", cell_line(noblock=True)),
        ("0 -a", cell_line("0", noblock=True)),
        ("-a 0", cell_line("0", noblock=True)),
        ("-a -1", cell_line("-1", noblock=True)),
        ("-o x", cell_line(out="x")),
        ("--out x", cell_line(out="x")),
        ("--out=größe", cell_line(out="größe")),
        ("-t 5", cell_line(timeout=5.0)),
        ("-t5", cell_line(timeout=5.0)),
        ("--timeout 0.5", cell_line(timeout=0.5)),
        ("--timeout=1e3", cell_line(timeout=1000.0)),
        ("-t 5 -1", cell_line("-1", timeout=5.0)),
        ("--group-outputs", cell_line(group_outputs=True)),
        ("--fail-fast", cell_line(fail_fast=True)),
        ("--progress-after 2.5", cell_line(progress_after=2.5)),
        ("--progress-after 0", cell_line(progress_after=0.0)),
        ("--local", cell_line(local=True)),
        ("-ao x", cell_line(noblock=True, out="x")),
        ("-o -a", None),
        (
            "worker0,[2-3] -a -o x -t 5 --group-outputs --local",
            cell_line("worker0,[2-3]", noblock=True, out="x", timeout=5.0, group_outputs=True, local=True),
        ),
    ],
)
def test_the_first_line_of_a_cell(line, means):
    if means is None:
        with pytest.raises(UsageError):
            cell(line)
    else:
        assert cell(line) == means


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("0, 2", [0, 2]),
        ("0 , 2 -a", [0, 2]),
        ("[0, 1] -t 5", [0, 1]),
        ("[ 0 - 2 ]", [0, 1, 2]),
        ("worker0, worker3", [0, 3]),
        ("-1, 0", [3, 0]),
        ("-1", [3]),
        ("-o x ::2", [0, 2]),
    ],
)
def test_targets_may_have_blanks(line, ranks):
    assert parse_targets(cell(line).targets, FOUR) == ranks


@pytest.mark.parametrize("line", ["1 2", "0 worker1", "[0] 1", "1 0"])
def test_words_are_not_glued_to_other_targets(line):
    with pytest.raises(UsageError):
        parse_targets(cell(line).targets, [f"worker{rank}" for rank in range(100)])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--nonblock", "--nonblock"),
        ("--time 5", "--time"),
        ("-h", "-h"),
        ("-t", "-t/--timeout: expected one argument"),
        ("-t soon", "'soon' is not a number of seconds"),
        ("-t 0", "more than 0 s"),
        ("-t -1", "more than 0 s, and at most 100000000, not -1"),
        ("-t nan", "not nan"),
        ("-t inf", "not inf"),
        ("-o", "-o/--out: expected one argument"),
        ("-o 2x", "-o/--out: needs the name of a variable, not '2x'"),
        ("-o -1", "not '-1'"),
        ("-o a.b", "not 'a.b'"),
        ("-o class", "not 'class'"),
        ("-a=1", "-a"),
        ("0 -a 2", "unrecognized arguments: 2"),
        ("'0", "No closing quotation"),
    ],
)
def test_errors_of_a_cells_line_say_how_to_write_it(line, says):
    with pytest.raises(UsageError) as raised:
        cell(line)
    assert says in str(raised.value)
    assert str(raised.value).endswith(f"; write: {USAGE} [--local]")


def test_all_options_of_a_cell_can_be_completed():
    values = {"-o": "x", "--out": "x", "-t": "1", "--timeout": "1", "--progress-after": "1"}
    for option in READERS["%%remote"].options:
        assert cell(f"{option} {values.get(option, '')}") != cell_line()


# -- %remote ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("0 x", ("0", "x", None)),
        ("  0   x  ", ("0", "x", None)),
        ("worker1 x.shape", ("worker1", "x.shape", None)),
        ("[0,1] x + 1", ("[0,1]", "x + 1", None)),
        ("[0, 1] x + 1", ("[0, 1]", "x + 1", None)),
        ("[ 0 - 2 ],worker3 x", ("[ 0 - 2 ],worker3", "x", None)),
        ("0, 2 x", ("0, 2", "x", None)),
        ("worker1 a if b else c", ("worker1", "a if b else c", None)),
        ("all [x, 'a b', {}]", ("all", "[x, 'a b', {}]", None)),
        (": x[1:2]", (":", "x[1:2]", None)),
        ("::2 f(x, y)", ("::2", "f(x, y)", None)),
        ("-1 -x", ("-1", "-x", None)),
        ("0 -t", ("0", "-t", None)),
        ("0 -t - 5", ("0", "-t - 5", None)),
        ("0 (\n1,\n)", ("0", "(\n1,\n)", None)),
        ('0 "it\'s"', ("0", '"it\'s"', None)),
        ("-t 5 0 x", ("0", "x", 5.0)),
        ("--timeout 0.5 [0, 1] x", ("[0, 1]", "x", 0.5)),
        ("--timeout=2 -1 x", ("-1", "x", 2.0)),
        ("0 -t 5 x", ("0", "x", 5.0)),
        ("0 --timeout=.5 x y", ("0", "x y", 0.5)),
    ],
)
def test_a_value_is_asked_for_by_target_and_expression(line, means):
    assert parse_value(line) == means


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "begins with %%remote"),
        ("0", "begins with %%remote"),
        ("x.shape", "begins with %%remote"),
        ("[0,1]", "begins with %%remote"),
        ("[0 x", "begins with %%remote"),
        ("-a 0 x", "'-a' is not a target"),
        ("-t 5", "'-t' is not a target"),
        ("-t soon 0 x", "-t: 'soon' is not a number of seconds"),
        ("-t 0 0 x", "more than 0 s"),
        ("0 -t 0 x", "more than 0 s"),
        ("0 -t 1.2.3 x", "'1.2.3' is not a number"),
    ],
)
def test_errors_of_a_value_say_how_to_write_it(line, says):
    with pytest.raises(UsageError) as raised:
        parse_value(line)
    assert says in str(raised.value)
    assert "write: %remote [-t SECONDS] TARGET expression, for instance: %remote worker1 x.shape" in str(raised.value)


targets = st.sampled_from(["0", "-1", "0,2", "[0,1]", "[0, 1]", "0:2", "::2", ":", "all", "worker1", "[0-2],worker3"])
expressions = (
    st.text(st.characters(codec="utf-8"), min_size=1)
    .map(str.strip)
    .filter(lambda text: text and not text.startswith(("-t", "--timeout")))
)


@given(targets, expressions, st.none() | st.integers(1, 99))
def test_whatever_stands_behind_the_target_is_the_expression(target, expression, timeout):
    option = f"-t {timeout} " if timeout is not None else ""
    assert parse_value(f"{option}{target} {expression}") == (target, expression, timeout)


@given(st.text(st.sampled_from("ab01 -,:[]'\"\\=t\n"), max_size=20))
def test_any_line_is_understood_or_a_named_error(line):
    for parse in (cell, parse_value, parse_init):
        with contextlib.suppress(UsageError):
            parse(line)


# -- %dist_init ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("", Spec(2)),
        ("-n 4", Spec(4)),
        ("-n4", Spec(4)),
        ("--num-processes 4", Spec(4)),
        ("--num-processes=4", Spec(4)),
        ("-g 0,1", Spec(2, (0, 1))),
        ("-g 3", Spec(1, (3,))),
        ("-g 0,1,2 -n 6", Spec(6, (0, 1, 2))),
        ("-n 6 --gpu-ids 2,0", Spec(6, (2, 0))),
        ("-g [0,1]", Spec(2, (0, 1))),
        ("-g [0, 1] -n 2", Spec(2, (0, 1))),
        ("-g 0, 1", Spec(2, (0, 1))),
        ("-g 0 1", Spec(2, (0, 1))),
        ("-g '0, 1'", Spec(2, (0, 1))),
        ("--backend gloo", Spec(backend="gloo")),
        ("--backend nccl", Spec(backend="nccl")),
        ("--backend=none", Spec(backend="none")),
        ("--driver master", Spec(driver="master")),
        ("--driver 'master'", Spec(driver="master")),
        ("--seed 7", Spec(seed=7)),
        ("--seed 0", Spec(seed=0)),
        ("--seed -7", Spec(seed=-7)),
        ("-t 30", Spec(timeout=30.0)),
        ("--timeout 0.5", Spec(timeout=0.5)),
        ("--launcher ray", Spec(launcher="ray")),
        ("--isolate-gpus", Spec(isolate_gpus=True)),
        ("--preload fractions,xml.dom", Spec(preload=("fractions", "xml.dom"))),
        (
            "-n 3 -g 0,1 --backend gloo --driver master --seed 1 -t 9 --launcher local --isolate-gpus",
            Spec(3, (0, 1), "gloo", "master", 1, 9.0, "local", True),
        ),
    ],
)
def test_the_line_of_dist_init(line, means):
    assert parse_init(line) == means


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("4", "`%dist_init -n 4` starts 4 workers"),
        ("-n", "-n/--num-processes: expected one argument"),
        ("-n four", "'four'"),
        ("-n 2.5", "'2.5'"),
        ("--num 4", "--num"),
        ("-g", "-g/--gpu-ids: expected at least one argument"),
        ("-g a", "-g: 'a' is not a list of numbers such as 0,1"),
        ("-g 0,,1", "'0,,1' is not a list"),
        ("-g ''", "'' is not a list"),
        ("-g [0,1", "'[0,1' is not a list"),
        ("-g 0-2", "'0-2' is not a list"),
        ("--backend mpi", "mpi"),
        ("--seed x", "'x'"),
        ("-t never", "'never' is not a number of seconds"),
        ("-t 0", "more than 0 s"),
        ("--driver", "--driver: expected one argument"),
        ("--verbose", "--verbose"),
        ("--driver 'master", "No closing quotation"),
    ],
)
def test_errors_of_dist_init_say_how_to_write_it(line, says):
    with pytest.raises(UsageError) as raised:
        parse_init(line)
    assert says in str(raised.value)
    assert "; write: %dist_init [-n N] [-g 0,1] [--backend gloo|nccl|none]" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-n 0", "1 to 1000 workers, not 0"),
        ("-n -1", "1 to 1000 workers, not -1"),
        ("-g 0,0", "name each GPU once"),
        ("--driver worker1", "worker's name"),
        ("--driver ''", "non-empty"),
        ("--preload json,no-name", "'no-name' is not the name of a module"),
    ],
)
def test_what_cannot_be_started_is_refused(line, says):
    with pytest.raises(UsageError) as raised:
        parse_init(line)
    assert says in str(raised.value)


def test_all_options_of_dist_init_can_be_completed():
    values = {"--backend": "gloo", "--driver": "master", "--launcher": "ray", "--isolate-gpus": "", "--preload": "json"}
    values["--sync-code"] = ""
    values |= {"--device-map": "worker1:0=1", "--ports": "40000-40010", "--placement": "spread"}
    needs = {"--host": "join", "--ports": "join", "--invitation": "join", "--sync-code": "join"}
    needs |= dict.fromkeys(("--address", "--gpus-per-worker", "--placement"), "ray")
    for option in READERS["%dist_init"].options:
        launcher = f"--launcher {needs[option]}" if option in needs else ""
        assert parse_init(f"{option} {values.get(option, '1')} {launcher}") != parse_init(launcher)
    with pytest.raises(UsageError, match=r"--ports: '1-x' is no range of ports such as 40000-40100"):
        parse_init("--launcher join --ports 1-x")


# -- %dist_memory -------------------------------------------------------------------------------


def test_the_line_of_dist_memory():
    assert vars(read("%dist_memory", "")) == {"targets": None, "all": False}
    assert vars(read("%dist_memory", "worker1 -v")) == {"targets": "worker1", "all": True}
    assert vars(read("%dist_memory", "--all")) == {"targets": None, "all": True}
    assert vars(read("%dist_memory", "0, notebook")) == {"targets": "0, notebook", "all": False}
    with pytest.raises(UsageError, match=r"%dist_memory \[TARGET\] \[-v \| --all\]"):
        read("%dist_memory", "--everything")
