"""torch's own tests of RPC, unmodified, out of the installed wheel, on nbdist."""

from pathlib import Path

import pytest
from helpers.processes.torch_suites import Zygote


def names(file):
    path = Path(__file__).parent / file
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


SLOW = {
    "FaultyAgentDistAutogradTest.test_context_cleanup_tensor_with_grad",
    "FaultyAgentRpcTest.test_rpc_builtin_timeout",
    "RpcTest.test_all_gather_timeout",
    "RpcTest.test_rpc_timeouts",
    "RpcTest.test_set_and_get_default_rpc_timeout",
    "TensorPipeAgentDistAutogradTest.test_multiple_backward_sparse",
}
"""Tests that run for more than 5 s, while others in this list cover the same functions: `make soak` runs these.

And one whose members have 0.5 s in which to find each other, which they need on a busy machine.
"""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    process = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield process
    process.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in SLOW else []) for name in names("torch_rpc.txt")]
)
def test_suite(zygote, tmp_path, name):
    output = tmp_path / "output"
    answer = zygote.run(name, output)
    if answer["problem"]:
        summary = f"{name} {answer['problem']} after {answer['seconds']} s"
        pytest.fail(f"{summary}\n{output.read_text()}", pytrace=False)
