"""Finds the messages of the package in its source, and an example of each in ``messages.json``.

A message is the text that the source gives to an error or a warning. Its template is that text with … for the values.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nbdist import errors

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = ROOT / "nbdist"
EXAMPLES = HERE / "messages.json"

WARNINGS = "Warnings"
"""The kind of all warnings; the kind of an error is the name of its class."""

_parse = functools.cache(ast.parse)


class Message(NamedTuple):
    """A message in the source of one module: its kind, its template, and the expression that makes it."""

    kind: str
    template: str
    text: ast.expr


def error_classes() -> dict[str, str]:
    """Return the first line of the docstring of each class of errors that a user can meet, by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(_parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if bases & vars(errors).keys() or node.name in vars(errors):
                    found[node.name] = (ast.get_docstring(node) or "").split("\n")[0]
    return found


def is_of_python(kind: str) -> bool:
    """Return whether a kind of messages is a class of errors that Python has."""
    found = getattr(builtins, kind, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def template(text: ast.expr) -> str | None:
    """Return a message with … for its values, or None if it has no words of its own."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return text.value
    if isinstance(text, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in text.values]
        return "".join(map(str, parts))
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
        left, right = template(text.left), template(text.right)
        return (left or "…") + (right or "…") if left or right else None
    return None


def in_module(source: str, classes: dict[str, str]) -> Iterator[Message]:
    """Yield each message of a module's source: the first argument of an error or a warning, if it has words."""
    tree = _parse(source)
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (kind := _kind(node.func, classes)) is not None:
            first = node.args[0]
            for text in (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,):
                words = template(constants.get(ast.unparse(text), text))
                if words and re.search(r"\w{3}", words):
                    yield Message(kind, " ".join(words.split()), text)


def _kind(called: ast.expr, classes: dict[str, str]) -> str | None:
    """Return the kind of the messages of which a call of ``called`` makes one; None if it makes something else."""
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name == "warn" and ast.unparse(called) == "warnings.warn":
        return WARNINGS
    return name if name in classes or (isinstance(called, ast.Name) and is_of_python(name)) else None


def templates() -> dict[str, set[str]]:
    """Return the templates of all messages of the package, by their kind."""
    classes = error_classes()
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for message in in_module(path.read_text(encoding="utf-8"), classes):
            found[message.kind].add(message.template)
    return found


def examples() -> dict[str, dict[str, str]]:
    """Return an example of each message that has one, by its kind and its template."""
    found: dict[str, dict[str, str]] = json.loads(EXAMPLES.read_text(encoding="utf-8"))
    return found


def matches(text: str, template: str, value: str = ".*") -> bool:
    """Return whether a text is a template with values, each of which matches the regular expression `value`."""
    parts = [re.escape(part).replace(r"\ ", " *") for part in re.split("…+", template)]
    return re.fullmatch(value.join(parts), " ".join(text.split())) is not None
