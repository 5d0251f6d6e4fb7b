"""Counts the lines of code from the top of the page's cell, as its editor does.

::

    page's cell          what a magic gets      what IPython compiles
    1  %%capture out
    2  %%remote 0
    3                    1
    4  x = 1             2  x = 1               1  x = 1
    5  1 / 0             3  1 / 0               2  1 / 0     moved by 3 lines: an error is in line 5

IPython takes away the empty lines at the beginning, so lines cannot be moved by writing some there. The tree is moved
that IPython compiles, and empty lines stand before the code where tracebacks look for it.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

__all__ = ["Page", "follow_page", "lines_above", "moved_down"]


class Page(NamedTuple):
    """The text of a cell, and how many lines stand above it in the page's cell."""

    text: str
    above: int = 0

    def lines_above(self, code: str) -> int | None:
        """Return how many lines of the page's cell stand above some code, the code's empty ones at its beginning too.

        None if the code is not the end of the cell, but made by a program.
        """
        found = lines_above(self.text, code)
        if found is None:
            return None
        return self.above + found + sum(1 for _ in takewhile(lambda line: not line.strip(), code.splitlines()))


def lines_above(text: str, code: str) -> int | None:
    """Return how many lines of a text stand above the code that ends it; None if the code does not end it."""
    text, code = text.rstrip(), code.rstrip()
    above = text[: len(text) - len(code)]
    return above.count("\n") if code and text.endswith(code) and above[-1:] in ("", "\n") else None


def moved_down(code: str, lines: int) -> str:
    """Return code below so many empty lines, for what compiles it as it stands."""
    return "\n" * lines + code


def follow_page(compiler: Any, page: Callable[[], Page | None]) -> None:
    """Have IPython's compiler count lines from the top of the page's cell. ``page`` returns the cell that runs."""
    plain_cache, plain_parse = compiler.cache, compiler.ast_parse
    moves: dict[str, int] = {}

    def lines_to_move(code: str) -> int:
        found = page()
        return (found.lines_above(code) or 0) if found is not None else 0

    def cache(transformed: str, number: int = 0, raw_code: str | None = None) -> Any:
        raw = transformed if raw_code is None else raw_code
        lines = lines_to_move(raw)
        above = lines - (Page(raw).lines_above(raw) or 0)
        # The file's name comes from the code: the same code further down in another cell is another file.
        name = plain_cache(transformed, number, raw_code=moved_down(raw, above) if above > 0 else raw_code)
        moves.pop(name, None)
        if lines > 0:
            moves[name] = lines
            size, time, cached, file = linecache.cache[name]  # type: ignore[misc]
            linecache.cache[name] = size + lines, time, ["\n"] * lines + cached, file
        return name

    def ast_parse(source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        # %%time parses its body without a file.
        lines = moves.get(filename, 0) if filename != "<unknown>" else lines_to_move(source)
        try:
            tree: ast.AST = plain_parse(source, filename, symbol)
        except SyntaxError as error:
            if error.lineno is not None:
                error.lineno += lines
            if error.end_lineno is not None:
                error.end_lineno += lines
            raise
        return ast.increment_lineno(tree, lines) if lines else tree

    compiler.cache, compiler.ast_parse = cache, ast_parse
