"""Faults planted in the package are found by the tests that are named beside them."""

import shutil
from pathlib import Path

import planted
import pytest
from planted import FAULTS, SABOTAGE, found, type_errors

ALL = {**FAULTS, **SABOTAGE}


def test_every_fault_still_fits_the_code_and_names_a_test_that_is_there(tmp_path):
    for name, fault in ALL.items():
        file = tmp_path / fault.file
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(planted.PACKAGE / fault.file, file)
        planted.change(fault, tmp_path)
        compile(file.read_text(), fault.file, "exec")
        test, _, function = fault.test.partition("::")
        assert f"def {function}" in (Path(planted.TESTS) / test).read_text(), name


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_fault_imports_and_type_checks():
    assert type_errors(ALL.values()) == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    assert found(FAULTS[name]), f"{FAULTS[name].test} passes all the same"
