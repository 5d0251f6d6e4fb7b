"""Makes tracebacks count the lines of code from the top of the page's cell, as the editor of the page does.

::

    page's cell          what a magic gets      what IPython compiles
    1  %%capture out
    2  %%remote 0
    3                    1
    4  x = 1             2  x = 1               1  x = 1
    5  1 / 0             3  1 / 0               2  1 / 0     moved by 3 lines: an error is in line 5

Empty lines before the code would not help: IPython removes them. So this module moves the syntax tree that IPython
compiles, and puts empty lines before the code where tracebacks look for its text.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from nbdist.cluster.jupyter.versions import store_source


class Page(NamedTuple):
    """The text of a cell, and the number of lines above it in the page's cell."""

    text: str
    above: int = 0

    def lines_above(self, code: str) -> int | None:
        """Return how many lines of the notebook's cell stand above the first line of ``code`` that is not empty.

        None if ``text`` does not end with ``code``: then a program made the code.
        """
        if (found := lines_before(self.text, code)) is None:
            return None
        return self.above + found + sum(1 for _ in takewhile(lambda line: not line.strip(), code.splitlines()))


def lines_before(text: str, code: str) -> int | None:
    """Return how many lines of ``text`` stand before ``code``; None if the text does not end with the code.

    Example:
        >>> lines_before("%%capture out\\n%%remote 0\\nx = 1", "x = 1")
        2
    """
    text, code = text.rstrip(), code.rstrip()
    above = text[: len(text) - len(code)]
    return above.count("\n") if code and text.endswith(code) and above[-1:] in ("", "\n") else None


def moved_down(code: str, lines: int) -> str:
    """Return the code below this many empty lines, for a compiler that keeps them."""
    return "\n" * lines + code


def follow_page(compiler: Any, page: Callable[[], Page | None]) -> None:
    """Make IPython's compiler count lines from the top of the notebook's cell that has the code.

    ``page()`` returns the cell that runs; None leaves the line numbers as they are.
    """
    plain_cache, plain_parse = compiler.cache, compiler.ast_parse
    moves: dict[str, int] = {}

    def lines_to_move(code: str) -> int:
        found = page()
        return (found.lines_above(code) or 0) if found is not None else 0

    # Replaces the compiler's method that names the code and gives its text to tracebacks.
    def cache(transformed: str, number: int = 0, raw_code: str | None = None) -> Any:
        raw = transformed if raw_code is None else raw_code
        kept = sum(1 for _ in takewhile(lambda line: not line.strip(), transformed.splitlines()))
        lines = max(0, lines_to_move(raw) - kept)  # ipykernel's debugger, once it runs, lets IPython keep empty lines
        above = lines - (Page(raw).lines_above(raw) or 0)
        # IPython derives the file's name from the code. Moved code gets a name of its own.
        name = plain_cache(transformed, number, raw_code=moved_down(raw, above) if above > 0 else raw_code)
        moves.pop(name, None)
        if lines > 0:
            moves[name] = lines
            size, time, cached, file = linecache.cache[name]  # type: ignore[misc]
            store_source(name, (size + lines, time, ["\n"] * lines + cached, file))
        return name

    # Replaces the method that makes the tree.
    def ast_parse(source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        # %%time parses its body without a file name.
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
