"""Values there and back: errors, references, what cannot be sent or read, and damaged bodies."""

import collections
import io
import operator
import pickle
import socket
import sys
import threading
import types
from typing import ClassVar

import msgspec
import pytest
import torch
from helpers.processes.mains import Main, run, send
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import DecodeError, EncodeError, NbdistError, ProtocolError, RpcTimeout
from nbdist.ids import GlobalId
from nbdist.wire import codec, quick
from nbdist.wire.devices import Devices
from nbdist.wire.messages import Fork, Payload, Place, TensorMeta
from nbdist.wire.pickling import names, registered
from nbdist.wire.tensors import OWN_FRAME_BYTES


def travel(value, **options):
    payload, frames, *_ = codec.encode(value, **options)
    return codec.decode(payload, [bytes(frame) for frame in frames])


# --- plain values ---------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values(value):
    received = travel(value)
    assert received == value
    assert type(received) is type(value)


def test_a_value_that_holds_itself():
    value = []
    value.append(value)
    received = travel(value)
    assert received[0] is received


def test_one_object_stays_one():
    one = {"k": [1]}
    first, second = travel((one, one))
    assert first is second


def test_an_ordered_dict_keeps_its_order_and_all_else():
    value = collections.OrderedDict(b=1, a=[2])
    value.move_to_end("b")
    value.note, value["self"] = "an attribute", value
    found = travel(value)
    assert type(found) is collections.OrderedDict
    assert list(found) == ["a", "b", "self"]
    assert (found["a"], found["b"], found.note) == ([2], 1, "an attribute")
    assert found["self"] is found


def test_what_is_registered_comes_before_what_is_quick():
    registered.register_reducer(Marked, lambda value: (Marked, (value.n + 1,)))
    assert travel([Marked(1), Marked(2)])[1].n == 3


class Marked:
    def __init__(self, n):
        self.n = n


def test_parameters_of_a_script_module_are_a_copys_too():
    script = torch.jit.script(torch.nn.Linear(1, 1))
    assert not codec.encode((script, script.weight), record=True).recorded


def test_a_module_in_two_places_stays_one():
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, torch.nn.Sequential(inner))
    outer.register_forward_hook(print)
    found_outer, found_inner = travel((outer, inner))
    assert found_outer[0] is found_outer[1][0] is found_inner
    assert list(found_outer._forward_hooks.values()) == [print]
    assert all(torch.equal(a, b) for a, b in zip(found_outer.parameters(), outer.parameters(), strict=True))


@pytest.mark.parametrize("size", [10, OWN_FRAME_BYTES - 1, OWN_FRAME_BYTES, 3 * OWN_FRAME_BYTES])
def test_large_buffers(size):
    numpy = pytest.importorskip("numpy")
    for value in (bytes(size), bytearray(b"x" * size)):
        assert travel(value) == value
    array = numpy.arange(size, dtype=numpy.uint8)
    received = travel([array, array[::2], array.reshape(-1, 1).T])
    assert (received[0] == array).all()
    assert (received[1] == array[::2]).all()
    received[0][0] = 7  # the receiver's own
    assert array[0] == 0


def test_functions_by_reference():
    for function in (
        torch.add,
        torch.nn.functional.relu,
        torch.Tensor.add_,
        collections.OrderedDict.fromkeys,
        len,
        pickle.dumps,
    ):
        assert travel(function) == function


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_function_and_module():
    @torch.jit.script
    def twice(x):
        return x * 2

    assert travel(twice)(torch.ones(1)).item() == 2
    module = torch.jit.script(torch.nn.Linear(2, 2))
    assert torch.equal(travel(module)(torch.ones(2)), module(torch.ones(2)))


# --- errors as values -----------------------------------------------------------------------------


class Two(ValueError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first = first


class KeywordOnly(RuntimeError):
    def __init__(self, *, code):
        super().__init__()
        self.code = code

    def __str__(self):
        return f"code {self.code}"


class NoArguments(Exception):
    def __init__(self):
        super().__init__("fixed")


class Reduced(Exception):
    def __init__(self, a, b):
        super().__init__("text")
        self.pair = a, b

    def __reduce__(self):
        return Reduced, self.pair


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError(("a", 1)),
        StopIteration(3),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        FileNotFoundError(2, "No such file", "name"),
        RpcTimeout("late"),
        Two("a", "b"),
        KeywordOnly(code=7),
        NoArguments(),
        Reduced(1, 2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_type_text_and_attributes(error):
    error.add_note("a note")
    error.extra = [1, 2]
    received = travel(raised(error))
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.args == error.args
    if type(error) is not Reduced:
        assert vars(received) == vars(error)
    assert received.__traceback__ is None


def test_an_error_of_a_cell():
    sender, receiver = (
        Main("class Oops(Exception):\n    def __init__(self, a, *, b):\n        super().__init__(a); self.b = b"),
        Main(),
    )
    received, again = send(sender.Oops("x", b=2), sender, receiver)
    assert again
    assert (received.args, received.b) == (("x",), 2)


# --- what cannot be sent --------------------------------------------------------------------------


class Stubborn:
    def __reduce__(self):
        raise ArithmeticError("not me")


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        lambda: sys._getframe(),
        lambda: (n for n in range(3)),
        lambda: socket.socket(),
        lambda: [1, {"deep": threading.Lock()}],
        Stubborn,
        lambda: torch.zeros(1, device="cpu").requires_grad_().sum().grad_fn,
    ],
    ids=["lock", "frame", "generator", "socket", "deep lock", "stubborn", "grad_fn"],
)
def test_what_cannot_be_pickled_is_an_encode_error(make):
    value = make()
    with pytest.raises(EncodeError, match=r"cannot be sent: ."):
        codec.encode(value)
    if isinstance(value, socket.socket):
        value.close()


def test_nesting_without_end_is_an_encode_error():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EncodeError):
        codec.encode(deep)
    while deep:
        deep = deep[0]


# --- what cannot be read --------------------------------------------------------------------------


def frames_of(value, **options):
    payload, frames, *_ = codec.encode(value, **options)
    return payload, [bytes(frame) for frame in frames]


@pytest.fixture
def one_sided():
    """A module that the sender has; the test takes it away."""
    module = types.ModuleType("one_sided")
    exec("class Thing:\n    pass\ndef function(): return 1", module.__dict__)
    sys.modules["one_sided"] = module
    yield module
    sys.modules.pop("one_sided", None)


@pytest.mark.parametrize("what", ["class", "module"])
def test_a_class_that_only_the_sender_has_is_named(one_sided, what):
    payload, frames = frames_of([one_sided.Thing()])
    if what == "class":
        del one_sided.Thing
    else:
        del sys.modules["one_sided"]
    with pytest.raises(DecodeError, match=r"Thing.*one_sided.*both sides"):
        codec.decode(payload, frames)


def test_a_function_that_only_the_caller_has_is_named(one_sided):
    name = names.name_of(one_sided.function)
    assert names.resolve(name) is one_sided.function
    del one_sided.function
    with pytest.raises(DecodeError, match=r"function.*both"):
        names.resolve(name)
    del sys.modules["one_sided"]
    with pytest.raises(DecodeError, match="one_sided"):
        names.resolve(name)


class Unwilling:
    def __init__(self, how):
        self.how = how

    def __setstate__(self, state):
        raise state["how"]("will not")


@pytest.mark.parametrize("how", [ValueError, RecursionError, MemoryError])
def test_a_value_that_will_not_be_rebuilt_is_a_decode_error(how):
    payload, frames = frames_of(Unwilling(how))
    with pytest.raises(DecodeError, match=f"{how.__name__}: will not"):
        codec.decode(payload, frames)


def test_no_frames_are_a_decode_error():
    with pytest.raises(DecodeError):
        codec.decode(Payload(), [])


@settings(max_examples=300)
@given(st.data())
def test_a_body_cut_short_is_a_named_error(data):
    """Members are trusted, but a mistake of theirs must not become an error without a name.

    The body is only cut short: a pickle that is changed at will can do anything.
    """
    payload, frames = frames_of({"text": "abcdefgh", "numbers": [1.5, 2, (3,)], "bytes": b"ijkl"})
    body = frames[0]
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(NbdistError):
        codec.decode(payload, [body[:cut], *frames[1:]])


@pytest.mark.parametrize("body", [b"", b"garbage", b"\x80", b"\x80\x05.", b"\x80\x05N", b"\x80\x63N."], ids=repr)
def test_a_garbage_body_is_a_decode_error(body):
    with pytest.raises(DecodeError):
        codec.decode(Payload(), [body])


def test_a_body_that_refers_to_tensors_or_references_that_are_not_there():
    payload, frames = frames_of([[torch.ones(2)]])
    with pytest.raises(DecodeError):
        codec.decode(Payload(), frames)
    with pytest.raises(ProtocolError):
        codec.decode(payload, frames[:1])
    payload, frames = frames_of(Reference("x"), forker=Forker())
    with pytest.raises(DecodeError):
        codec.decode(payload, frames, [])


def test_keys_that_are_no_words_go_as_anything_else():
    class Key(int):
        pass

    for value in (("ok", (1,), {Key(3): 3}), ("ok", (torch.ones(2),), {2: torch.ones(1)})):
        payload, frames = frames_of(value)
        assert not payload.form
        assert str(codec.decode(payload, frames)) == str(value)


@pytest.mark.parametrize(
    "payload",
    [
        Payload(form=quick.LIST, holes=[(1, quick.TENSOR, 0)]),
        Payload(form=quick.LIST, holes=[(0, quick.TENSOR, 0)]),
        Payload(form=quick.LIST, holes=[(0, quick.RECORDED, 0)]),
        Payload(form=quick.LIST, holes=[(0, quick.REFERENCE, 0)]),
        Payload(form=quick.LIST, holes=[(0, 7, 0)]),
        Payload(form=quick.LIST, recorded=[3]),
        Payload(form=quick.CALL, holes=[(0, quick.TENSOR, 0)]),
        Payload(form=quick.WHOLE),
        Payload(form=quick.OTHER),
        Payload(form=-1),
    ],
    ids=repr,
)
def test_holes_for_which_there_is_nothing(payload):
    with pytest.raises(NbdistError):
        codec.decode(payload, [pickle.dumps([None])])


def test_the_frames_of_a_message_are_read_by_nothing_else():
    _, frames = frames_of([torch.ones(2), 1j])
    with pytest.raises(DecodeError, match="nbdist"):
        pickle.Unpickler(io.BytesIO(frames[0])).load()


# --- references -----------------------------------------------------------------------------------


class Reference:
    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        raise RuntimeError("only in a call")


class Forker:
    def __init__(self):
        self.forked = []

    @classmethod
    def make(cls):
        return cls()

    def fork(self, reference):
        self.forked.append(reference)
        number = len(self.forked)
        return Fork(GlobalId(0, number, 1), GlobalId(0, 100 + number, 1), 1, 2)

    def take_back(self):
        self.forked.clear()


@pytest.fixture(autouse=True)
def reference_type():
    registered.register_reference(Reference)
    yield
    registered.reference_types.discard(Reference)


def test_references_travel_as_forks():
    forker, one, other = Forker(), Reference("one"), Reference("other")
    payload, frames, *_ = codec.encode([one, {"k": (other, one)}], forker=forker)
    assert forker.forked == [one, other]
    assert [fork.rref.local_id for fork in payload.forks] == [1, 2]
    assert codec.decode(payload, frames, ["first", "second"]) == ["first", {"k": ("second", "first")}]


def test_a_reference_outside_of_a_call_is_an_encode_error():
    with pytest.raises(EncodeError, match="in a call"):
        codec.encode(Reference("x"))


class MakesAReference:
    """Reduces to a new reference each time, and remembers those."""

    made: ClassVar[list[Reference]] = []

    def __reduce__(self):
        self.made.append(Reference(f"number {len(self.made)}"))
        return list, ([self.made[-1]],)


def test_a_second_attempt_at_a_message_takes_back_the_references_of_the_first():
    sender, forker = Main("def f(): return 1"), Forker()
    with sender.active():
        encoded = codec.encode([MakesAReference(), sender.f], lacking={sender.digest("f")}, forker=forker)
    assert len(MakesAReference.made) == 2
    assert forker.forked == MakesAReference.made[1:]
    assert len(encoded.payload.forks) == 1


def test_a_reference_is_handed_over_once_even_if_the_message_is_made_twice():
    """A definition that is known to be lacking makes the encoder start again, by value."""
    sender, receiver = Main("def f(): return 1"), Main()
    forker, one = Forker(), Reference("one")
    with sender.active():
        encoded = codec.encode([one, sender.f, one], lacking={sender.digest("f")}, forker=forker)
    assert forker.forked == [one]
    assert len(encoded.payload.forks) == 1
    with receiver.active():
        received = codec.decode(encoded.payload, encoded.frames, ["here"])
    assert received[0] == received[2] == "here"
    assert run(receiver, received[1]) == 1


def test_a_reference_in_a_definition():
    sender, receiver = Main("def f(): return kept"), Main()
    sender.module.kept = Reference("kept")
    forker = Forker()
    with sender.active():
        encoded = codec.encode(sender.f, by_value=True, forker=forker)
    assert len(forker.forked) == 1
    with receiver.active():
        function = codec.decode(encoded.payload, encoded.frames, ["here"])
    assert run(receiver, function) == "here"


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [torch.add, torch.mm, torch.nn.functional.softmax, torch.ones_like, len, sorted, collections.Counter],
    ids=operator.attrgetter("__name__"),
)
def test_a_name_leads_back(function):
    assert names.resolve(names.name_of(function)) is function


def test_a_class_method_leads_back():
    assert names.resolve(names.name_of(Forker.make)) == Forker.make


@pytest.mark.parametrize(
    "function",
    [lambda: 1, [].append, torch.ones(1).add, collections.Counter().update],
    ids=operator.attrgetter("__name__"),
)
def test_what_has_no_name_elsewhere_has_none(function):
    assert names.name_of(function) is None


def test_display_names():
    import functools

    assert names.display_name(torch.add) == "add"
    assert names.display_name(Two.__init__) == "Two.__init__"
    assert names.display_name(functools.partial(torch.add, 1)) == "partial(add)"
    assert names.display_name(Forker()) == "Forker"


def test_only_torchs_operators_are_builtin():
    assert names.is_builtin(torch.add)
    assert not names.is_builtin(len)
    assert not names.is_builtin(test_display_names)
    assert not names.is_builtin(torch.nn.Linear)


# -- the usual calls and results, which take a shorter way ---------------------------------------------------------


def made(kind):
    """Calls by name and results: those of the usual kind, and those that only look like it."""
    ones = torch.ones(2, 3)
    usual = {
        "nothing": ("m:f", (), {}),
        "atoms": ("m:f", (1, "two", None, b"3", 4.0, True), {"five": 5}),
        "a tensor": ("m:f", (ones,), {}),
        "a tensor among atoms": ("m:f", (1, ones, "x"), {"alpha": 2}),
        "an expanded tensor": ("m:f", (torch.ones(1).expand(4),), {}),
    }
    others = {
        "no name": (torch.add, (1,), {}),
        "two tensors": ("m:f", (ones, ones), {}),
        "a tensor by keyword": ("m:f", (), {"x": ones}),
        "a list": ("m:f", ([1],), {}),
        "a tensor that requires grad": ("m:f", (torch.ones(1, requires_grad=True),), {}),
        "a parameter": ("m:f", (torch.nn.Parameter(ones),), {}),
        "a transposed tensor": ("m:f", (torch.arange(6).reshape(2, 3).T,), {}),
        "no values": ("m:f", (torch.ones(0),), {}),
        "a large tensor": ("m:f", (torch.ones(1 << 20),), {}),
        "a sparse tensor": ("m:f", (ones.to_sparse(),), {}),
        "a subclass of int": ("m:f", (Small(3),), {}),
    }
    return usual if kind == "usual" else others


class Small(int):
    pass


@pytest.mark.usefixtures("usual_way")
@pytest.mark.parametrize("call", made("usual"))
def test_the_usual_call_is_encoded_as_by_the_general_way(call):
    value = made("usual")[call]
    general = codec.encode(value, forker=None)
    assert codec.encode_usual_call(*value, None) == (general.payload, general.frames)


@pytest.mark.parametrize("call", made("other"))
def test_any_other_call_is_left_to_the_general_way(call):
    assert codec.encode_usual_call(*made("other")[call], None) is None


@pytest.mark.usefixtures("usual_way")
@pytest.mark.parametrize("result", [None, 1, "two", torch.ones(2), torch.arange(3)], ids=str)
def test_the_usual_result_is_encoded_as_by_the_general_way(result):
    general = codec.encode(result, by_value=True)
    assert codec.encode_usual_result(result, None) == (general.payload, general.frames)


@pytest.mark.parametrize("result", [[1], torch.ones(1, requires_grad=True), torch.ones(1 << 20), Small(1)], ids=str)
def test_any_other_result_is_left_to_the_general_way(result):
    assert codec.encode_usual_result(result, None) is None


@pytest.mark.usefixtures("usual_way")
def test_what_cannot_be_decoded_early_is_left_to_whoever_runs_it():
    encoded = codec.encode(torch.ones(2))
    assert torch.equal(codec.decode_early(encoded.payload, encoded.frames), torch.ones(2))
    assert codec.decode_early(encoded.payload, [b"", b"short"]) is codec.NOT_DECODED  # and `decode` says why
    with pytest.raises(NbdistError):
        codec.decode(encoded.payload, [b"", b"short"])
    own = codec.encode([Small(1)])
    assert codec.decode_early(own.payload, own.frames) is codec.NOT_DECODED  # it runs somebody's code


@pytest.mark.usefixtures("usual_way")
@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2), 1], torch.ones(2, requires_grad=True)], ids=str)
def test_the_reading_thread_copies_no_tensor_to_a_gpu(value):
    encoded = codec.encode(value, devices=Devices("worker1", {"cpu": "meta"}))
    assert not codec.decodes_quickly(encoded.payload, encoded.frames)
    assert codec.decode_early(encoded.payload, encoded.frames) is codec.NOT_DECODED
    decoded = codec.decode(encoded.payload, encoded.frames)
    assert (decoded[0] if isinstance(decoded, list) else decoded).device.type == "meta"


class OnGpu:
    """Shared memory of a GPU, as a message's last frame."""

    def __len__(self):
        return 1 << 20


def test_what_lies_in_shared_memory_is_copied_to_a_gpu_from_the_host_only():
    meta = TensorMeta(0, 0, [1 << 18], None, 0, 0, "cuda:0")
    payload = Payload([(-1, 0, 1 << 20)], [meta], form=quick.WHOLE, places=[Place(0, 0, 1 << 21, 0, 1 << 20)])
    assert codec.decodes_quickly(payload, [b"", OnGpu()])
    assert not codec.decodes_quickly(payload, [b"", memoryview(bytes(1 << 20))])
    damaged = msgspec.structs.replace(payload, buffers=[(-3, 0, 1 << 20)])
    assert not codec.decodes_quickly(damaged, [b"", OnGpu()])
