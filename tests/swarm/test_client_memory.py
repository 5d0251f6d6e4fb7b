"""What a client has of a large model."""

import psutil
import torch
import transformers
from helpers.models import swarm_models

from nbdist.swarm import adapter, serve


def test_a_client_needs_memory_for_embeddings_and_head_only(shared_cluster, tmp_path):
    """200 MB of blocks; embeddings and head are small."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    adapter.write_checkpoint(model, tmp_path)
    del model
    warm = serve(swarm_models.make("llama"), workers=[0, 1])
    swarm_models.generate(warm.causal_lm(), "one", tokens=2)
    warm.close()
    process = psutil.Process()
    before = process.memory_full_info().uss
    swarm = serve(tmp_path, workers=[0, 1])
    remote = swarm.causal_lm()
    found = swarm_models.generate(remote, "one", tokens=4)
    own = sum(parameter.nbytes for parameter in remote.parameters())
    assert found.shape == (1, 13)
    assert sum(swarm.sizes) > 200e6
    assert process.memory_full_info().uss - before < own + 50e6
    swarm.close()
