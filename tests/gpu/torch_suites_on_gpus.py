"""torch's suites for GPUs on nbdist, each mixed with torch's own processes: started anew, because CUDA does not fork.

`unittest` runs one test of this module, and the processes of the test import it as well.
"""

from conformance import private_names

import nbdist.compat

nbdist.compat.install()
private_names.install()

from torch.testing._internal.distributed import rpc_utils  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture  # noqa: E402

suites = rpc_utils.GENERIC_CUDA_TESTS + rpc_utils.TENSORPIPE_CUDA_TESTS
globals().update(rpc_utils.generate_tests("", TensorPipeRpcAgentTestFixture, suites, __name__))
