"""`Collation`: compares what the workers of a cluster have called in their process groups.

::

    a cell that hangs, or is late   asks all workers                                          `ask`, `partings`
    the end of a cell               compares what they have sent with the ends of their       `at_end_of_cell`
                                    cells. Only if that differs, asks them, and the cell waits

At its end, a cell has told what gloo gets wrong without a word: if members give tensors of different sizes, some get
wrong values. A collective that only some members have called counts once all workers are idle: then the next one will
be taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures

from nbdist.amounts import plural
from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.kernels.crash_reports import share_expected
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.output.arranger import say_names, stream_text
from nbdist.cluster.partings import Parting, find_odd_one, find_partings, say_last
from nbdist.cluster.processes.last_operations import CALLED_LAST
from nbdist.cluster.processes.probe import ANSWER_WITHIN, Probe
from nbdist.cluster.worker import flight_recorder
from nbdist.errors import GroupError, NbdistError
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future

_ANSWER_WITHIN = 0.4
"""Seconds for the workers to answer. For one that holds the GIL, torch's server answers its host."""
_ANSWER_WITHIN_AT_END = 2.0
"""Seconds for the answers where a difference is known, and only its lines are missing: the cell waits for them."""
_POLL = 0.01
_SHIFTED = "; the next collective there will be taken for it"


class Collation:
    """Finds where the members of the workers' process groups part. ``workers`` are all of the cluster, by rank."""

    def __init__(self, workers: Sequence[Worker], thread: KernelThread, agent: Agent, lifecycle: Lifecycle) -> None:
        self._workers, self._thread, self._agent, self._lifecycle = workers, thread, agent, lifecycle
        self._compared: list[Sequence[GroupHistory]] = []
        """The histories of all workers that were compared last."""
        self._told: set[object] = set()
        """The partings that were told at the ends of cells. A difference stays in the recorders, and is told once."""
        self._telling: set[asyncio.Task[None]] = set()
        """The tasks of cells that have not ended yet. A loop keeps only weak references to its tasks."""

    def ask(self, within: float = _ANSWER_WITHIN) -> dict[str, Future[Sequence[GroupHistory]]]:
        """Ask all living workers for answers in ``within`` seconds; return them, by name, without waiting for them."""
        asked = {}
        for worker in self._workers:
            if worker.alive:
                with contextlib.suppress(NbdistError):  # it is dying
                    asked[worker.name] = self._agent.at(worker.name, "collectives").call("histories", timeout=within)
        return asked

    def conclude(
        self,
        asked: Mapping[str, Future[Sequence[GroupHistory]]],
        probes: Mapping[str, futures.Future[Probe]],
        *,
        at_rest: bool = False,
    ) -> list[Parting]:
        """Return where the members part, as far as the answers that have arrived tell; as for `find_partings`."""
        if not (told := _told(asked)):
            return []
        groups = [history for histories in told.values() for history in histories]
        # Those without an answer may hold the GIL.
        for worker in self._workers:
            if worker.name not in told and worker.name in probes and probes[worker.name].done():
                with contextlib.suppress(Exception):  # its host cannot be reached, or it has no record
                    own = [each for each in groups if worker.rank in each.ranks]
                    found = probes[worker.name].result()
                    told[worker.name] = flight_recorder.decode(found.record, found.formed, own)
        return self._part(told, at_rest)

    def partings(self, probes: Mapping[str, futures.Future[Probe]] | None = None) -> list[Parting]:
        """Ask all living workers, wait for their answers, and return where the members part."""
        asked = self.ask()
        deadline = time.monotonic() + _ANSWER_WITHIN
        for answer in asked.values():
            with contextlib.suppress(Exception):  # the worker died, or the answer is late
                answer.wait(max(0.0, deadline - time.monotonic()))
        if probes is None:
            silent = asked.keys() - _told(asked).keys()
            probes = {name: self._lifecycle.launcher.probe(name) for name in silent}
        futures.wait(probes.values(), 2 * ANSWER_WITHIN)
        return self.conclude(asked, probes)

    def at_end_of_cell(self, cell: Cell, end: Callable[[], None]) -> None:
        """Compare what the workers had called at the ends of their cells; call ``end``. In the kernel thread."""
        differs = False
        try:  # the cell must end, whatever is wrong with what was sent
            latest = [worker.histories for worker in self._workers]
            is_known = list(map(id, latest)) == list(map(id, self._compared))
            self._compared = latest
            told = {worker.name: worker.histories for worker in self._workers if worker.alive}
            differs = not is_known and (
                bool(self._has_lost(cell)) or any(self._key(each) not in self._told for each in self._part(told, True))
            )
        finally:
            if not differs:
                end()
        if differs:
            telling = self._thread.loop.create_task(self._tell(cell))  # the end of the thread cancels it
            telling.add_done_callback(lambda _: end())
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell(self, cell: Cell) -> None:
        """Ask the workers, and tell below a cell what was not told before."""
        asked, deadline = self.ask(_ANSWER_WITHIN_AT_END), time.monotonic() + _ANSWER_WITHIN_AT_END
        while not all(each.done() for each in asked.values()) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL)
        are_idle = not any(worker.cells for worker in self._workers)
        is_whole = are_idle and len(cell.parts) == len(asked) and not cell.interrupted
        partings = self.conclude(asked, {}, at_rest=True)
        lost = self._has_lost(cell)
        if lost and not partings:
            blank = [each.name for each in self._workers if each.name in lost and CALLED_LAST not in (each.lost or "")]
            own = plural(len(blank), "its own record is", "their own records are")
            for text in say_last(_told(asked), [worker.name for worker in self._workers], lost):
                _print(cell, f"{text}; of {say_names(blank)}, {own} lost" if blank else text)
        for each in partings:
            if self._key(each) not in self._told and (is_whole or not each.absent):
                self._told.add(self._key(each))
                if each.absent and any(error.name == GroupError.__name__ for error in cell.errors):
                    continue  # the group is broken off, and its members call it in vain
                goes_on = each.absent and not cell.errors
                _print(cell, f"{each.text}{_SHIFTED if goes_on else ''}")
        for worker in self._workers:
            if worker.name in lost and (share := share_expected(worker.lost or "")) is not None:
                names = [each.name for each in self._workers]
                if odd := find_odd_one(_told(asked), names, worker.name, share):
                    innocent = f": {worker.name}, which gloo ended, gave the same as the rest"
                    _print(cell, f"{odd} gave another size than all others{innocent if odd != worker.name else ''}")

    def _has_lost(self, cell: Cell) -> list[str]:
        """Return the workers that have died in a cell."""
        return [each.name for each in self._workers if not each.alive and each.name in cell.parts]

    def _key(self, parting: Parting) -> object:
        """Return what makes a parting another one: it is found at the end of each later cell, too."""
        return self._lifecycle.generations.present, parting.group, parting.absent or parting.number, parting.behind

    def _part(self, told: Mapping[str, Sequence[GroupHistory]], at_rest: bool) -> list[Parting]:
        return find_partings(told, [worker.name for worker in self._workers], at_rest=at_rest)


def _print(cell: Cell, line: str) -> None:
    cell.sink.page.publish(stream_text("stderr", f"{line}\n"))


def _told(asked: Mapping[str, Future[Sequence[GroupHistory]]]) -> dict[str, Sequence[GroupHistory]]:
    """Return the answers that have arrived, by worker."""
    told: dict[str, Sequence[GroupHistory]] = {}
    for name, answer in asked.items():
        if answer.done():
            with contextlib.suppress(Exception):  # the worker died, or the answer is late
                told[name] = answer.value()
    return told
