"""The backend ``FAULTY_TENSORPIPE``, which torch registers in ``torch.distributed.rpc._testing``."""

import sys
from types import ModuleType

import torch.distributed.rpc
from conformance.private_names.message_names import faults

from nbdist.channel.faulty import FaultyChannel
from nbdist.compat.agents import TensorPipeAgent
from nbdist.compat.options import TensorPipeRpcBackendOptions
from nbdist.compat.rpc.backend_registry import register_backend
from nbdist.rpc import api


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Takes the options of torch's fault-injecting backend.

    The first ``num_fail_sends`` messages of each type in ``messages_to_fail`` to each worker fail. Messages of the
    types in ``messages_to_delay`` arrive that many seconds late. The types are torch's, such as
    ``"RREF_FORK_REQUEST"``.
    """

    def __init__(self, *, messages_to_fail, messages_to_delay, num_fail_sends=0, **options):
        super().__init__(**options)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay)
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """Starts an agent some of whose messages fail or arrive late, as its options say."""

    @classmethod
    def start(cls, store, name, rank, world_size, rpc_backend_options):
        """Start an agent, and make it the current one. The parameters are those of a backend's function."""
        options = rpc_backend_options
        rules = faults(options.messages_to_fail, options.num_fail_sends, options.messages_to_delay)

        def wrap(channel):
            return FaultyChannel(channel, rules)

        return cls.around(api.initialize(name, rank, world_size, options, store=store, wrap=wrap))


def make_options(rpc_timeout, init_method, **options):
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def install():
    """Register the backend, and put torch's module of its classes where the suites import it."""
    register_backend("FAULTY_TENSORPIPE", make_options, FaultyTensorPipeAgent.start)
    module = ModuleType("torch.distributed.rpc._testing")
    for cls in (FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions):
        setattr(module, cls.__name__, cls)
    sys.modules[module.__name__] = torch.distributed.rpc._testing = module
