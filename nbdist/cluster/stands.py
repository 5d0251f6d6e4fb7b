"""`Stands`: says in a line where the workers of a cell stand, from what they and their hosts tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nbdist.amounts import plural
from nbdist.cluster.output.arranger import grouped, say_names

_SHARE_OF_WAITING = 0.05  # the part of the time between two looks for which a waiting thread may use the processor


class Position(NamedTuple):
    """Where a worker's main thread is, and how much it has computed."""

    instruction: tuple[int, ...]
    """The id of the innermost frame, the offset of the instruction in its code, and the count of collectives so far."""
    processor: float
    """Seconds of processor time that the thread has used since it began."""
    call: str
    """The call that the user's code waits in, such as ``dist.recv(src=0)``, or the text of the line."""
    line: str
    """The file and line number of the user's code, such as ``In[3]:2``."""
    memory: int = 0
    """Bytes that the process has in memory, shared ones included; 0 if the system does not tell."""
    in_collective: bool | None = False
    """True in a collective, or just after one, as far as torch's flight recorder tells; None if that is off."""


class Stands:
    """Collects the positions of the workers of one cell and makes the line from them."""

    def __init__(self, after: float) -> None:
        """Make a line about a worker that has waited, or has not answered, for ``after`` seconds."""
        self._after = after
        self._last: dict[str, tuple[float, Position]] = {}  # when each worker was seen last, and where
        # The time from which each worker has waited. A worker without an entry computes, or is not known to wait.
        self._since: dict[str, float] = {}
        self._silent: dict[str, float] = {}  # the time from which each worker has not answered
        # The places of workers that do not answer, as far as their hosts have told; "" for none in the user's code.
        self._places: dict[str, str] = {}

    def heard_nothing(self, worker: str, now: float) -> None:
        """Note that a worker has not answered at the time ``now``."""
        self._last.pop(worker, None)
        self._since.pop(worker, None)
        self._silent.setdefault(worker, now)

    def told(self, worker: str, place: str) -> None:
        """Note that the process of a worker that does not answer runs, at a place such as ``In[3]:2``."""
        self._places[worker] = place

    def unplaced(self, now: float) -> list[str]:
        """Return the workers that `say` will soon name as silent, and whose places are not known."""
        # Their hosts ask them by a signal, which may cut a sleep in the user's C code short: so only late, and once.
        silent = [worker for worker in self._silent if worker not in self._places]
        return [worker for worker in silent if now - self._silent[worker] >= self._after / 2]

    def saw(self, worker: str, found: Position | None, now: float) -> None:
        """Note that a worker was at ``found`` at the time ``now``; None if it runs no user code, or was not asked."""
        self._silent.pop(worker, None)
        self._places.pop(worker, None)
        before = self._last.pop(worker, None)
        if found is not None:
            self._last[worker] = now, found
        if found is not None and before is not None:
            then, place = before
            used = found.processor - place.processor
            # At the same instruction in two looks, it waits since the earlier one, unless it has computed.
            if found.instruction == place.instruction and used <= _SHARE_OF_WAITING * (now - then):
                self._since.setdefault(worker, then)
                return
        self._since.pop(worker, None)

    def say(self, running: Sequence[str], ended: Mapping[str, bool], held: Mapping[str, str], now: float) -> str:
        """Return the line to show at the time ``now``; empty if none should be shown."""
        # ``held`` says in words what keeps workers from the cell; ``ended`` is True for those that ended it by failing.
        waiting = [worker for worker in running if worker in self._since and worker not in held]
        mute = [
            worker for worker in running if worker not in held and now - self._silent.get(worker, now) >= self._after
        ]
        is_long = any(now - self._since[worker] >= self._after for worker in waiting)
        if not held and not mute and not (waiting and (ended or is_long or len(waiting) == len(running))):
            # Else all compute, or some wait for a moment; a wait beside ended workers may be a deadlock after an error.
            return ""
        last = {worker: found for worker, (_, found) in self._last.items()}
        said = [f"{worker} {why}" for worker, why in held.items()]
        for (call, line), workers in grouped(waiting, lambda worker: (last[worker].call, last[worker].line)).items():
            since = min(self._since[worker] for worker in workers)
            verb = plural(len(workers), "waits", "wait")
            said.append(f"{say_names(workers)} {verb} in {call}, {line}, {now - since:.0f} s")
        for worker in mute:
            seconds, at = f"{now - self._silent[worker]:.0f} s", self._places.get(worker)
            cell = f" (its cell is at {at})" if at else ""
            why = "does not answer," if at is None else "has not released the GIL for"
            said.append(f"{worker} {why} {seconds}{cell}")
        computing = [worker for worker in running if worker not in (*waiting, *held, *mute)]
        places = {worker: f" at {found.line}" for worker, found in last.items()}
        for at, workers in grouped(computing, lambda worker: places.get(worker, "")).items():
            said.append(f"{say_names(workers)} {plural(len(workers), 'computes', 'compute')}{at}")
        verbs = {
            True: ("has failed", "have failed"),
            False: ("is through with this cell", "are through with this cell"),
        }
        for failed, words in verbs.items():
            if workers := [worker for worker, how in ended.items() if how == failed]:
                said.append(f"{say_names(workers)} {plural(len(workers), *words)}")
        return "; ".join(said)
