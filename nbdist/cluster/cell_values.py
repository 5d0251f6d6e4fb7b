"""`CellValues`: moves values between this process and the workers' variables, in order with their cells."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nbdist.cluster.cell_sender import CellSender, forget_values
from nbdist.cluster.errors import named_in_errors
from nbdist.cluster.kernels.cells import Cell, CellOptions, CellPart
from nbdist.cluster.kernels.workers import require_alive
from nbdist.cluster.targets import means_one
from nbdist.cluster.team import Targets, Team
from nbdist.cluster.undoing import undone_by
from nbdist.cluster.worker.output import take_last_value
from nbdist.errors import EncodeError, UsageError, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method
from nbdist.rpc.references.rref import RRef
from nbdist.wire.pickling import culprit


class CellValues:
    """Fetches and sets values on the workers of one cluster. Its methods do what those of `Cluster` say."""

    def __init__(self, team: Team, sender: CellSender, agent: Agent) -> None:
        self._team, self._sender, self._agent = team, sender, agent

    def evaluate(self, expression: str, targets: Targets = None, timeout: float | None = None) -> Any:
        """Return a copy of an expression's value on a worker, or a list of values for several workers."""
        cell = self._sender.execute(expression, targets, CellOptions(keep=True, quiet=True), timeout)
        # The value is a copy: no context records its way here, and a leaf stays a leaf. Nobody else will ask for it.
        with undone_by(forget_values, cell), torch.no_grad(), named_in_errors(expression):
            ids = {part.worker: (part.id,) for part in cell.parts.values()}
            found = list(ask_each(self._agent, take_last_value, ids).or_raise().values())
        if cell.kept is not None:  # the workers have dropped what they gave
            cell.kept.detach()
        return found[0] if means_one(targets) else found

    def references(self, cell: Cell, targets: Targets = None) -> Any:
        """Return RRefs to the values of the last expression of a cell, one for each worker of the cell."""
        assert cell.kept is not None
        found = [self._reference(part) for part in cell.parts.values()]
        cell.kept.detach()
        return found[0] if means_one(targets) else found

    def _reference(self, part: CellPart) -> RRef[Any]:
        """Return an RRef to the value of a cell's last expression on one worker."""
        here = self._agent.me.name
        # A worker that is restarted has lost the value: the RRef is one of this process, and fetching it fails.
        if part.incarnation is not None and self._team.find(part.worker).incarnation not in (part.incarnation, None):
            why = (
                f"{part.worker} has ended since it was sent this cell, and the cell's value with it; run the cell again"
            )
            return api.remote(here, _raise_lost, (why,), timeout=0)
        try:
            return api.remote(part.worker, take_last_value, (part.id,), timeout=0)
        except WorkerLost as error:
            return api.remote(here, _raise_lost, (str(error),), timeout=0)

    def push(self, variables: Mapping[str, Any], targets: Targets = None) -> None:
        """Set variables on workers, after the cells that they were sent before; return when that is done."""
        workers = self._team.select(targets)
        require_alive(workers)
        names, ranks, token = [each.name for each in workers], [each.rank for each in workers], os.urandom(8).hex()
        code = f"__import__('nbdist.rpc.api', fromlist=['_']).current_agent().named.find('pushed').place({token!r})"
        self._sender.execute(
            "pass", ranks, CellOptions(quiet=True)
        )  # waits with a line that says for whom, as calls do not
        try:
            with torch.no_grad():  # as in `evaluate`; also avoids the warning that no gradient will come back
                args = "pushed", "receive", token, dict(variables)
                ask_each(self._agent, call_method, dict.fromkeys(names, args), label="pushed.receive").or_raise()
            self._sender.execute(code, ranks, CellOptions(quiet=True))
        except BaseException as error:  # Ctrl-C, too: the workers would keep the values
            for name in names:
                self._agent.at(name, "pushed").cast("forget", token)  # not where the worker is gone
            if not isinstance(error, EncodeError):
                raise
            found = next(filter(None, (culprit.of_value(value, name) for name, value in variables.items())), "")
            why = f"{found}, which cannot be sent: {culprit.reason(error.__cause__)}" if found else str(error)
            raise EncodeError(why) from error

    def pull(self, names: str | Sequence[str], targets: Targets = None) -> Any:
        """Return copies of the values that variables have on workers."""
        if isinstance(names, str):
            return self.evaluate(names, targets)
        found = self.evaluate(", ".join(names) or "()", targets)  # one name gives its value, not a tuple
        shaped = [
            dict(zip(names, (values,) if len(names) == 1 else values, strict=True))
            for values in ([found] if means_one(targets) else found)
        ]
        return shaped[0] if means_one(targets) else shaped


def check_pushed(names: Iterable[str]) -> None:
    """Raise UsageError if one of these cannot be the name of a variable."""
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not a variable's name, so it cannot be pushed")


def check_pulled(names: str | Sequence[str]) -> None:
    """Raise UsageError if one of these cannot be the name of a variable or an attribute."""
    for name in [names] if isinstance(names, str) else names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"{name!r} is not a variable's name; `%remote TARGET expression` returns the value of any")


def check_kept(cell: Cell) -> None:
    """Raise UsageError if the workers keep no value of this cell for `Cluster.references`."""
    if cell.kept is None or not cell.kept.alive:
        raise UsageError(
            "the workers have no value of this cell: it was executed without keep=True, or references() has "
            "returned the references already"
        )


def _raise_lost(text: str) -> None:
    raise WorkerLost(text)
