"""What pages about the code name is there: files, classes, their members, and other names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THROUGH_THE_CODE = [ROOT / "docs" / f"{name}.md" for name in ("a_call", "a_cell", "a_gradient", "a_token")]
PAGES = [*THROUGH_THE_CODE, ROOT / "CONTRIBUTING.md"]


def found(pattern):
    """Each match of a pattern in the pages, with the pages' names."""
    return sorted({(page.name, match) for page in PAGES for match in re.findall(pattern, page.read_text("utf-8"))})


@pytest.fixture(scope="module")
def classes():
    """The members of each class of nbdist, by its name; those of several classes of one name together."""
    members: dict[str, set[str]] = {}
    for path in ROOT.glob("nbdist/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = members.setdefault(node.name, set())
                for each in ast.walk(node):
                    match each:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            own.add(name)
                        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(ast.Name("self"), name):
                            own.add(name)
    return members


@pytest.fixture(scope="module")
def words():
    """All words of the code, of the tests and of the Makefile."""
    paths = [*ROOT.glob("nbdist/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "Makefile"]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text("utf-8"))}


@pytest.mark.parametrize(("page", "path"), found(r"`((?:nbdist|tests)/[\w/]+\.py)`"))
def test_the_files_are_there(page, path):
    assert ROOT.joinpath(path).is_file()


@pytest.mark.parametrize(("page", "name"), found(r"\b_?[A-Z][a-z][A-Za-z]+\.\w+"))
def test_the_members_are_there(page, name, classes):
    cls, member = name.split(".")
    assert member in classes[cls], f"{cls} has no {member}"


@pytest.mark.parametrize(("page", "name"), found(r"`([A-Za-z_]\w+)(?:\(\))?`"))
def test_the_other_names_are_there(page, name, words):
    assert name in words


@pytest.mark.parametrize("page", THROUGH_THE_CODE, ids=lambda page: page.name)
def test_the_pages_name_something(page):
    assert len(re.findall(r"\b_?[A-Z][a-z][A-Za-z]+\.\w+", page.read_text("utf-8"))) > 20
