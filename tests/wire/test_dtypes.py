"""Tensors of every dtype and layout that torch has: a call carries them, or refuses them in words."""

import warnings

import pytest
import torch

import nbdist
from nbdist import rpc
from nbdist.testing import World

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


@pytest.fixture(scope="module")
def world():
    with World(2) as world, world[0].activate():
        yield world


def bits(tensor):
    """Return the elements as numbers of the same size, which torch can compare."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in QUANTIZED], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("rows", [3, 200_000], ids=["small", "large"])
def test_a_dtype_is_carried(world, dtype, rows):
    numbers = torch.arange(rows * 4 * dtype.itemsize).remainder(2).to(torch.uint8)
    whole = numbers.view(dtype).view(rows, 4)
    if dtype is torch.complex128:
        whole, dtype = whole.real, torch.float64
    for sent in (whole, whole.t(), whole[:2], whole[:, 1:2], whole[:1, :1].expand(2, 3)):
        back = rpc.rpc_sync("worker1", lambda x: x, args=(sent,))
        assert (back.dtype, back.shape) == (dtype, sent.shape)
        assert torch.equal(bits(back), bits(sent))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_carried(world, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
        back = rpc.rpc_sync("worker1", lambda x: x, args=([nested, 1],))[0]
    assert back.is_nested
    assert [part.tolist() for part in back.unbind()] == [part.tolist() for part in nested.unbind()]


def test_what_cannot_be_carried_is_refused_in_words(world):
    with pytest.raises(nbdist.EncodeError, match=r"layout torch\._mkldnn does not travel; send tensor\.to_dense\(\)"):
        rpc.rpc_sync("worker1", len, args=(torch.ones(3).to_mkldnn(),))


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_a_tensor_of_a_quantized_dtype_without_a_scale_is_refused_in_words(world, dtype):
    if dtype is torch.qint32:
        sent = torch.empty(4, dtype=torch.int32).view(dtype)
    else:
        sent = torch.empty(4, dtype=torch.uint8).view(dtype)
    with pytest.raises(
        nbdist.EncodeError,
        match=r"\(or the function\) cannot be sent: a tensor of .*, which has no scale, does not travel",
    ):
        rpc.rpc_sync("worker1", len, args=(sent,))
