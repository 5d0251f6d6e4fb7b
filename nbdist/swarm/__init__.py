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

notebooks/09_swarm.ipynb serves SmolLM2 and kills workers while it generates text.

The path of one token, and the modules along it; ``docs/a_token.md`` follows it step by step. A *span* is a row of
consecutive blocks on one server::

    client   `causal_lm().generate`            model      `_generating` calls transformers' own
             transformers' model code          model      its layers are stand-ins that record how they are called
                 │ Passage.take                sessions   begins a session for each cache
             Session.step                      session    keeps the history of each span
                 │ finds a route, sends         crew, routing, server_record
                 ▼
    servers  Server.step ──pushes output──► Server.push ──► ...    server, session_caches, neighbours
                 │ waits for cache memory       cache_room, cache_budget
             the server's one computing thread  runtime, queues
                 │
    client   every server also sends its output to the client, which needs it if the next server dies

============ ======================================================================================
serving      `serve`, which loads the blocks on workers
connecting   `connect`, for other processes that use the swarm, too
swarm        `Swarm`, which the client uses: models, and changes of the workers that serve
http         a subpackage: the model over HTTP, for clients of OpenAI's API
placer       makes servers and gives them blocks, for all clients
doors        a subpackage: clients on other hosts, which are no members
client       a subpackage: models, sessions, and what the client knows about the servers
deputy       keeps a server, and makes the next placer if the placer is lost
directory    a subpackage: the servers as all clients know them, and routes
server       a subpackage: blocks, caches and the computing thread, on each worker
policy       the arguments of `serve` that concern the client, checked
history      the inputs of a span, kept by the client to replay them on another server
stacking     stacks several requests into one, and splits a request into micro-batches
carriage     the extra time that a call with large tensors gets on a slow connection
named_models models that can be served by name, such as "smollm2"
weight_file  the file of weights, mapped and aligned
weakly       calls a method of an object without keeping the object alive
model_cache  works on transformers' caches
adapter      finds, loads and calls the parts of a transformers model
============ ======================================================================================
"""

from nbdist.swarm.connecting import connect
from nbdist.swarm.directory.routing import NoRoute
from nbdist.swarm.server.cache_budget import CacheFull
from nbdist.swarm.server.server import Options
from nbdist.swarm.serving import serve
from nbdist.swarm.swarm import Swarm

__all__ = ["CacheFull", "NoRoute", "Options", "Swarm", "connect", "serve"]
