"""Makes the pages that are read out of the package: the magics and their options, and all error messages."""

from __future__ import annotations

import ast
import base64
import inspect
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from nbdist import errors
from nbdist.magics.commands import DistMagics

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = ROOT / "nbdist"

_ALIASES = {"dist_debug"}


def copy_notebooks(to: Path) -> None:
    """Copy the saved notebooks to a folder, and the pictures that are attached to their texts beside them."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            for name, kinds in cell.pop("attachments", {}).items():
                (to / name).write_bytes(base64.b64decode(kinds["image/png"]))
                cell["source"] = [line.replace(f"attachment:{name}", name) for line in cell["source"]]
        (to / path.name).write_text(json.dumps(notebook), encoding="utf-8")


def magics() -> str:
    """Return a section for each magic, with its help."""
    found: dict[str, str] = {}
    for kind, sign in (("line", "%"), ("cell", "%%")):
        for name, method in DistMagics.magics[kind].items():
            if name not in _ALIASES:
                text = inspect.getdoc(getattr(DistMagics, method)) or ""
                found[name] = f"## `{sign}{name}`\n\n```text\n{text}\n```\n"
    return "\n".join(found.values())


def error_classes() -> dict[str, str]:
    """Return the first line of the docstring of each class of errors that a user can meet, by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if bases & (set(errors.__all__) | {"NbdistError"}) or node.name in errors.__all__:
                    found[node.name] = (ast.get_docstring(node) or "").split("\n")[0]
    return found


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


def messages(classes: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each message that the package can raise, behind the name of its class."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = ast.unparse(node.func).rpartition(".")[2]
                text = template(node.args[0]) if name in classes else None
                if text and re.search(r"\w{3}", text):
                    yield name, " ".join(text.split())


def errors_page() -> str:
    """Return a page with all classes of errors and their messages."""
    classes = error_classes()
    found: dict[str, set[str]] = defaultdict(set)
    for name, text in messages(classes):
        found[name].add(text)
    lines = [
        "# All errors",
        "",
        "Each class of errors says whose fault it is; each message says what happened, with the values, here `…`.",
        "[Troubleshooting](troubleshooting.md) has longer answers.",
        "",
    ]
    for name in sorted(found):
        lines += [f"## {name}", "", classes[name], ""]
        for text in sorted(found[name], key=str.casefold):
            lines += ["```text", text, "```"]
        lines.append("")
    return "\n".join(lines)


def make() -> None:
    """Write the pages, and copy the notebooks."""
    generated = HERE / "generated"
    generated.mkdir(exist_ok=True)
    (generated / "magics.md").write_text(magics(), encoding="utf-8")
    (HERE / "errors.md").write_text(errors_page(), encoding="utf-8")
    copy_notebooks(HERE / "notebooks_saved")


if __name__ == "__main__":
    make()
