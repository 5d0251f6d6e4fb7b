"""Makes what is read out of the package: the pages of magics and of error messages, and links to the repository."""

from __future__ import annotations

import base64
import inspect
import json
import shutil
import sys
import textwrap
from pathlib import Path

from nbdist.magics.dist_magics import DistMagics

sys.path.insert(0, str(Path(__file__).parent))  # it is missing under PYTHONSAFEPATH
import links
import messages

HERE = Path(__file__).parent
ROOT = HERE.parent

LINKED = (ROOT / "README.md", HERE / "index.md", HERE / "troubleshooting.md")
"""The pages with places for `links`."""


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
            text = inspect.getdoc(getattr(DistMagics, method)) or ""
            found[name] = f"## `{sign}{name}`\n\n```text\n{text}\n```\n"
    return "\n".join(found.values())


def errors_page() -> str:
    """Return a page with all classes of errors and their messages, and an example of each message."""
    classes, examples = messages.error_classes(), messages.examples()
    lines = [
        "# All errors",
        "",
        "Each class of errors says whose fault it is; each message says what happened, with the values, here `…`.",
        "The indented text below a message is an example. Python's own classes and the warnings come last.",
        "[Troubleshooting](troubleshooting.md) has longer answers.",
        "",
    ]
    for name, templates in sorted(messages.templates().items(), key=lambda item: (item[0] not in classes, item[0])):
        lines += [f"## {name}", ""]
        lines += [classes[name], ""] if name in classes else []
        for template in sorted(templates, key=str.casefold):
            example = examples.get(name, {}).get(template, template)
            lines += ["```text", template]
            lines += [textwrap.indent(example, "    ")] if "…" in template and example != template else []
            lines += ["```"]
        lines.append("")
    return "\n".join(lines)


def make() -> None:
    """Write the pages and the links, and copy the notebooks."""
    generated = HERE / "generated"
    generated.mkdir(exist_ok=True)
    (generated / "magics.md").write_text(magics(), encoding="utf-8")
    (HERE / "errors.md").write_text(errors_page(), encoding="utf-8")
    copy_notebooks(HERE / "notebooks_saved")
    project = links.project(ROOT)
    for page in LINKED:
        page.write_text(links.filled(page.read_text(encoding="utf-8"), project), encoding="utf-8")


if __name__ == "__main__":
    make()
