"""Weights, caches and hidden states begin at multiples of 64 bytes on a server, whichever way they came there.

On some processors, MKL's product of one row by a matrix has other last bits if the matrix begins elsewhere. Intel's
have that, too, with MKL_ENABLE_INSTRUCTIONS=SSE4_2.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from helpers.models import swarm_models
from helpers.suite.python_path import TESTS, python_path
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nbdist.swarm import adapter, model_cache, serve
from nbdist.swarm.server.sources import offer
from nbdist.swarm.weight_file import WeightFile, write_weights
from nbdist.testing import World

FAMILIES = {
    **{name: swarm_models.CONFIGS[name] for name in ("llama", "gpt2", "mixtral")},
    # No size of a weight is a multiple of 64 bytes.
    "odd": lambda: transformers.GPT2Config(n_embd=30, n_layer=6, n_head=3, n_positions=64, vocab_size=97),
}
# The lengths of header that safetensors itself writes, first those at which the bits differed.
BEGINS = (8, 24, 40, 56, 0, 16, 32, 48)


@pytest.fixture(scope="module")
def world():
    with World(4) as world, world[0].activate():
        yield world


def make(family, dtype):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()


def begin_data_at(folder, begin):
    """Give the file of weights another length of its header, as if somebody else had written it."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ")
    header += b" " * ((begin - 8 - len(header)) % 64)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


@contextlib.contextmanager
def whatever_is_misaligned():
    """The tensors with which blocks are called on servers of this process that begin elsewhere than they should."""
    found, calls, call = [], [], adapter.call

    def looked_at(layer, hidden, told, cache):
        tensors = {"hidden": hidden, **layer.state_dict(keep_vars=True)}
        for number, entry in enumerate(cache.layers if cache is not None else ()):
            tensors |= {f"cache {number}.{name}": value for name, value in vars(entry).items()}
        calls.append(layer)
        found.extend(
            (name, tensor.data_ptr() % 64)
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() % 64
        )
        return call(layer, hidden, told, cache)

    with mock.patch.object(adapter, "call", looked_at):
        yield found
    assert calls


def text_through(swarm, model):
    """Compare the logits with the model's, while blocks and caches come to servers in all ways."""
    remote = swarm.causal_lm()
    ids = swarm_models.one()["input_ids"]
    caches = [model_cache.new_cache(each.config) for each in (model, remote)]

    def forget():
        swarm.crew.ask(swarm.crew.member("worker1"), "close", caches[1].nbdist[1].id)

    ways = {
        3: lambda: swarm.move(0, 2, "worker2"),  # which loads them, and fetches their caches
        4: forget,  # the session is replayed
        5: lambda: swarm.join("worker3"),
        6: lambda: swarm.leave("worker2"),
        7: lambda: swarm.crew.lose(swarm.crew.member("worker3").incarnation, "it is said to be gone"),
    }
    for number in range(2, ids.shape[1]):
        ways.get(number, lambda: None)()
        part = ids[:, :3] if number == 2 else ids[:, number : number + 1]
        expected, found = (
            each(part, past_key_values=cache).logits for each, cache in zip((model, remote), caches, strict=True)
        )
        assert torch.equal(found, expected)
    assert swarm.blocks == {"worker1": [0, 1, 2, 3, 4, 5]}


@contextlib.contextmanager
def files_unseen():
    """Servers see no file of a client's, as on another host."""
    with mock.patch("nbdist.swarm.placer.offer", lambda found: offer(found)._replace(folder="/nowhere")):
        yield


@given(
    begin=st.integers(0, 63),
    far=st.booleans(),
    family=st.sampled_from(list(FAMILIES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(begin=8, far=False, family="llama", dtype=torch.float32)
@example(begin=8, far=True, family="llama", dtype=torch.float32)
@example(begin=0, far=False, family="odd", dtype=torch.bfloat16)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@torch.no_grad()
def test_what_reaches_a_server_is_aligned_whatever_the_header_and_the_way(world, begin, far, family, dtype):
    model = make(family, dtype)
    with tempfile.TemporaryDirectory() as name:
        adapter.write_checkpoint(model, Path(name))
        begin_data_at(Path(name), begin)
        with files_unseen() if far else contextlib.nullcontext(), whatever_is_misaligned() as misaligned:
            swarm = serve(name, workers=[1, 2])
            text_through(swarm, model)
            swarm.close()
    assert not misaligned


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
@torch.no_grad()
def test_a_model_that_is_served_itself_is_aligned(world, family, far):
    model = make(family, torch.float32)
    with files_unseen() if far else contextlib.nullcontext(), whatever_is_misaligned() as misaligned:
        swarm = serve(model, workers=[1, 2])
        text_through(swarm, model)
        assert bool(swarm.checkpoint.weights.copied) == (family == "odd")
        swarm.close()
    assert not misaligned


_ON_OTHER_PROCESSORS = """
import sys, tempfile
from pathlib import Path
import torch
import test_alignment as here
from nbdist.swarm import adapter, model_cache, serve
from nbdist.testing import World

model = here.make("llama", torch.float32)
with World(4) as world, world[0].activate(), torch.no_grad(), tempfile.TemporaryDirectory() as name:
    adapter.write_checkpoint(model, Path(name))
    for begin in here.BEGINS:
        here.begin_data_at(Path(name), begin)
        swarm = serve(name, workers=[1, 2])
        here.text_through(swarm, model)
        swarm.close()
"""


@pytest.mark.timeout(180)
def test_logits_are_equal_to_the_last_bit_where_alignment_matters():
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", **python_path(Path(__file__).parent, TESTS)}
    done = subprocess.run([sys.executable, "-c", _ON_OTHER_PROCESSORS], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


# -- the file --------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
TENSORS = st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES), st.booleans())


@given(st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"), TENSORS))
def test_a_file_is_what_others_read_too_and_aligned_as_far_as_it_can_be(described):
    weights = {
        name: torch.randint(0, 2, shape).to(dtype).t() if turned and len(shape) == 2 else torch.ones(shape).to(dtype)
        for name, (shape, dtype, turned) in described.items()
    }
    with tempfile.TemporaryDirectory() as name:
        write_weights(weights, Path(name))
        file = WeightFile(name)
        found, others = file.read(list(weights)), load_file(Path(name, "model.safetensors"))
    assert file.sizes == {name: weight.nbytes for name, weight in weights.items()}
    assert file.copied <= sum(size for size in file.sizes.values() if size % 64)
    assert found.keys() == others.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == others[name].dtype == weight.dtype
        assert found[name].shape == others[name].shape == weight.shape
        assert found[name].tolist() == others[name].tolist() == weight.tolist()
        assert found[name].data_ptr() % 64 == 0


@pytest.mark.parametrize("begin", BEGINS)
def test_what_is_copied_is_said_once_with_its_bytes(world, tmp_path, begin):
    model = make("llama", torch.float32)
    adapter.write_checkpoint(model, tmp_path)
    begin_data_at(tmp_path, begin)
    swarm = serve(tmp_path, workers=[1, 2], spans=[(0, 3), (3, 6)])
    swarm.join("worker3")
    told = [line for line in swarm.log if "copied" in line]
    swarm.close()
    assert told == [
        f"248 KB of weights are copied when they are loaded, not mapped: in {tmp_path} they do not begin at multiples "
        "of 64 bytes"
    ] * bool(begin)


def test_a_file_that_safetensors_wrote_is_aligned_in_memory(tmp_path):
    """It packs weights without regard to where they begin."""
    weights = {"a": torch.rand(33), "b": torch.rand(64), "c": torch.rand(5, 7).bfloat16(), "d": torch.tensor(3.0)}
    save_file(weights, tmp_path / "model.safetensors")
    found = WeightFile(tmp_path).read(list(weights))
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert not any(weight.data_ptr() % 64 for weight in found.values())


@torch.no_grad()
def test_a_model_in_llama_cpps_format_is_aligned_once_converted(world, tmp_path):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    made = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    made.add_context_length(64)
    made.add_embedding_length(32)
    made.add_block_count(6)
    made.add_feed_forward_length(64)
    made.add_head_count(4)
    made.add_head_count_kv(2)
    made.add_layer_norm_rms_eps(1e-6)
    made.add_vocab_size(97)
    made.add_rope_dimension_count(8)
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("default")
    made.add_token_list(["t", "1", "t1", *(f"other{number}" for number in range(94))])
    made.add_token_types([1] * 97)
    made.add_token_merges(["t 1"])
    shapes = {"token_embd": (97, 32), "output_norm": (32,), "output": (97, 32)}
    for number in range(6):
        block = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)}
        block |= {"attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
        shapes |= {f"blk.{number}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        made.add_tensor(f"{name}.weight", torch.rand(shape).numpy())
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    adapter.convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    with whatever_is_misaligned() as misaligned:
        swarm = serve(tmp_path / "folder", workers=[1, 2])
        text_through(swarm, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder"))
        swarm.close()
    assert not misaligned
    assert not WeightFile(tmp_path / "folder").copied
