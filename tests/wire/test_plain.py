"""Values that cannot carry code: they arrive as they were, and any other bytes are an error."""

import pickle
import random
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import EncodeError, ProtocolError
from nbdist.wire import plain


class Kind(Enum):
    ONE = "one"


class Part(NamedTuple):
    number: int
    tensor: torch.Tensor
    rest: tuple[Any, ...] = ()


ATOMS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.binary()
VALUES = st.recursive(
    ATOMS | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(VALUES)
def test_plain_values_arrive(value):
    assert plain.decode(plain.encode(value), Any) == value


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(6).reshape(2, 3).to(each) for each in (torch.bool, torch.uint8, torch.int8, torch.int64)),
        *(torch.randn(3, 2).to(each) for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
        *(torch.randn(4, 4).t(), torch.randn(1, 5).expand(3, 5), torch.tensor(2.5), torch.empty(0, 3)),
    ],
    ids=lambda each: f"{each.dtype} {tuple(each.shape)}",
)
def test_tensors_arrive(tensor):
    found = plain.decode(plain.encode(tensor), torch.Tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert found.data_ptr() % 64 == 0


def test_a_tensor_is_sent_once_and_objects_arrive_by_their_type():
    shared = torch.randn(1000)
    value = [Part(number, shared, (shared, Kind.ONE)) for number in range(50)]
    data = plain.encode(value)
    assert len(data) < 2 * shared.nbytes
    found = plain.decode(data, list[Part])
    assert [each.number for each in found] == list(range(50))
    assert all(each.tensor is found[0].tensor and each.rest == (each.tensor, "one") for each in found)


def test_the_bytes_of_a_bool_are_no_third_value():
    data = plain.encode(torch.tensor([True, False]))
    found = plain.decode(data[:-2] + b"\x07\x00", torch.Tensor)
    assert found.view(torch.uint8).tolist() == [1, 0]


@pytest.mark.parametrize("value", [print, object(), torch.float32, 1 << 70, torch.zeros(2, dtype=torch.complex64)])
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(EncodeError, match="cannot be sent to or by a client"):
        plain.encode({"a": [value]})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, str),
        ([1, "a"], tuple[int, int]),
        ([1, 2], Part),
        ([1, torch.ones(1), 3, 4], Part),
        ([1, torch.ones(1)], tuple[torch.Tensor, torch.Tensor]),
    ],
)
def test_another_type_is_an_error(value, kind):
    with pytest.raises(ProtocolError, match="a message has something else than it must"):
        plain.decode(plain.encode(value), kind)


def test_damaged_bytes_are_an_error_or_plain():
    choose = random.Random(0)
    whole = plain.encode([Part(1, torch.randn(7), ("a", {"b": 2.5}))] * 3)
    assert isinstance(plain.decode(whole, list[Part]), list)
    errors = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        data = bytes(data[: choose.choice((len(data), choose.randrange(len(data))))])
        try:
            plain.decode(data, list[Part])
        except ProtocolError:
            errors += 1
    assert errors > 1000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        pickle.dumps(print),
        (2).to_bytes(4) + b"\xc1\xc1",
        # A tensor without end, one of another dtype, one of a negative size.
        *(
            len(head).to_bytes(4) + head
            for kinds in ([("float32", (1 << 40, 1 << 40))], [("object", (1,))], [("float32", (-1,))])
            if (head := plain.msgspec.msgpack.encode((b"\xc0", kinds)))
        ),
    ],
)
def test_bytes_of_strangers_are_an_error(data):
    with pytest.raises(ProtocolError):
        plain.decode(data, Any)


def test_a_value_that_is_too_deep_is_an_error():
    deep = b"\x91" * 100_000 + b"\xc0"
    head = plain.msgspec.msgpack.encode((deep, []))
    with pytest.raises(ProtocolError):
        plain.decode(len(head).to_bytes(4) + head, Any)


def test_a_shape_of_any_length_is_no_tensors():
    head = msgspec.msgpack.encode((msgspec.msgpack.encode(0), [("float32", (2**63 - 1,) * 100_000)]))
    with pytest.raises(ProtocolError, match="shapes of no tensors"):
        plain.decode(len(head).to_bytes(4) + head, int)


def test_a_receiver_may_want_small_heads():
    with pytest.raises(ProtocolError, match="more than 100"):
        plain.decode(plain.encode("x" * 200), str, 100)
