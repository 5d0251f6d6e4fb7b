"""Configures Sphinx, which makes the documentation: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbdist

sys.path.insert(0, str(Path(__file__).parent))
import make_pages

project = "nbdist"
author = "the nbdist team"
copyright = "the nbdist team"
release = version = nbdist.__version__

extensions = [
    "myst_nb",  # pages in Markdown, and notebooks
    "sphinx.ext.autodoc",  # API pages from docstrings
    "sphinx.ext.napoleon",  # docstrings with sections in Google's style
    "sphinx.ext.viewcode",  # links from a name to its source
    "sphinx_copybutton",  # a button that copies an example
]
exclude_patterns = ["generated"]
html_theme = "furo"
html_title = f"nbdist {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
# Notebooks are shown as they were saved. `make test` runs them and compares.
nb_execution_mode = "off"
# The views of nbdist are widgets. A page shows the picture that a saved notebook has beside each.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
# What workers print in a traceback's place is no traceback that a highlighter knows.
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]

default_role = "py:obj"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


make_pages.make()


def leave_out(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the methods of torch's modules that a RemoteModule refuses."""
    return True if "_refusal" in getattr(obj, "__qualname__", "") else None


PLACES = {
    "../notebooks/": "notebooks_saved/",
    "../SECURITY.md": "security.md",
    "../benchmarks/README.md": "measured.md",
}
"""The targets of links that lead out of docs/, as the repository needs them, and the pages with the same text."""


def move_links(app: Any, page: str, source: list[str]) -> None:
    """Turn links that lead out of docs/ into links to pages. Called with the text of each page."""
    for outside, inside in PLACES.items():
        source[0] = re.sub(rf"(?<=\]\()((?:\.\./)?){re.escape(outside)}", rf"\1{inside}", source[0])


def setup(app: Any) -> None:
    """Have Sphinx call the functions above."""
    app.connect("autodoc-skip-member", leave_out)
    app.connect("source-read", move_links)
