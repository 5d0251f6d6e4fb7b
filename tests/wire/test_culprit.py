"""Which part of a value cannot be sent, in words."""

import threading

import pytest
import torch

from nbdist import rpc
from nbdist.errors import EncodeError
from nbdist.testing import World
from nbdist.wire.pickling import culprit

lk = threading.Lock()


class Holder:
    def __init__(self, part):
        self.fine, self.part = torch.ones(2), part


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lk, "`x` is a lock"),
        ({"a": 1, "lock": lk}, "`x['lock']` is a lock"),
        ([1, (2, {"deep": [lk]})], "`x[1][1]['deep'][0]` is a lock"),
        (Holder({"k": lk}), "`x.part['k']` is a lock"),
        ((n for n in range(3)), "`x` is a generator"),
        ([torch.ones(3), open], ""),
    ],
    ids=["lock", "dict", "deep", "attribute", "generator", "fine"],
)
def test_the_way_to_it(value, says):
    assert culprit.of_value(value, "x") == says


def test_a_function_names_what_it_uses(monkeypatch):
    monkeypatch.setattr(culprit, "CELLS", {})
    mine = threading.Lock()

    def uses():
        return mine

    uses.__module__ = "__main__"  # so that it travels by value
    assert culprit.of_call((uses, (), {})) == "`mine`, used by `uses`, is a lock"
    monkeypatch.setattr(culprit, "CELLS", {__file__: 22})
    assert culprit.of_call((uses, (), {})) == "`mine`, used by `uses` of cell 22, is a lock"


def test_the_error_of_a_call_says_it():
    with World(2) as world, world[0].activate():
        for send in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(
                EncodeError, match=r"^`args\[1\]\['k'\]` is a lock, which cannot be sent: cannot pickle"
            ):
                send("worker1", max, args=(1, {"k": lk}))
        with pytest.raises(EncodeError, match=r"^`key` is a lock, which cannot be sent: "):
            rpc.rpc_sync("worker1", sorted, args=([1],), kwargs={"key": lk})


def test_what_refers_to_itself_and_what_is_large():
    around = {"lock": lk}
    around["self"] = around
    assert culprit.of_value(around, "x") == "`x['lock']` is a lock"
    assert culprit.of_value([torch.empty(1 << 30, device="meta"), lk], "x") == "`x[1]` is a lock"
