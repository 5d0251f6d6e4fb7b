"""The docstrings: how they begin, and that the examples of public names run.

An example is a doctest. It runs on ``worker0`` of a world of two. ``rpc``, ``dist_autograd`` and ``torch`` are there.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import nbdist
from nbdist import autograd, rpc
from nbdist.testing import World

PACKAGE = Path(nbdist.__file__).parent
EXAMPLES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text()
)
RIDDLES = re.compile(r"(It|What|Who|Whether|How|Those|That|The same|One more|So many)\b")
"""Words with which no docstring begins: whoever reads it first does not know what they stand for."""


def test_no_docstring_begins_with_a_riddle():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:  # a docstring, or the string below an attribute
                case ast.Expr(value=ast.Constant(value=str(text))) if RIDDLES.match(text.strip()):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch, "rpc": rpc, "dist_autograd": autograd, "nbdist": nbdist, "World": World}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(module, globs=names):
        if test.examples:
            with World(2) as world, world[0].activate():
                runner.run(test)
    assert not runner.failures
