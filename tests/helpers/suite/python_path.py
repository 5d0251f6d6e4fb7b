"""Where processes that tests start find their modules."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[2]
"""The folder of all tests, from which `helpers` is imported."""


def python_path(*folders: Path | str) -> dict[str, str]:
    """Return PYTHONPATH with folders before those that it has: `make quick` finds the nbdist under test by these."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))}
