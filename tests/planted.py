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
from collections.abc import Iterable
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
HISTORIES = "rpc/test_histories.py::test_any_history_neither_leaks_nor_drops_early"
ORDERS = "rpc/test_histories.py::test_in_every_order_nothing_is_dropped_early_and_nothing_leaks"

FAULTS = {
    "a hook runs twice": Fault(
        "autograd/passes/worker_part.py",
        "    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or",
        "    if",
        PROTOCOL,
    ),
    "an acknowledgement is lost": Fault(
        "autograd/passes/pass_driver.py",
        "                    run.settled += taken",
        "                    run.settled += taken[1:]",
        PROTOCOL,
    ),
    "a gate lets the pass through too early": Fault(
        "autograd/passes/worker_part.py", "            raise HeldBack", "            return None", PROTOCOL
    ),
    "what crossed into a held node is forgotten": Fault(
        "autograd/passes/worker_part.py",
        "                    self._kept.append(Crossing(node, output, gradient))\n\n        return keep",
        "                    pass\n\n        return keep",
        PROTOCOL,
    ),
    "the marking ends while gradients are under way": Fault(
        "autograd/passes/ledger.py",
        "self._begun and not self._early and self._open <= self._marked",
        "self._begun and not any(token.is_mark for token in self._open)",
        PROTOCOL,
    ),
    "reports are taken as they come": Fault(
        "autograd/passes/ledger.py",
        "        waiting = self._overtaken.setdefault(sender, {})",
        "        self._taken[sender] = report.number - 1\n        waiting = self._overtaken.setdefault(sender, {})",
        "autograd/test_protocol.py::test_a_report_that_has_overtaken_another_waits_for_it",
    ),
    "the second result of a call gets the gradient of the first": Fault(
        "autograd/passes/worker_part.py",
        "for index, gradient in zip(outputs, gradients, strict=True):",
        "for index, gradient in zip(sorted(outputs, reverse=True), gradients, strict=True):",
        PROTOCOL,
    ),
    "two passes have the same leaf at a time": Fault(
        "autograd/passes/claims.py",
        "            _condition.wait()\n",
        "            break\n",
        "autograd/test_passes.py::test_sixty_concurrent_passes_that_share_parameters",
    ),
    "what a checkpoint accumulates stays in .grad": Fault(
        "autograd/passes/engine.py", "        if inputs:", "        if True:", "autograd/test_features.py"
    ),
    "tensors are attached in another order": Fault(
        "wire/history.py",
        "    return attach(tensors) if",
        "    return attach(tensors)[::-1] if",
        "autograd/test_passes.py::test_one_of_two_results_is_not_used",
    ),
    "the end of a context is not told": Fault(
        "autograd/recorder.py",
        "            self.transport.tell(worker, messages.Release(context.id, context.maker))\n        self._release",
        "            pass\n        self._release",
        "autograd/test_passes.py::test_a_context_is_gone_everywhere_also_where_a_third_worker_brought_it",
    ),
    "a third worker does not say that it has the context": Fault(
        "autograd/recorder.py",
        "if maker not in (sender, self.me):",
        "if False:",
        "autograd/test_passes.py::test_a_context_is_gone_everywhere_also_where_a_third_worker_brought_it",
    ),
    "a fork is not counted": Fault(
        "rpc/core/forks.py",
        "                owned.forks[child] = to\n                self._remember_uninformed(owned, to)",
        "                self._remember_uninformed(owned, to)",
        HISTORIES,
    ),
    "a fork in a call that the channel refused is not taken back": Fault(
        "rpc/links.py",  # as long as a message counts as sent, the sender of the call leaves the forks alone, too
        "            holds.is_sent = False\n            holds.take_back()\n",
        "            pass\n",
        HISTORIES,
    ),
    "Ctrl-C leaves a number that no message has": Fault(
        "wire/peer.py",
        "        seq = self.next_seq if message.must_arrive else 0\n",
        "        seq = self.next_seq if message.must_arrive else 0\n        self.next_seq += message.must_arrive\n",
        "rpc/test_peer.py::test_ctrl_c_while_a_message_is_written_leaves_no_number_without_a_message",
    ),
    "Ctrl-C leaves forks that no message has": Fault(
        "rpc/calls/sender.py",
        "            if forker is not None:\n                forker.take_back()\n",
        "",
        "rpc/test_interrupted_sends.py",
    ),
    "an agent says that nothing is under way while messages are": Fault(
        "rpc/world/shutdown.py", "active + outstanding", "active", "rpc/test_ending.py"
    ),
    "an answer does not take its call out of the table": Fault(
        "rpc/core/pending.py",
        "        return self._calls.pop(id, None) if call is not None and call.to == sender else None",
        "        return call if call is not None and call.to == sender else None",
        HISTORIES,
    ),
    "a call that the user gave up is answered as well": Fault(
        "rpc/calls/outcomes.py",
        "self._pending.pop(call.id) is not None:\n                self._fail(call, error, may_exist=True)",
        "self._pending.get(call.id) is not None:\n                self._fail(call, error, may_exist=True)",
        HISTORIES,
    ),
    "a call whose references are confirmed does not begin": Fault(
        "rpc/core/exchange.py",
        "        for arrival in self._by_fork.pop(fork, ()):",
        "        for arrival in self._by_fork.pop(fork, [])[1:]:",
        HISTORIES,
    ),
    "a call that waits for a value is forgotten when its caller is lost": Fault(
        "rpc/core/exchange.py",
        "if arrival.stage is not ArrivalStage.READY]",
        "if arrival.stage is not ArrivalStage.READY][1:]",
        ORDERS,
    ),
    "a call runs before the value is there on which it works": Fault(
        "rpc/core/exchange.py",
        "            return self._wait(arrival, target, ArrivalStage.AWAITING)",
        "            arrival.stage = ArrivalStage.AWAITING",
        HISTORIES,
    ),
    "a call does not keep the value on which it works": Fault(
        "rpc/core/exchange.py", "            forks.retain(target)\n", "            forks.make(target)\n", HISTORIES
    ),
    "what a refused call was to make counts as made here": Fault(
        "rpc/core/exchange.py",
        "            instructions += self.forks.uncreate(result.rref, result.fork)",
        "            instructions += self.forks.release_owned(result.rref)",
        "rpc/test_exchange.py::test_a_refused_creation_is_as_if_it_had_not_come",
    ),
    "a reference whose creation cannot be repeated is pending for ever": Fault(
        "rpc/calls/outcomes.py",
        "        self._fail(call, error, may_exist=False)\n\n    def _abandon",
        "        self.end(call, None, error)\n\n    def _abandon",
        "rpc/test_histories.py::test_a_creation_that_cannot_be_repeated_fails_its_reference",
    ),
    "a callee is not told that a call which it refused is given up": Fault(
        "rpc/calls/outcomes.py",
        "                self._abandon(sender, reply.id)",
        "                pass",
        "rpc/test_histories.py::test_a_creation_whose_time_is_up_before_it_is_refused_ends_who_waits_for_its_value",
    ),
    "a message that comes twice is taken twice": Fault(
        "wire/peer.py",
        "            self.duplicates += 1",
        "            self.duplicates += 1\n            return True",
        "rpc/test_peer.py",
    ),
    "a delete that overtakes the creation is forgotten": Fault(
        "rpc/core/forks.py",
        "                self.early[message.fork] = sender",
        "                pass",
        "rpc/test_forks.py::test_a_delete_that_overtakes_the_creation_ends_it",
    ),
    "a ping makes what was sent after it go again": Fault(
        "wire/peer.py",
        "if kept.pings < pong.number]",
        "if kept.pings <= pong.number]",
        "rpc/test_peer.py::test_a_ping_that_went_before_a_message_says_nothing_about_it",
    ),
    "a block that a forked process reads goes back to its arena": Fault(
        "channel/shared_memory/leases.py",
        "what._replace(is_shared=True) if is_shared else what",
        "what",
        "channel/test_arena.py::test_a_forked_process_keeps_what_it_reads",
    ),
    "a block on a GPU goes back while the GPU may still read it": Fault(
        "channel/shared_memory/leases.py",
        "            if memory is not None:\n",
        "            if memory is not None and False:\n",
        "channel/test_gpu_arena.py::test_a_block_comes_back_when_the_gpu_is_done",
    ),
    "memory of a GPU is unmapped while the GPU may still read it": Fault(
        "channel/shared_memory/quiet.py",
        "            if done[index]:\n",
        "            if True:\n",
        "channel/test_gpu_arena.py::test_memory_stays_mapped_while_a_gpu_cannot_be_waited_for",
    ),
    "a mapping of a GPU's memory that is not used for a while is dropped": Fault(
        "channel/shared_memory/leases.py",
        "_UNMAP_AFTER and key[1] < FIRST_GPU_SEGMENT:",
        "_UNMAP_AFTER:",
        "channel/test_gpu_arena.py::test_a_segment_that_its_owner_closes_is_unmapped",
    ),
    "a handler that raises leaves the other signals deferred": Fault(
        "signals.py",
        "                raised = error\n        if raised",
        "                raise\n        if raised",
        "test_signals.py::test_a_handler_that_raises_at_any_moment_leaves_all_others_as_they_were",
    ),
    "a message that Ctrl-C cuts in the middle takes the next one's bytes": Fault(
        "channel/local_link.py",
        "                self._shut()\n                raise\n",
        "                raise\n",
        "channel/test_contract.py::test_a_send_that_is_interrupted_spoils_no_other",
    ),
    "a look that another thread stalls is followed by the next": Fault(
        "channel/spinning.py", "looked > _STALLED_LOOK", "looked > 1000 * _STALLED_LOOK", "channel/test_spinning.py"
    ),
    "a caller that does not read keeps the gate shut": Fault(
        "rpc/calls/waiting_reader.py",
        "            self._channel.expect_no_more()\n",
        "            pass\n",
        "rpc/test_guest.py::test_a_caller_that_does_not_read_leaves_the_gate_open",
    ),
    "a process that had ended before it was watched is not reported": Fault(
        "channel/process_watch.py",
        "        except ProcessLookupError:\n            return True\n",
        "        except ProcessLookupError:\n            return False\n",
        "channel/test_liveness.py::test_a_process_that_has_ended_already_is_reported",
    ),
    "whoever watched signals before is forgotten": Fault(
        "rpc/calls/keyboard_interrupts.py",
        "        _put_back(self._before)",
        "        _put_back(-1)",
        "rpc/test_interrupts.py::test_what_was_there_is_put_back",
    ),
    "a forked worker does not die with its zygote": Fault(
        "cluster/processes/zygote.py",
        "        os.setsid()\n        _die_with(parent)\n",
        "        os.setsid()\n",
        "cluster/test_processes.py::test_the_death_of_the_zygote_is_the_workers_death",
    ),
    "a recovered session lacks its first step": Fault(
        "swarm/client/session.py",
        "            for step in history.steps:\n                self._step_of_lost_part(gone, parts, step)",
        "            for step in history.steps[1:]:\n                self._step_of_lost_part(gone, parts, step)",
        "swarm/test_recovery.py::test_what_comes_out_different_at_once_is_done_step_by_step",
    ),
    "a client names the sessions of another one": Fault(
        "swarm/doors/doorkeeper.py",
        '            args[0] = f"{link.name}/{args[0]}"',
        '            args[0] = args[0] if "/" in args[0] else f"{link.name}/{args[0]}"',
        "swarm/test_doors.py::test_forged_messages_of_a_client_do_nothing",
    ),
    "a client calls what members may call": Fault(
        "rpc/named.py",
        "        if for_client and method not in for_clients:",
        "        if for_client and not for_clients:",
        "swarm/test_doors.py::test_a_client_cannot_change_who_serves_nor_train",
    ),
    "what is settled before it is announced stays open": Fault(
        "autograd/passes/ledger.py", "if token in self._early:", "if token in ():", PROTOCOL
    ),
    "a gate that takes no part goes on holding nodes back": Fault(
        "autograd/passes/worker_part.py",
        "                    self._release(slot)\n                    self._lines.leave(slot)",
        "                    self._lines.leave(slot)",
        PROTOCOL,
    ),
    "a small wish for room overtakes a large one": Fault(
        "swarm/server/cache_budget.py",
        "                break\n            self._waiting.remove(ticket)",
        "                continue\n            self._waiting.remove(ticket)",
        "swarm/test_budget.py::test_in_the_order_of_asking",
    ),
    "a member that leaves a dynamic world stays listed": Fault(
        "rpc/world/roster.py",
        'for name in ("gathering", "formed", "dynamic"):',
        'for name in ("gathering", "formed"):',
        "rpc/test_roster.py::test_who_leaves_is_struck_off_whatever_the_others_do",
    ),
    "half a head at the end of what was read is lost": Fault(
        "channel/framing.py",
        "        if start < end:\n            self._rest = data[start:]",
        "        if end - start >= _HEAD.size:\n            self._rest = data[start:]",
        "channel/test_local.py::test_messages_are_cut_out_of_pieces_of_any_size",
    ),
}

SABOTAGE = {
    "resend twice": Fault(
        "rpc/links.py",
        "frames, message.kind)\n            except ChannelError:\n                if isin",
        "frames, message.kind)\n"
        "                if isinstance(message, Call) and outgoing.seq % 20 == 0:\n"
        "                    again = peer.send(message, frames, now, holds)\n"
        "                    link.send(again.frames, message.kind)\n"
        "            except ChannelError:\n                if isin",
        "chaos/test_chaos.py::test_a_storm_reports_exactly_what_was_broken_on_purpose",
    ),
    "drop a delete": Fault(
        "rpc/core/forks.py",
        "        return [Send(user.owner, UserDelete(user.rref, fork))]",
        "        return []",
        "chaos/test_chaos.py::test_a_storm_reports_exactly_what_was_broken_on_purpose",
    ),
}
"""Faults for a chaos run, whose ledger must report exactly them: calls that run twice, objects that are never freed."""


def plant(fault: Fault, folder: Path) -> None:
    """Put a copy of the package with the fault into ``folder``, which then belongs onto the import path."""
    copy = folder / "nbdist"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    change(fault, copy)


def change(fault: Fault, copy: Path) -> None:
    """Change a copy of the package as the fault says."""
    file = copy / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} does not have once: {fault.old!r}"
    file.write_text(text.replace(fault.old, fault.new))


def found(fault: Fault) -> bool:
    """Whether the fault's test fails with it."""
    with tempfile.TemporaryDirectory(prefix="nbdist-planted-") as folder:
        plant(fault, Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["NBDIST_NO_SHRINKING"] = "1"
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


def type_errors(faults: Iterable[Fault]) -> list[str]:
    """Return mypy's errors and failed imports over copies of the package with one fault each.

    All copies lie in the same folder, one after the other, so that mypy reads again only what a fault changes.
    """
    errors = []
    with tempfile.TemporaryDirectory(prefix="nbdist-planted-") as name:
        folder = Path(name)
        copy = folder / "nbdist"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(TESTS.parent / "pyproject.toml"), "nbdist"]
        for fault in faults:
            before = (copy / fault.file).read_text()
            change(fault, copy)
            module = "nbdist." + fault.file.removesuffix(".py").replace("/", ".")
            for command in ([sys.executable, "-c", f"import {module}"], mypy):
                done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
                if done.returncode:
                    errors.append(f"{fault.file}, {fault.new!r}: {done.stdout}{done.stderr}")
            (copy / fault.file).write_text(before)
    return errors


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
