"""Serve a language model from several workers; the model keeps working when a worker dies.

>>> import transformers
>>> config = transformers.LlamaConfig(
...     hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
... )
>>> sw = nbdist.swarm.serve(transformers.LlamaForCausalLM(config), workers=["worker0", "worker1"])
>>> sw.blocks
{'worker0': [0, 1], 'worker1': [2, 3]}
>>> remote = sw.causal_lm()  # a transformers model without blocks: the workers run them
>>> remote.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, pad_token_id=0, eos_token_id=None).shape
torch.Size([1, 7])
>>> sw.close()

notebooks/09_swarm.ipynb serves SmolLM2 and kills workers while it writes.

The path of one token, and the modules along it (a *span* is a row of consecutive blocks on one server)::

    client   transformers' model code          model      its layers are stand-ins that record how they are called
                 │
             Session.step                      session    keeps the history of each span
                 │ finds a route, sends         crew, routing, member
                 ▼
    servers  Server.step ──pushes output──► Server.step ──► ...    server, held, neighbours, large
                 │ waits for cache memory       room, budget
             the server's one computing thread  runtime, pools
                 │
    client   every server also sends its output to the client, which needs it to replace a server that dies

========== ========================================================================================
module     what it does
========== ========================================================================================
swarm      `serve` and `Swarm`, the public interface
model      builds transformers models whose layers are stand-ins for the workers' blocks
sequential the blocks as a module without embeddings and head
session    one inference with caches: takes steps, replaces servers that die
history    the inputs of a span, kept by the client to replay them on another server
merging    merges all steps of a history into one, for ``recover="fast"``
stateless  calls blocks without caches: forward and backward, for training
stacking   stacks several requests into one, and splits a request into micro-batches
crew       the client's list of servers: loads blocks, finds routes, calls servers, notices deaths
member     what the client knows about one server
routing    chooses routes and places blocks; pure functions
journal    the log of a swarm, and the listeners that its map uses
server     runs on a worker: loads blocks, computes, keeps caches
held       one session on one server: its caches, its queued steps and inputs
pools      the queue of requests on a server, by priority
runtime    the one thread of a server that computes
room       makes threads wait for cache memory
budget     grants cache memory in order, with deadlines; pure
neighbours how one server calls another
large      sends large tensors in pieces
names      models that can be served by name, such as "smollm2"
adapter    everything that depends on transformers
========== ========================================================================================
"""

from nbdist.swarm.budget import CacheFull
from nbdist.swarm.routing import NoRoute
from nbdist.swarm.server import Options
from nbdist.swarm.swarm import Swarm, serve

__all__ = ["CacheFull", "NoRoute", "Options", "Swarm", "serve"]
