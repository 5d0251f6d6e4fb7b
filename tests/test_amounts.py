"""Amounts in words, and rows in columns: the one form that they have in every text of nbdist."""

import pytest

from nbdist.amounts import counted, duration, plural, size
from nbdist.columns import aligned


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (4000, "4.0 KB"), (1_550_000, "1.6 MB"), (250 * 10**6, "250 MB"), (10**13, "10.0 TB")],
)
def test_bytes(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (50e-6, "50 µs"), (0.001, "1.0 ms"), (0.25, "250.0 ms"), (1, "1.00 s"), (75.125, "75.12 s")],
)
def test_seconds(seconds, text):
    assert duration(seconds) == text


def test_numbers_of_things():
    assert [counted(number, "block") for number in (0, 1, 2, 1200)] == [
        "0 blocks",
        "1 block",
        "2 blocks",
        "1,200 blocks",
    ]
    assert counted(2, "leaf", "leaves") == "2 leaves"
    assert counted(1, "worker is", "workers are") == "1 worker is"
    assert [plural(number, "waits", "wait") for number in (1, 2)] == ["waits", "wait"]


def test_columns():
    assert aligned([("a", "12", ""), ("bcd", "3", "x")]) == ["a    12", "bcd  3   x"]
    assert aligned([]) == []
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a",), ()])
