"""What the tests of encoding share."""

import pytest

from nbdist.wire import quick


@pytest.fixture
def usual_way(monkeypatch):
    """Have usual messages encoded and decoded in the short way, though NBDIST_USUAL=0 has all others take the long."""
    monkeypatch.setattr(quick, "USUAL_IS_ON", True)
