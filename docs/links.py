"""Badges and links to the repository, for README.md and docs/, from its one address in pyproject.toml.

A page has a place for each kind, which is empty while pyproject.toml has no address:

    <!-- links: badges -->
    <!-- end of links -->
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

__all__ = ["filled", "project"]

_TOUR = "notebooks/00_tour.ipynb"
_PLACE = re.compile(r"(?<=<!-- links: )(\w+) -->\n.*?(?=<!-- end of links -->)", re.DOTALL)


def project(root: Path) -> dict[str, Any]:
    """Return the table `project` of the pyproject.toml in ``root``."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def filled(page: str, project: dict[str, Any]) -> str:
    """Return a page with the links in its places, or with empty places if ``project`` has no address.

    ``project`` is the table of pyproject.toml, and its address is urls.Repository: https://github.com/OWNER/NAME.
    """
    address = project.get("urls", {}).get("Repository", "").rstrip("/")
    kinds = {"badges": _badges, "try": _try, "issues": _issues}

    def text(place: re.Match[str]) -> str:
        kind = place[1]
        return f"{kind} -->\n" + (f"{kinds[kind](address, project)}\n" if address else "")

    return _PLACE.sub(text, page)


def _badges(address: str, project: dict[str, Any]) -> str:
    torch = next(need.removeprefix("torch") for need in project["dependencies"] if re.match(r"torch[<>=]", need))
    tests = f"[![tests]({address}/actions/workflows/tests.yml/badge.svg)]({address}/actions/workflows/tests.yml)"
    return "\n".join(
        [
            tests,
            _badge("Python", project["requires-python"], f"{address}#readme"),
            _badge("torch", torch, f"{address}#readme"),
            _badge("license", project["license"], f"{address}/blob/HEAD/LICENSE"),
        ]
    )


def _badge(name: str, value: str, target: str) -> str:
    picture = f"https://img.shields.io/badge/{name}-{quote(value.replace('-', '--'), safe='')}-blue"
    return f"[![{name} {value}]({picture})]({target})"


def _try(address: str, project: dict[str, Any]) -> str:
    repository = address.removeprefix("https://github.com/")
    binder = f"https://mybinder.org/v2/gh/{repository}/HEAD?labpath={quote(_TOUR, safe='')}"
    colab = f"https://colab.research.google.com/github/{repository}/blob/HEAD/{_TOUR}"
    install = f"`%pip install git+{address}`"
    return f"Try the tour [on Binder]({binder}), or [in Colab]({colab}) with a first cell {install}."


def _issues(address: str, project: dict[str, Any]) -> str:
    return f"If you find no answer here, [ask or report a fault]({address}/issues)."
