import pytest
import torch

from nbdist.rpc.references.peeking import look
from nbdist.views import cards
from nbdist.views.cards import Facts, Rows
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


BROKEN = State("builtins", "ValueError", error="no <b>\nmore")


def test_of_a_failed_call_the_error_is_told_everywhere():
    facts = Facts("worker1", "failed", BROKEN, why="ValueError: no <b>")
    told = cards.card(facts)
    assert "failed</span>" in told
    assert "ValueError: no &lt;b&gt;" in told
    assert "more" not in told
    assert ">value<" not in told  # there is none
    assert cards.text(facts) == "<RRef on worker1, failed: ValueError: no <b>>"
    assert cards.value(BROKEN) == "ValueError: no <b>"
    assert "ValueError: no &lt;b&gt;" in cards.table(Rows(list, [("0", facts)], 1))


def test_a_reference_that_is_released_or_whose_cluster_has_ended_keeps_its_type():
    for standing, told in [
        ("released", "released"),
        ("ended", "its cluster has ended"),
        ("dead", "lost with its worker"),
    ]:
        facts = Facts("worker1", standing, TENSOR, why="WorkerLost: killed" if standing == "dead" else "")
        card = cards.card(facts)
        for part in ("worker1", "Tensor float32(2, 3)", "cpu", told):
            assert part in card
        assert cards.text(facts).startswith(f"<RRef on worker1, {told}")
    assert "WorkerLost: killed" in card


def test_several_are_printed_as_the_shell_prints_them():
    class Printed:
        def __init__(self, owner):
            self.owner = owner

        def __repr__(self):
            return f"<RRef on {self.owner}>"

    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    for count in (1, 2, 3, 4, 9):
        values = [Printed(f"worker{n}") for n in range(count)]
        items = [(str(n), Facts(value.owner, "pending")) for n, value in enumerate(values)]
        assert cards.text_of_many(Rows(list, items, count)) == pretty(values)
        assert cards.text_of_many(Rows(tuple, items, count)) == pretty(tuple(values))
        named = {f"key {n}": value for n, value in enumerate(values)}
        items = [(repr(key), Facts(value.owner, "pending")) for key, value in named.items()]
        assert cards.text_of_many(Rows(dict, items, count)) == pretty(named)
    assert cards.text_of_many(Rows(list, items, 300)).endswith(",\n ...]")


def test_a_table():
    rows = [("0", Facts("worker0", "confirmed", TENSOR)), ("1", Facts("<worker1>", "pending"))]
    told = cards.table(Rows(list, rows, 2))
    assert told.count("<tr>") == 3
    assert "&lt;worker1&gt;" in told
    assert "and 100 more" in cards.table(Rows(list, [("", Facts("w", "here"))] * 200, 300))


def test_what_was_seen():
    told = cards.peek_html(look(torch.tensor([1.0, float("nan"), 3.0]), "w"))
    assert "min <b>1</b>" in told
    assert "NaN <b>1</b>" in told
    assert "<img" in told  # which a page that is not trusted shows, too
    assert "<svg" not in told
    told = cards.peek_html(look(torch.nn.Linear(3, 2), "w"))
    assert "weight" in told
    assert "float32(2, 3)" in told
    assert "&lt;b&gt;" in cards.peek_html(look("<b>", "w"))


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (123_456, "123 KB"), (25_600_000, "25.6 MB")]
)
def test_bytes_for_people(count, told):
    assert cards.size(count) == told
