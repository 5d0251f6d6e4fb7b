"""Badges and links to the repository follow from one address in pyproject.toml; without it there are none."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/index.md", "docs/troubleshooting.md"]
ADDRESS = "https://github.com/some/where"


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("links")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_links_that_follow_from_pyproject(page, links):
    text = (ROOT / page).read_text(encoding="utf-8")
    project = links.project(ROOT)
    assert text == links.filled(text, project), "run `python docs/make_pages.py`"
    if not project.get("urls"):
        assert not re.search(r"shields\.io|mybinder\.org/v2|colab\.research|/issues\b", text)


@pytest.mark.parametrize("page", PAGES)
def test_an_address_fills_the_places_of_a_page_and_its_removal_empties_them(page, links):
    text = (ROOT / page).read_text(encoding="utf-8")
    project = links.project(ROOT)
    project["urls"] = {"Repository": f"{ADDRESS}/"}
    full = links.filled(text, project)
    assert ADDRESS in full or "gh/some/where/HEAD" in full
    assert "//" not in full.replace("://", "")
    assert links.filled(full, project) == full
    assert links.filled(full, {**project, "urls": {}}) == links.filled(text, {**project, "urls": {}})


def test_badges_say_what_pyproject_says(links):
    project = {"requires-python": ">=3.11", "dependencies": ["torchfix>=1", "torch>=2.10"], "license": "BSD-3-Clause"}
    page = "<!-- links: badges -->\n<!-- end of links -->\n"
    full = links.filled(page, {**project, "urls": {"Repository": ADDRESS}})
    assert "badge/Python-%3E%3D3.11-blue" in full
    assert "badge/torch-%3E%3D2.10-blue" in full
    assert "badge/license-BSD--3--Clause-blue" in full


def test_what_the_links_name_is_there(links):
    project = {**links.project(ROOT), "urls": {"Repository": ADDRESS}}
    full = "".join(links.filled((ROOT / page).read_text(encoding="utf-8"), project) for page in PAGES)
    workflow = re.search(r"actions/workflows/([\w.]+)/badge", full)[1]
    assert ".ci/run" in (ROOT / ".github/workflows" / workflow).read_text()
    for name in re.findall(r"blob/HEAD/([\w./]+)", full):
        assert (ROOT / name).exists(), name
