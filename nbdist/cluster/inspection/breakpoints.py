"""The breakpoints of a cluster, for `%dist_break`: set on workers, and on those that start later."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdist.autograd.api import recorder
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.output.arranger import say_names
from nbdist.cluster.worker.breakpoints import Breakpoint
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method

_ANSWER_WITHIN = 3.0  # seconds
_PLACE = re.compile(r"(?P<file>\S+):(?P<line>[1-9]\d{0,6})|(?P<function>[^\W\d]\w*(\.([^\W\d]\w*|<locals>))*)")


class ClusterBreakpoints:
    """The breakpoints of one cluster."""

    def __init__(self, agent: Agent, workers: Sequence[Worker]) -> None:
        self.agent, self._workers = agent, workers
        self._set: dict[int, tuple[Breakpoint, Sequence[str]]] = {}  # with the workers; none for all, also later ones
        self._last = 0
        self._told: dict[str, tuple[int | None, list[Breakpoint]]] = {}  # what each worker has, and its incarnation

    def add(self, place: str, condition: str, workers: Sequence[str]) -> str:
        """Set a breakpoint at ``file:line`` or a function, on these workers; without any on all. Returns its line.

        Raises:
            UsageError: The place or the condition cannot be read.
        """
        if (found := _PLACE.fullmatch(place)) is None:
            raise UsageError(f"{place!r} is no place such as train.py:41, In[7]:12, step or losses.Focal.forward")
        try:
            compile(condition or "True", "--if", "eval")
        except SyntaxError as error:
            raise UsageError(f"--if: {condition!r} is not an expression: {error.msg}; it stands last") from None
        file = found["file"] or ""
        if file and "[" not in file and not file.endswith(".py"):  # a module by its name
            file = f"{file.replace('.', '/')}.py"
        self._last += 1
        made = Breakpoint(self._last, file, int(found["line"] or 0), found["function"] or "", condition)
        self._set[self._last] = made, workers
        self.tell()
        return _say(made, workers)

    def delete(self, number: int) -> str:
        """Delete a breakpoint, or all for 0; return a line for each that is left.

        Raises:
            UsageError: There is none of this number.
        """
        if number and number not in self._set:
            raise UsageError(f"there is no breakpoint {number}; %dist_break lists them")
        self._set = {each: found for each, found in self._set.items() if number not in (0, each)}
        self.tell()
        return self.say()

    def say(self) -> str:
        """Return a line for each breakpoint."""
        return "\n".join(_say(*each) for each in self._set.values()) or "no breakpoints"

    def tell(self) -> None:
        """Send the breakpoints to each worker that has not got them, as one that has started since."""
        due = {}
        for worker in self._workers:
            name = worker.name
            held = worker.incarnation, [each for each, names in self._set.values() if name in (names or [name])]
            if worker.alive and worker.step == "ready" and self._told.get(name, (held[0], [])) != held:
                due[name] = held
        with recorder().contexts.outside():
            asked = {name: ("breakpoints", "replace", own) for name, (_, own) in due.items()}
            ask_each(self.agent, call_method, asked, timeout=_ANSWER_WITHIN).or_raise(but=NbdistError)
        self._told |= due


def _say(breakpoint: Breakpoint, workers: Sequence[str]) -> str:
    number, file, line, function, condition = breakpoint
    where = f" on {say_names(workers)}" if workers else ""
    return f"{number}  {function or f'{file}:{line}'}{where}{f' if {condition}' if condition else ''}"
