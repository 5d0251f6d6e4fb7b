"""Shows a line below a cell that has been silent for some seconds; the line says what the cell's workers wait for.

::

    worker0 waits in dist.recv(src=1), In[3]:2, 14 s; worker1 has failed
    worker1 has not come to all_reduce #41, float32[1024], default group: worker0,2 wait in dist.all_reduce(),
      In[7]:7, 12 s; worker1 computes at In[7]:5
    worker0 is still busy with loss.backward(), In[2]:5, 34 s; worker1 is stopped by a signal, 12 s
    worker1 has not released the GIL for 10 s (its cell is at In[3]:4)

    notebook: `Lookout` ── every 2 s of silence ──> worker: `place` ──> `Stands.saw` ──> `Stands.say` ──> the line
                        ── if one is in a collective ──> all workers: `Collation` ──> the line
                        ── if it does not answer for long ──> its host: `Launcher.probe`

A worker counts as waiting if its main thread is at the same instruction as at the last look, and has used hardly any
processor time since then. The line appears after ``progress_after`` seconds of silence, if all running workers wait, if
one has waited for so long itself, or if one waits and another has ended the cell. It also appears if a worker cannot
begin, because it still runs an earlier cell or a signal such as SIGSTOP has stopped it, and if a worker has not
answered for so long. If its host then gets the frames of its main thread, by a signal, some thread holds the GIL. If
the members of a group are in different collectives, the line comes at the first look. Each look updates the line, or
removes it. If all workers compute, there is no line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nbdist.amounts import plural
from nbdist.cluster.collation import Collation
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.jupyter.labels import read_frames
from nbdist.cluster.kernels.cells import Cell, CellPart
from nbdist.cluster.kernels.sightings import Sighting
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.output.arranger import say_names
from nbdist.cluster.output.in_place import InPlace
from nbdist.cluster.partings import Parting
from nbdist.cluster.processes.probe import Probe, is_stopped
from nbdist.cluster.stands import Position, Stands
from nbdist.cluster.stops import Stops
from nbdist.cluster.team import Team
from nbdist.code_lines import users_lines
from nbdist.errors import NbdistError
from nbdist.rpc.agent import Agent

_LOOK_EVERY = 2.0  # seconds between two looks
# Seconds until the first look, and the least silence before a look: a wait is known from two looks.
_FIRST_LOOK = 0.5
_ANSWER_WITHIN = 0.4  # seconds for the workers to answer; a worker that holds the GIL cannot


_BLIND = "who has not come is not known: TORCH_FR_BUFFER_SIZE=0 has switched off torch's record of collectives"


class Lookout:
    """Looks at the workers of a silent cell, and shows the line after ``after`` seconds. In the kernel thread."""

    def __init__(
        self,
        thread: KernelThread,
        agent: Agent,
        probe: Callable[[str], Future[Probe]],
        cell: Cell,
        team: Team,
        collation: Collation,
        stops: Stops,
        after: float,
    ) -> None:
        self._loop, self._agent, self._probe, self._cell, self._after = thread.loop, agent, probe, cell, after
        self._team, self._collation, self._stops = team, collation, stops
        self._stopped: dict[str, float] = {}  # those that a signal has stopped, and when this was seen first
        self._stands = Stands(after)
        # The questions to the hosts of workers that do not answer, each the last one.
        self._probes: dict[str, Future[Probe]] = {}
        self._is_blind = False  # True if a worker is in a collective, and its recorder is off
        self._line = InPlace(cell.sink.page)

    def start(self) -> None:
        """Begin to look; stop, and remove the line, when the cell ends. Call it once, when the cell has been sent."""
        for part in self._cell.parts.values():
            self._team.find(part.worker).sightings.clear()
        self._cell.when_done(lambda: self._line.show(""))
        self._loop.call_later(min(_FIRST_LOOK, self._after), self._look)

    def _look(self) -> None:
        """Ask the workers where they are (`place`), if the cell has had no output since about the last look."""
        if self._cell.done:
            return
        asked: dict[str, Any] = {}
        now = time.monotonic()
        if now - self._cell.last_output >= min(_FIRST_LOOK, self._after) * 0.9:
            for part in self._running():
                with contextlib.suppress(NbdistError):  # the worker is gone
                    at = self._agent.at(part.worker, "collectives")
                    asked[part.worker] = at.call("place", timeout=_ANSWER_WITHIN)
            self._probes |= {worker: self._probe(worker) for worker in self._stands.unplaced(now) if worker in asked}
        # This thread must not wait: late answers count as none.
        self._loop.call_later(_ANSWER_WITHIN, self._judge, asked)

    def _judge(self, asked: Mapping[str, Any]) -> None:
        """Take the answers that have arrived, and plan the line: after another question, if one is in a collective."""
        if self._cell.done:
            return
        now = time.monotonic()
        held: dict[str, str] = {}
        running = {part.worker for part in self._running()}
        self._probes = {worker: probe for worker, probe in self._probes.items() if worker in running}
        in_collective = self._is_blind = False
        for part in self._running():
            found, answer = None, asked.get(part.worker)
            if answer is not None and answer.done():
                with contextlib.suppress(Exception):  # the worker died, or the answer is late
                    found = answer.value()
                    answer = None
            if found is not None:
                seen = Sighting(now, found.call, found.line, found.memory)
                self._team.find(part.worker).sightings.append(seen)
            in_collective |= found is not None and found.in_collective is True
            self._is_blind |= found is not None and found.in_collective is None and found.call.startswith("dist.")
            if answer is None:
                self._probes.pop(part.worker, None)
                self._stands.saw(part.worker, found, now)  # one that was not asked does not count as silent
            else:
                self._stands.heard_nothing(part.worker, now)
            if why := self._say_held(self._team.find(part.worker), found, now):
                held[part.worker] = why
        for worker, answer in self._probes.items():
            with contextlib.suppress(Exception):  # its host cannot be reached
                if answer.done() and (frames := answer.result().frames):
                    self._stands.told(worker, next((line.place for line in users_lines(read_frames(frames))), ""))
        told = self._collation.ask() if in_collective else {}
        self._loop.call_later(_ANSWER_WITHIN if told else 0, self._show, held, told)

    def _show(self, held: Mapping[str, str], told: Mapping[str, Any]) -> None:
        """Show, change or remove the line, and plan the next look."""
        if self._cell.done:
            return
        now = time.monotonic()
        partings = self._collation.conclude(told, self._probes)
        is_long = now - self._cell.last_output >= self._after
        ended = {part.worker: part.error is not None for part in self._cell.parts.values() if part.done}
        running = [part.worker for part in self._running()]
        stands = self._stands.say(running, ended, held, now) if is_long else ""
        if stands and self._is_blind:
            stands += f"; {_BLIND}"
        said = "; ".join(each.text for each in partings if stands or not each.absent)
        if partings and not any(each.absent for each in partings):
            stands = ""  # the text about the collective says where they are
        elsewhere = self._say_elsewhere(partings) if stands else ""
        self._cell.waits_for = ": ".join(filter(None, [said, stands])) + elsewhere
        self._line.show(self._cell.waits_for)
        pause = max(0.1, min(_LOOK_EVERY, self._after) - (2 if told else 1) * _ANSWER_WITHIN)
        self._loop.call_later(pause, self._look)

    def _say_elsewhere(self, partings: Sequence[Parting]) -> str:
        """Return the clause about the workers that are missing from a collective, and were not sent this cell."""
        names = dict.fromkeys(each for parting in partings for each in parting.absent if each not in self._cell.parts)
        return f"; {say_names(list(names))} {plural(len(names), 'is', 'are')} not in this cell" if names else ""

    def _say_held(self, worker: Worker, found: Position | None, now: float) -> str:
        """Return what keeps a worker from running the cell, in words that follow its name; "" if nothing does."""
        if place := self._stops.place(worker.name):
            return f"stands in the debugger at {place}"
        if not worker.host and is_stopped(worker.pid):  # on another host, the worker is lost some seconds later
            return f"is stopped by a signal, {now - self._stopped.setdefault(worker.name, now):.0f} s"
        self._stopped.pop(worker.name, None)
        first = worker.present_cell or self._cell
        place = f"{found.call}, {found.line}" if found else f"In[{first.number}]"
        since = now - (first.parts[worker.name].began or now)
        return f"is still busy with {place}, {since:.0f} s" if first is not self._cell else ""

    def _running(self) -> list[CellPart]:
        return [part for part in self._cell.parts.values() if not part.done]
