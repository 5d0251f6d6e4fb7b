"""Checks a cell for workers before it is sent: its syntax, and that it uses no magic of the notebook."""

from __future__ import annotations

import ast
from collections.abc import Container, Sequence
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.page_lines import Page, moved_down
from nbdist.errors import UsageError

# IPython turns a magic into a call of one of these methods.
_MARKS = {"run_line_magic": "%", "run_cell_magic": "%%"}


class _BadCell(UsageError):
    """A cell for workers has a syntax error, which the notebook shows like one in a cell of its own."""

    shown: Sequence[str] = ()  # the lines to show

    def _render_traceback_(self) -> list[str]:
        return list(self.shown)


def check(shell: Any, code: str, own: Container[str], page: Page) -> None:
    """Raise UsageError if a cell for workers has a syntax error, or uses one of the notebook's ``own`` magics.

    For a syntax error, the class of the error also has its name, such as SyntaxError. ``page`` is the whole cell;
    line numbers are counted from its top.
    """
    lines = page.lines_above(code) or 0
    transformed = moved_down(TransformerManager().transform_cell(code), lines)
    # So that the traceback finds the cell's lines.
    name = shell.compile.cache(transformed, labels.cell_number(), raw_code=moved_down(code, lines))
    try:
        compile(transformed, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError, OverflowError) as error:  # a lone surrogate is a ValueError
        bad = type(type(error).__name__, (_BadCell,), {})(str(error))  # the notebook shows the name of the class
        bad.shown = shell.SyntaxTB.structured_traceback(type(error), error.with_traceback(None), None)
        raise bad from None
    if (magic := _find_magic(transformed, own)) is not None:
        raise UsageError(
            f"{magic} is a magic of the notebook, and this cell runs on workers: write {magic} in a cell of its own"
        )


def _find_magic(transformed: str, own: Container[str]) -> str | None:
    """Return the first magic among the names in ``own`` that code uses, such as ``%%remote``; None if there is none.

    ``transformed`` is the code as IPython has transformed it.
    """
    # Most cells have no magic, and are not parsed.
    if not any(method in transformed for method in _MARKS):
        return None
    try:
        tree = ast.parse(transformed)
    except (SyntaxError, ValueError):  # the text below a magic need not be Python, as in %%bash
        return None
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(attr=kind), [ast.Constant(str(name)), *_]) if name in own and kind in _MARKS:
                return f"{_MARKS[kind]}{name}"
            # The text below a magic such as %%time.
            case ast.Call(ast.Attribute(attr="run_cell_magic"), [*_, ast.Constant(str(body))]):
                if (found := _find_magic(TransformerManager().transform_cell(body), own)) is not None:
                    return found
    return None
