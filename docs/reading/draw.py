"""Draw thirty functions and thirty error messages at random, as questions for a reader who has not seen the code.

    python docs/reading/draw.py COMMIT [PACKAGE ...] > questions.md

The first eight hexadecimal digits of COMMIT seed the drawing, so anybody can repeat it. With packages ("rpc swarm"),
ten of each are drawn from these alone. A function comes with its module, its signature and its docstring, but no code.
A message comes with the kind of its error and the code of its text, in which {...} stands for values.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nbdist"
ERRORS = (
    "Error",
    "Lost",
    "Timeout",
    "Unused",
    "Full",
    "NoRoute",
    "NaN",
    "Interrupted",
    "Initialized",
    "Unique",
    "Worker",
)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the line that defines a function, with its annotations."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{word} {node.name}({ast.unparse(node.args)}){returns}"


def functions(tree: ast.AST, around: str = "") -> Iterator[str]:
    """Yield a question for each function that has a docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            yield from functions(node, f"class {node.name}:  # {first}\n")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
                yield f'{around}{decorators}{signature(node)}:\n    """{text}"""'
            yield from functions(node, around)
        else:
            yield from functions(node, around)


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield a question for each error that is made with a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2].endswith(ERRORS):
            text = node.args[0]
            if isinstance(text, ast.JoinedStr) or (isinstance(text, ast.Constant) and isinstance(text.value, str)):
                written = ast.unparse(text)
                if len(written) > 20:
                    yield f"{ast.unparse(node.func)}({written})"


def main() -> None:
    """Print the questions."""
    commit, packages = sys.argv[1][:8], sys.argv[2:]
    count = 10 if packages else 30
    found: dict[str, list[str]] = {"functions": [], "messages": []}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0]
        if packages and name.removesuffix(".py") not in packages:
            continue
        tree = ast.parse(path.read_text())
        where = f"# nbdist/{path.relative_to(PACKAGE)}\n"
        found["functions"] += [where + each for each in functions(tree)]
        found["messages"] += [where + each for each in messages(tree)]
    chance = random.Random(int(commit, 16))
    print(f"# Drawn with {commit} from {len(found['functions'])} functions and {len(found['messages'])} messages")
    for title, all_of_them in found.items():
        print(f"\n## {title.capitalize()}")
        for number, question in enumerate(chance.sample(all_of_them, min(count, len(all_of_them))), 1):
            print(f"\n{number}.\n\n```python\n{question}\n```")


if __name__ == "__main__":
    main()
