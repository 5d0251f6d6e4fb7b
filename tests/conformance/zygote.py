"""Runs tests out of torch's own suites on nbdist: a process that has imported them and forks for each test.

It reads one JSON line a test from its standard input and answers with one. Every test runs in a session of
its own, with its output in a file, so that whatever it leaves behind is seen, and ended.
"""

import contextlib
import json
import os
import signal
import sys
import time
import unittest
from pathlib import Path

from helpers.processes import stacks

_kept = []
"""The process groups of a test, in the process that ran it. It ends by ``os._exit``, so they are never freed."""

DUMP_AFTER = 60  # torch's test case prints the stacks of all workers then
KILL_AFTER = 90


def load():
    """torch's suites by name, each mixed with its fixture and with processes that are forked."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(DUMP_AFTER)
    os.environ["PYTORCH_JIT"] = "0"  # torch's switch: TorchScript is not what is tested, though some tests use it
    # The tests of DDP call a trainer as soon as the caller's own process group is there. With this switch of torch's,
    # that is when all have theirs; without it, a trainer may still be forming its group, and the test stands still.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    stacks.listen()
    import torch
    from conformance import private_names

    import nbdist.compat

    nbdist.compat.install()
    private_names.install()
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test
    from torch.testing._internal.distributed.nn.api import remote_module_test
    from torch.testing._internal.distributed.rpc import (
        dist_autograd_test,
        dist_optimizer_test,
        faulty_agent_rpc_test,
        rpc_test,
    )
    from torch.testing._internal.distributed.rpc.examples import parameter_server_test, reinforcement_learning_rpc_test
    from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    class Forked(MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self):
            super().tearDown()
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.file_name)

        def _check_return_codes(self, *arguments):
            super()._check_return_codes(*arguments)
            codes = [process.exitcode for process in self.processes]
            assert codes == [0] * len(codes), "a worker did not end well"

    keep_process_groups()
    plain = [
        rpc_test.RpcTest,
        rpc_test.TensorPipeAgentRpcTest,
        parameter_server_test.ParameterServerTest,
        reinforcement_learning_rpc_test.ReinforcementLearningRpcTest,
        dist_autograd_test.DistAutogradTest,
        dist_autograd_test.TensorPipeAgentDistAutogradTest,
        dist_optimizer_test.DistOptimizerTest,
        remote_module_test.RemoteModuleTest,
        ddp_under_dist_autograd_test.DdpUnderDistAutogradTest,
        ddp_under_dist_autograd_test.DdpComparisonTest,
    ]
    suites = [(suite, TensorPipeRpcAgentTestFixture) for suite in plain]
    faulty = [faulty_agent_rpc_test.FaultyAgentRpcTest, dist_autograd_test.FaultyAgentDistAutogradTest]
    suites += [(suite, FaultyRpcAgentTestFixture) for suite in faulty]
    return {suite.__name__: type(suite.__name__, (suite, fixture, Forked), {}) for suite, fixture in suites}


def keep_process_groups():
    """Have process groups outlive ``destroy_process_group``, in the processes that are forked from this one.

    A gloo group that is freed waits, with Python's lock in its hand, for a thread of its own, which may need that lock
    to free a tensor. A test of DDP that frees its last group on leaving stands still then, on torch's RPC as well.
    """
    from torch import distributed

    destroy = distributed.destroy_process_group

    def keep_and_destroy(*arguments, **options):
        _kept.extend(distributed.distributed_c10d._world.pg_map)
        destroy(*arguments, **options)

    distributed.destroy_process_group = keep_and_destroy


def run(suites, name):
    """In the child: run one test; whether it passed."""
    suite, _, method = name.partition(".")
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suites[suite](method))
    for _, reason in result.skipped:
        print(f"skipped, which is not passed: {reason}", file=sys.stderr)
    return result.wasSuccessful() and not result.skipped


def run_forked(suites, name, output):
    """Run one test in a child; "" if it passed, else what went wrong."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = 0 if run(suites, name) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    problem = f"did not end within {KILL_AFTER} s"
    try:
        deadline = time.monotonic() + KILL_AFTER
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                problem = f"failed (exit code {code})" if code else ""
                break
            time.sleep(0.01)
    finally:
        if end_session(child):
            problem = problem or "passed, but left processes behind"
    return problem


def end_session(leader):
    """Kill what there is of the session that a child leads; whether there was anything."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(leader, 0)
    return True


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    suites = load()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `finally`
    print(json.dumps({"ready": sorted(suites)}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        problem = run_forked(suites, request["test"], request["output"])
        answer = {"problem": problem, "seconds": round(time.monotonic() - began, 2)}
        Path(request["output"]).touch()
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
