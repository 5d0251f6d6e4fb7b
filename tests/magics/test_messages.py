"""The messages of errors of the magics that no other test provokes, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbdist.errors import UsageError
from nbdist.magics import dist_magics, lines
from nbdist.magics.dist_magics import DistMagics
from nbdist.magics.session import NotebookSession

SESSION = SimpleNamespace(cluster=lambda: None)


@pytest.fixture
def magics(monkeypatch):
    monkeypatch.setattr(dist_magics, "read_logs", lambda *_: [])
    return DistMagics(InteractiveShell(), SESSION)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("distributed", ("0", "x"), r"%%distributed takes no target, because it runs on all workers"),
        ("rank", ("", "x"), r"%%rank needs ranks: write %%rank\[0,1\], or %%distributed for all workers"),
        ("dist_push", ("model rate",), r"the notebook has no variable model, rate; define it here before %dist_push"),
        ("dist_log", ("--save /nowhere/lines",), r"what the workers printed cannot be saved: .* '/nowhere/lines'"),
    ],
)
def test_magics_that_are_refused(magics, name, arguments, text):
    with pytest.raises(UsageError, match=text):
        getattr(magics, name)(*arguments)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda: lines.parse_diff("  "), r"%dist_diff needs an expression to compare; write: "),
        (
            lambda: lines.parse_compare("--exact"),
            r"%dist_compare needs an expression to compare; write: %dist_compare EXPR",
        ),
        (
            lambda: lines.read("%%watch", "-o a.b"),
            r"-o/--out: needs the name of a variable, not 'a.b'; write: %%watch ",
        ),
        (lambda: lines.read("%%watch", "-o class"), r"-o/--out: needs the name of a variable, not 'class'"),
        (
            lambda: lines.read("%dist_log", "--cell 1000000000"),
            r"'1000000000' is not a whole number from 1 to 999999999",
        ),
        (NotebookSession.cluster, r"no cluster runs; start one with %dist_init -n 4"),
    ],
)
def test_lines_that_are_refused(read, text):
    with pytest.raises(UsageError, match=text):
        read()
