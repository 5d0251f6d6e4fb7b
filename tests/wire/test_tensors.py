"""Tensors there and back: what they keep, whose memory they are in, and damaged descriptions."""

import collections
import copy
import dataclasses
import gc
import itertools
import math
import os
import weakref

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbdist import DecodeError, EncodeError, NbdistError, ProtocolError
from nbdist.channel.shared_memory import mapping
from nbdist.channel.shared_memory.arena import Arena, ArenaSpace
from nbdist.channel.shared_memory.leases import Leases
from nbdist.wire import codec
from nbdist.wire.messages import Payload, Record, TensorMeta
from nbdist.wire.tensors import OWN_FRAME_BYTES, unpack_tensors

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


ME = Record("worker0", 0, 0xABC, [], "host", os.getpid(), 0, None)


class _Way:
    """How tensors travel here: in frames, or through an arena, the smallest of them, too."""

    def __init__(self):
        self.arena = None
        self.leases = Leases()


WAY = _Way()


@pytest.fixture(scope="module", params=["frames", "arena"], autouse=True)
def _way(request):
    if request.param == "arena":
        if not mapping.is_available():
            pytest.skip("this system has no memfd")
        WAY.arena = Arena(ME.incarnation, 1 << 30, 1)
    yield
    if WAY.arena is not None:
        gc.collect()
        give_back()
        left = WAY.arena.statistics()
        WAY.arena.close()
        WAY.arena = None
        assert left["arena_bytes_used"] == left["arena_blocks_out"] == left["arena_falls_back"] == 0


def give_back():
    WAY.arena.give_back(ME.incarnation, [(lease.segment, lease.offset) for lease in WAY.leases.take_ended()])


def travel(value):
    """Send and receive; the header and the frames go through bytes, as on a wire."""
    space = ArenaSpace(WAY.arena, ME.incarnation) if WAY.arena is not None else None
    encoded = codec.encode(value, space=space)
    for slot in encoded.slots:
        slot.send()
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(encoded.payload), type=Payload)
    leased = WAY.leases.begin(ME, payload.places, 0.0)
    if WAY.arena is not None:
        give_back()
    return codec.decode(payload, [*map(bytes, encoded.frames), *leased])


def raw(tensor):
    """The bytes of the elements, in order."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return fresh.view(-1).view(torch.uint8).tolist()


def assert_same(received, sent):
    assert type(received) is type(sent)
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    assert received.device == sent.device
    assert received.requires_grad == sent.requires_grad
    assert raw(received) == raw(sent)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def of(dtype, *shape):
    count = math.prod(shape)
    return torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8).view(dtype).reshape(shape)


# --- one tensor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (0, 4), (3, 0, 2), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype, shape):
    sent = of(dtype, *shape) if dtype is not torch.bool else torch.rand(shape) < 0.5
    received = travel(sent)
    assert_same(received, sent)
    assert received.is_contiguous()


@pytest.mark.parametrize(
    "size", [OWN_FRAME_BYTES // 4 - 1, OWN_FRAME_BYTES // 4, OWN_FRAME_BYTES // 4 + 1, OWN_FRAME_BYTES]
)
def test_small_and_large(size):
    sent = torch.arange(size, dtype=torch.int32)
    assert_same(travel(sent), sent)
    assert_same(travel([sent, torch.ones(3)])[0], sent)


VIEWS = {
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[1:3],
    "columns": lambda t: t[:, 1:3],
    "steps": lambda t: t[::2, ::3],
    "one": lambda t: t[2, 2],
    "none": lambda t: t[1:1],
    "expanded": lambda t: t[:1].expand(5, -1),
    "permuted": lambda t: t.reshape(2, 3, 4).permute(2, 0, 1),
    "overlapping": lambda t: t.as_strided((4, 4), (1, 2), 3),
    "channels last": lambda t: t.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, big):
    base = torch.arange(24.0).reshape(4, 6) if not big else torch.arange(2400.0 * 1800).reshape(2400, 1800)
    if big and view in ("permuted", "channels last"):
        base = base[:4, :6].contiguous()
    sent = VIEWS[view](base)
    received = travel(sent)
    assert_same(received, sent)
    if not big:
        assert received.stride() == sent.stride()


def test_a_small_view_of_a_large_tensor_travels_alone():
    base = torch.zeros(1 << 20)
    _, frames, *_ = codec.encode(base[::1000])
    assert sum(map(len, frames)) < 100_000
    assert_same(travel(base[::1000]), base[::1000])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
        lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        lambda: torch.view_as_real(torch.tensor([1 + 2j, 3 - 4j])),
        lambda: torch._neg_view(torch.arange(4.0)),
        lambda: torch.tensor([[1 + 2j, 3 - 4j]] * 3).mH,
    ],
    ids=["conj", "conj imag", "as real", "neg", "mH"],
)
def test_lazy_views(make):
    sent = make()
    received = travel(sent)
    assert torch.equal(received, sent)
    assert received.shape == sent.shape
    assert not received.is_conj()
    assert not received.is_neg()


def test_requires_grad_is_kept_and_the_graph_is_not():
    leaf = torch.ones(3, requires_grad=True)
    for sent in (leaf, leaf * 2):
        received = travel(sent)
        assert received.requires_grad
        assert received.is_leaf
        assert received.grad is None
        assert torch.equal(received, sent)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameters(requires_grad):
    sent = torch.nn.Parameter(torch.rand(3, 2).t(), requires_grad=requires_grad)
    assert_same(travel(sent), sent)
    assert_same(travel([sent, sent.data])[0], sent)


class Sub(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.quantize_per_tensor(torch.rand(4, 3), 0.1, 2, torch.quint8),
        lambda: torch.quantize_per_channel(
            torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.qint8
        ),
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.rand(3).as_subclass(Sub),
        lambda: torch.nn.Buffer(torch.rand(3)),
    ],
    ids=["coo", "csr", "csc", "bsr", "quantised", "per channel", "meta", "subclass", "buffer"],
)
def test_the_others(make):
    sent = make()
    received = travel(sent)
    assert type(received) is type(sent)
    assert (received.layout, received.dtype, received.shape) == (sent.layout, sent.dtype, sent.shape)
    assert received.device == sent.device
    if sent.is_quantized:
        assert torch.equal(received.int_repr(), sent.int_repr())
        assert torch.equal(received.dequantize(), sent.dequantize())
    elif sent.device.type != "meta":
        assert torch.equal(received.to_dense(), sent.to_dense())


def test_attributes_of_a_tensor_are_kept():
    sent = torch.ones(2)
    sent.note = "mine"
    received = travel(sent)
    assert received.note == "mine"
    assert torch.equal(received, sent)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_cuda_tensor_without_a_device_map_says_what_to_write(device):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.raises(EncodeError, match="set_device_map"):
        codec.encode(torch.ones(1, device=device), receiver="worker1")


# --- in containers, and several of them -----------------------------------------------------------


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    meta: dict


class Holder:
    def __init__(self, tensor):
        self.hidden = {"deep": [(tensor,)]}


class Slotted:
    __slots__ = ("tensor",)


Pair = collections.namedtuple("Pair", "a b")


def test_tensors_are_found_wherever_they_hide():
    one = torch.rand(3)
    slotted = Slotted()
    slotted.tensor = one
    received = travel((Batch(one, {"k": one}), Holder(one), slotted, Pair(one, 1), {one.sum().item(): one}))
    batch, holder, slots, pair, table = received
    found = [batch.inputs, batch.meta["k"], holder.hidden["deep"][0][0], slots.tensor, pair.a, *table.values()]
    assert all(tensor is found[0] for tensor in found), "one tensor in one message is one tensor"
    assert torch.equal(found[0], one)
    assert type(batch) is Batch
    assert type(pair) is Pair


def test_modules_and_state_dicts():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    received = travel(module)
    for name, value in module.state_dict().items():
        assert torch.equal(received.state_dict()[name], value)
    assert isinstance(received[0].weight, torch.nn.Parameter)
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    again = travel(tied)
    assert again["a"].weight is again["b"].weight


def test_storage_that_is_shared_stays_shared():
    base = torch.arange(24.0).reshape(4, 6)
    whole, row, column, same = travel((base, base[1], base[:, 2], base.view(-1)))
    assert len({address(tensor) for tensor in (whole, row, column, same)}) == 1
    whole.fill_(7.0)
    assert row.eq(7).all()
    assert column.eq(7).all()
    assert same.eq(7).all()


def test_views_that_share_without_their_base():
    base = torch.arange(100.0)
    left, right = travel((base[10:30], base[20:40]))
    left[10:] = -1.0
    assert right[:10].eq(-1).all()
    assert torch.equal(right[10:], base[30:40])


def test_views_of_different_dtypes_share():
    """Their offsets count in elements of their own size."""
    base = torch.arange(64, dtype=torch.uint8)
    for first, last in ((4, 8), (12, 16), (20, 32), (1, 8), (3, 16)):
        small, large = base[first : first + 4], base[last : last + 16].view(torch.float64)
        one, other = travel((small, large))
        assert raw(one) == raw(small)
        assert raw(other) == raw(large)
        assert address(one) == address(other)
    ints, floats = base.view(torch.int32)[1:], base.view(torch.complex128)[1:]
    one, other = travel((ints, floats))
    assert raw(one) == raw(ints)
    assert raw(other) == raw(floats)


def test_what_is_not_shared_is_apart():
    received = travel([torch.zeros(3) for _ in range(5)])
    assert len({address(tensor) for tensor in received}) == 5


def test_empty_views_lie_anywhere():
    base = torch.arange(5.0)
    far = torch.empty(0).set_(base.untyped_storage(), 3, (0,), (1,))
    empty, whole = travel((base[5:], base))
    assert empty.shape == (0,)
    assert torch.equal(whole, base)
    beyond = base.as_strided((0,), (1,), 1 << 20)
    received, whole = travel((beyond, base))
    assert received.shape == (0,)
    assert torch.equal(whole, base)
    assert travel(beyond).shape == (0,)
    assert travel(far).shape == (0,)


def test_a_later_change_by_the_sender_is_not_seen():
    small, large = torch.zeros(4), torch.zeros(OWN_FRAME_BYTES)
    encoded = codec.encode([small, large])
    small.fill_(1.0)
    large.fill_(1.0)
    received = codec.decode(encoded.payload, encoded.frames)
    assert not received[0].any()
    assert not received[1].any()


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 3, 17, 1000, OWN_FRAME_BYTES])
def test_received_tensors_are_aligned_and_their_own(size, count):
    sent = [torch.rand(size + 1)[1:] for _ in range(count)]
    payload, frames, *_ = codec.encode(sent)
    frames = [bytearray(frame) for frame in frames]
    received = codec.decode(payload, [bytes(frame) for frame in frames])
    for tensor in received:
        assert tensor.data_ptr() % 64 == 0
        tensor.add_(1.0)
    assert all(torch.equal(tensor, original + 1) for tensor, original in zip(received, sent, strict=True))
    again = codec.decode(payload, [bytes(frame) for frame in frames])
    assert all(torch.equal(tensor, original) for tensor, original in zip(again, sent, strict=True))


def test_nothing_keeps_a_sent_tensor_or_a_large_frame():
    tensor = torch.zeros(OWN_FRAME_BYTES)
    gone = weakref.ref(tensor)
    encoded = codec.encode([tensor])
    del tensor
    gc.collect()
    assert gone() is None
    frame = encoded.frames[1]
    view = memoryview(frame)[-8:]
    del encoded, frame
    gc.collect()
    assert bytes(view) == bytes(8)


# --- any tensor -----------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """A tensor of any dtype, and any view of it."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    if draw(st.integers(0, 9)) == 0:
        shape = [*shape, 70_000]
    count = math.prod(shape)
    seed = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), generator=seed)
    base = data.to(torch.uint8).view(dtype).reshape(shape)
    for step in draw(st.lists(st.sampled_from(["slice", "permute", "expand", "select", "unfold", "conj"]), max_size=3)):
        if step == "slice" and base.ndim:
            dim = draw(st.integers(0, base.ndim - 1))
            start = draw(st.integers(0, base.shape[dim]))
            stop = draw(st.integers(start, base.shape[dim]))
            base = base[(slice(None),) * dim + (slice(start, stop, draw(st.integers(1, 3))),)]
        elif step == "permute" and base.ndim:
            base = base.permute(draw(st.permutations(range(base.ndim))))
        elif step == "expand":
            base = base.expand(draw(st.integers(1, 3)), *base.shape)
        elif step == "select" and base.ndim and base.shape[0]:
            base = base[draw(st.integers(0, base.shape[0] - 1))]
        elif step == "unfold" and base.ndim and base.shape[0] >= 2:
            base = base.unfold(0, 2, 1)
        elif step == "conj" and base.is_complex():
            base = base.conj()
    if draw(st.booleans()) and base.is_floating_point() and dtype.itemsize > 1:
        base = base.detach().requires_grad_()
        if draw(st.booleans()):
            base = torch.nn.Parameter(base.detach())
    return base


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4), st.data())
@example([torch.ones(2)], None)
def test_any_tensors_come_out_as_they_went_in(sent, data):
    if data is not None and data.draw(st.booleans()):
        sent = [*sent, sent[0].detach()]  # one that shares
    received = travel(sent)
    for one, original in zip(received, sent, strict=True):
        assert_same(one, original)
    for i, j in itertools.combinations(range(len(sent)), 2):
        shared = address(sent[i]) == address(sent[j]) and sent[i].numel() and not sent[i].is_conj()
        if shared and sent[i].dtype == sent[j].dtype:
            assert address(received[i]) == address(received[j])


# --- damaged descriptions -------------------------------------------------------------------------

LENGTH = 64
FRAME = bytes(range(LENGTH))
FLOAT, LONG = 0, 8


def unpack(*metas, where=((0, 0, LENGTH),)):
    return unpack_tensors(metas, where, [FRAME])


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ([17], None, 0),
        ([15], None, 0),
        ([], None, 0),
        ([1 << 40], None, 0),
        ([1 << 31, 1 << 33], None, 0),
        ([-16], None, 0),
        ([-4, -4], None, 0),
        ([17], [1], 0),
        ([16], [1], 1),
        ([16], [2], 0),
        ([2], [1 << 62], 0),
        ([1 << 62, 1 << 62], [1, 1], 0),
        ([1], [1], 16),
        ([1], [1], 1 << 62),
        ([1], [1], -1),
        ([2], [-1], 1),
        ([-1], [1], 0),
        ([4, 4], [1], 0),
        ([4], [1, 1], 0),
        ([0, -1], [1, 1], 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_shape_that_its_bytes_do_not_have_is_refused(shape, strides, offset, copies):
    meta = TensorMeta(0, FLOAT, shape, strides, offset, 0)
    if copies == 2 and strides is None and math.prod(shape) * 4 <= LENGTH and min(shape, default=0) >= 0:
        pytest.skip("of two that share, one may be smaller than the storage")
    body = codec.encode([torch.ones(1)] * copies).frames[0]
    with pytest.raises((ProtocolError, DecodeError)):
        codec.decode(Payload([(0, 0, LENGTH)], [meta] * copies), [body, FRAME])


@pytest.mark.parametrize(
    "where", [(0, 0, 65), (0, 1, 64), (0, -1, 64), (0, 0, -64), (1, 0, 64), (-1, 0, 64), (0, 65, 0)], ids=str
)
def test_bytes_outside_of_the_message_are_refused(where):
    with pytest.raises(ProtocolError):
        unpack(TensorMeta(0, FLOAT, [16], None, 0, 0), where=[where])


@pytest.mark.parametrize("buffer", [1, -1, 1 << 40])
def test_a_buffer_that_is_not_there_is_refused(buffer):
    with pytest.raises(ProtocolError):
        unpack(TensorMeta(buffer, FLOAT, [16], None, 0, 0))


@pytest.mark.parametrize("dtype", [-1, 1000])
def test_an_unknown_dtype_is_named(dtype):
    with pytest.raises(DecodeError, match=str(dtype)):
        unpack(TensorMeta(0, dtype, [16], None, 0, 0))


@pytest.mark.parametrize(
    "meta", [TensorMeta(0, LONG, [8], None, 0, 1), TensorMeta(0, FLOAT, [16], None, 0, 0, "nowhere:9")]
)
def test_what_a_tensor_cannot_be_is_a_decode_error(meta):
    body = codec.encode([torch.ones(1)]).frames[0]
    with pytest.raises(DecodeError):
        codec.decode(Payload([(0, 0, LENGTH)], [meta]), [body, FRAME])


SENT = [torch.arange(12.0).reshape(3, 4).t(), torch.nn.Parameter(torch.ones(3)), torch.arange(9), torch.zeros(70_000)]
INTS = st.integers(-3, 70_100) | st.sampled_from([1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 62)])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_payload_is_a_named_error_or_a_value(data):
    payload, frames, *_ = codec.encode(SENT)
    frames = [bytes(frame) for frame in frames]
    metas, where = copy.deepcopy(payload.tensors), list(payload.buffers)
    for _ in range(data.draw(st.integers(1, 3))):
        what = data.draw(st.sampled_from(["meta", "where", "frame", "less"]))
        if what == "meta":
            index = data.draw(st.integers(0, len(metas) - 1))
            name = data.draw(st.sampled_from(["buffer", "dtype", "shape", "strides", "offset", "flags"]))
            lists = st.lists(INTS, max_size=4)
            value = data.draw(lists if name == "shape" else lists | st.none() if name == "strides" else INTS)
            metas[index] = msgspec.structs.replace(metas[index], **{name: value})
        elif what == "where" and where:
            index = data.draw(st.integers(0, len(where) - 1))
            where[index] = tuple(data.draw(st.tuples(INTS, INTS, INTS)))
        elif what == "frame" and frames:
            index = data.draw(st.integers(0, len(frames) - 1))
            frames[index] = frames[index][: data.draw(st.integers(0, len(frames[index])))]
        elif what == "less" and frames:
            frames.pop(data.draw(st.integers(0, len(frames) - 1)))
    damaged = msgspec.structs.replace(payload, tensors=metas, buffers=where)
    try:
        values = codec.decode(damaged, frames)
    except NbdistError:
        return
    for value in values:
        storage = value.untyped_storage()
        assert storage.nbytes() <= max(map(len, frames)), "bytes that did not come were made up"


@pytest.mark.parametrize("record_grad", [True, False])
def test_one_value_expanded(record_grad):
    sent = torch.nn.Parameter(torch.ones(1).expand(3))
    with torch.set_grad_enabled(record_grad):
        received = travel(sent)
    assert_same(received, sent)
