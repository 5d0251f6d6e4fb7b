"""Faults planted in the engine and the transport are found by the tests that are named beside them."""

import pytest
from planted import FAULTS, found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    assert found(FAULTS[name]), f"{FAULTS[name].test} passes all the same"
