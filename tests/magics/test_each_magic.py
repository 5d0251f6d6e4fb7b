"""Each magic is found wherever somebody looks for it: in the docs, in `%dist`, by completion and by `?`."""

import re
from pathlib import Path

import pytest

from nbdist.magics import overview
from nbdist.magics.dist_magics import DistMagics
from nbdist.magics.lines import READERS

DOCS = Path(__file__).parents[2] / "docs"
SIGNS = {"line": "%", "cell": "%%"}
MAGICS = sorted({f"{SIGNS[kind]}{name}" for kind, magics in DistMagics.magics.items() for name in magics})


@pytest.mark.parametrize("magic", MAGICS)
def test_it_has_a_row_a_question_a_parser_and_a_line_of_the_how_to(magic):
    function = getattr(DistMagics, DistMagics.magics["cell" if magic.startswith("%%") else "line"][magic.strip("%")])
    assert (function.__doc__ or "").strip(), "it has no docstring, which `?` shows"
    assert magic in READERS, "nbdist/magics/lines.py has no parser for it, so nothing is completed"
    asked = {name for _, names in overview.BY_QUESTION for name in names}
    assert magic in asked | {"%dist"}, "`BY_QUESTION` in nbdist/magics/overview.py does not have it"
    table = (DOCS / "api" / "magics.md").read_text()
    row = rf"^\| `%?{magic}\b"
    assert re.search(row, table, re.MULTILINE), "docs/api/magics.md has no row for it"
    pages = [DOCS / "coming_from.md", *(DOCS / "howto").glob("*.md")]
    used = any(re.search(rf"(?<!%){magic}\b", page.read_text()) for page in pages)
    assert used, "no page of docs/howto uses it"


@pytest.mark.parametrize("magic", MAGICS)
def test_its_usage_names_its_options_and_targets(magic):
    reader = READERS[magic]
    shown = [action.option_strings for action in reader._actions if {*action.option_strings} & {*reader.options}]
    for spellings in shown:
        named = [each for each in spellings if re.search(rf"(?<![\w-]){each}\b", reader.usage)]
        assert named, f"its usage does not name {spellings}"
    assert reader.takes_targets == bool(re.search(r"TARGET|\[0,1\]", reader.usage))


def test_no_name_stands_where_there_is_no_magic():
    asked = {name for _, names in overview.BY_QUESTION for name in names}
    assert asked <= set(MAGICS)
    assert set(READERS) <= set(MAGICS)
