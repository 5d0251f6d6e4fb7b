"""Plants faults in a copy of the package, one at a time, and has the tests find them: a suite that can fail.

    python tests/planted.py [NAME ...]

Each fault is a line or two changed, as somebody might by mistake. The test named beside it must fail then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbdist

TESTS = Path(__file__).parent
PACKAGE = Path(nbdist.__file__).parent


@dataclass(frozen=True)
class Fault:
    """A change, and the test that notices it."""

    file: str
    old: str
    new: str
    test: str


PROTOCOL = "autograd/test_protocol.py::test_any_order_of_messages"

FAULTS = {
    "a hook runs twice": Fault(
        "autograd/part.py",
        "    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or",
        "    if",
        PROTOCOL,
    ),
    "an acknowledgement is lost": Fault(
        "autograd/passes.py",
        "                    run.settled += taken",
        "                    run.settled += taken[1:]",
        PROTOCOL,
    ),
    "a gate lets the pass through too early": Fault(
        "autograd/part.py",
        "            raise Held",
        "            return None",
        PROTOCOL,
    ),
    "what crossed into a held node is forgotten": Fault(
        "autograd/part.py",
        "                    self._kept.append(Crossing(node, output, gradient))\n\n        return keep",
        "                    pass\n\n        return keep",
        PROTOCOL,
    ),
    "the marking ends while gradients are under way": Fault(
        "autograd/ledger.py",
        "self._begun and not self._early and self._open <= self._marked",
        "self._begun and not any(token.is_mark for token in self._open)",
        PROTOCOL,
    ),
    "reports are taken as they come": Fault(
        "autograd/ledger.py",
        "        waiting = self._overtaken.setdefault(sender, {})",
        "        self._taken[sender] = report.number - 1\n        waiting = self._overtaken.setdefault(sender, {})",
        "autograd/test_protocol.py::test_a_report_that_has_overtaken_another_waits_for_it",
    ),
    "the second result of a call gets the gradient of the first": Fault(
        "autograd/part.py",
        "for index, gradient in zip(outputs, gradients, strict=True):",
        "for index, gradient in zip(sorted(outputs, reverse=True), gradients, strict=True):",
        PROTOCOL,
    ),
    "two passes have the same leaf at a time": Fault(
        "autograd/leaves.py",
        "                _condition.wait()\n",
        "                break\n",
        "autograd/test_passes.py::test_sixty_concurrent_passes_that_share_parameters",
    ),
    "what a checkpoint accumulates stays in .grad": Fault(
        "autograd/engine.py",
        "        if current_part() is None or inputs:",
        "        if True:",
        "autograd/test_features.py",
    ),
    "tensors are attached in another order": Fault(
        "wire/codec.py",
        "    return attach(tensors) if",
        "    return attach(tensors)[::-1] if",
        "autograd/test_passes.py::test_one_of_two_results_is_not_used",
    ),
    "the end of a context is not told": Fault(
        "autograd/recorder.py",
        "            self.tell(worker, messages.Release(context.id))\n        self._release",
        "            pass\n        self._release",
        "autograd/test_passes.py::test_a_context_is_gone_everywhere_also_where_a_third_worker_brought_it",
    ),
    "a third worker does not say that it has the context": Fault(
        "autograd/recorder.py",
        "if maker not in (sender, self._agent.me.incarnation):",
        "if False:",
        "autograd/test_passes.py::test_a_context_is_gone_everywhere_also_where_a_third_worker_brought_it",
    ),
    "a fork is not counted": Fault(
        "rpc/forks.py",
        "                owned.forks[child] = to\n                self._remember_uninformed(owned, to)",
        "                self._remember_uninformed(owned, to)",
        "rpc/test_forks.py::test_any_history_neither_leaks_nor_drops_early",
    ),
    "a message that comes twice is taken twice": Fault(
        "wire/peer.py",
        "            self.duplicates += 1",
        "            self.duplicates += 1\n            return True",
        "rpc/test_peer.py",
    ),
}


def found(fault: Fault) -> bool:
    """Whether the fault's test fails with it."""
    with tempfile.TemporaryDirectory(prefix="nbdist-planted-") as folder:
        copy = Path(folder) / "nbdist"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / fault.file
        text = file.read_text()
        assert text.count(fault.old) == 1, f"{fault.file} does not have once: {fault.old!r}"
        file.write_text(text.replace(fault.old, fault.new))
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONSAFEPATH", None)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=60", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, str(TESTS / fault.test)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if "no tests ran" in done.stdout or done.returncode not in (0, 1):
            return "Timeout" in done.stdout + done.stderr  # a test that hangs is a test that fails
        return done.returncode == 1


def main() -> int:
    """Plant what was asked for; the number of faults that nobody found."""
    missed = 0
    for name in sys.argv[1:] or FAULTS:
        seen = found(FAULTS[name])
        missed += not seen
        print(f"{'found ' if seen else 'MISSED'}  {name}  ({FAULTS[name].test})", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
