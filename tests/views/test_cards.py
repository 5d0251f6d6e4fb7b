import pytest
import torch

from nbdist.rpc.peeking import look
from nbdist.views import cards
from nbdist.views.cards import Facts
from nbdist.wire.messages import State

TENSOR = State("torch", "Tensor", [2, 3], "float32", "cpu", True, "MulBackward0", 24)


def test_the_text_is_the_same_however_far_the_reference_has_come():
    assert cards.text(Facts("worker1", "pending")) == cards.text(Facts("worker1", "confirmed", TENSOR))
    assert cards.text(Facts("worker1", "pending")) == "<RRef on worker1>"


def test_a_card_tells_all_that_is_known():
    told = cards.card(Facts("worker1", "confirmed", TENSOR))
    for part in ("worker1", "Tensor float32(2, 3)", "cpu", "True", "MulBackward0", "24 B", "confirmed"):
        assert part in told
    assert "not known yet" in cards.card(Facts("worker1", "pending"))
    assert "3" in cards.card(Facts("worker1", "here", TENSOR, forks=3))
    failed = cards.card(Facts("worker1", "failed", why="it <raised>"))
    assert "it &lt;raised&gt;" in failed
    assert "ValueError: no" in cards.card(Facts("w", "confirmed", State("builtins", "ValueError", error="no")))


def test_a_table():
    rows = [("0", Facts("worker0", "confirmed", TENSOR)), ("1", Facts("<worker1>", "pending"))]
    told = cards.table(rows, 2)
    assert told.count("<tr>") == 3
    assert "&lt;worker1&gt;" in told
    assert "and 100 more" in cards.table([("", Facts("w", "here"))] * 200, 300)


def test_what_was_seen():
    told = cards.peek_html(look(torch.tensor([1.0, float("nan"), 3.0]), "w"))
    assert "min <b>1</b>" in told
    assert "NaN <b>1</b>" in told
    assert "<svg" in told
    told = cards.peek_html(look(torch.nn.Linear(3, 2), "w"))
    assert "weight" in told
    assert "float32(2, 3)" in told
    assert "&lt;b&gt;" in cards.peek_html(look("<b>", "w"))


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (123_456, "123 KB"), (25_600_000, "25.6 MB")]
)
def test_bytes_for_people(count, told):
    assert cards.size(count) == told
