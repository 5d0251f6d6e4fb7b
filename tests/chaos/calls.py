"""The workload of members that call each other in every way there is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

import nbdist
from chaos import recorder, tasks
from chaos.calling import Caller
from nbdist import rpc

LIMIT = 10.0
_HELD = 8
"""So many references each thread holds on to, so that deletes come at any time."""

EXPECTED = (nbdist.WorkerLost, nbdist.RpcTimeout, nbdist.UnknownWorker, nbdist.RRefError)
"""The errors with which a call may end in a storm; `nbdist.RemoteError` around one of them as well."""


class Calls:
    """One thread's calls."""

    THREADS = 3

    def __init__(self, caller: Caller, others: Sequence[str], dice: random.Random) -> None:
        self._caller = caller
        self._others = others
        self._dice = dice
        self._held: deque[Any] = deque(maxlen=_HELD)
        self._ways: list[Callable[[str], None]] = [
            self._small, self._small, self._tensor, self._burst, self._failing, self._relayed, self._referred,
            self._passed_on, self._impatient,
        ]  # fmt: skip

    def step(self) -> None:
        """Make one call, or a few."""
        self._dice.choice(self._ways)(self._dice.choice(self._others))

    def once_more(self) -> None:
        """Call each other member once, undisturbed."""
        for to in self._others:
            self._small(to)

    def let_go(self) -> None:
        """Drop all references."""
        self._held.clear()

    def _small(self, to: str) -> None:
        number = self._dice.randrange(1 << 30)
        _expect(number, self._caller.sync(to, "small", tasks.echo, number, limit=LIMIT))

    def _tensor(self, to: str) -> None:
        size = self._dice.choice((10, 5_000, 200_000))  # in the message; in frames of its own; in shared memory
        tensor = torch.full((size,), float(self._dice.randrange(1000)))
        _expect(tensor + 1, self._caller.sync(to, "tensor", tasks.add_one, tensor, limit=LIMIT))

    def _burst(self, to: str) -> None:
        waits = [self._caller.start(to, "burst", tasks.echo, number, limit=LIMIT) for number in range(8)]
        errors = []
        for number, wait in enumerate(waits):
            try:
                _expect(number, wait())
            except EXPECTED as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _failing(self, to: str) -> None:
        try:
            self._caller.sync(to, "failing", tasks.fail, limit=LIMIT)
        except LookupError:
            return
        raise AssertionError("a function that raises returned")

    def _relayed(self, to: str) -> None:
        through = [other for other in self._others if other != to]
        if through:
            _expect(
                "relayed",
                self._caller.sync(self._dice.choice(through), "relay", tasks.relay, to, "relayed", limit=25.0),
            )

    def _referred(self, to: str) -> None:
        self._held.append(self._make(to, "remote")[1])

    def _make(self, to: str, kind: str) -> tuple[int, Any]:
        """Make a value on ``to``; return the value, and a reference that has been fetched once."""
        number = self._dice.randrange(1 << 30)
        call = self._caller.begin(to, kind, LIMIT)
        rref = None

        def get() -> Any:
            nonlocal rref
            rref = rpc.remote(to, tasks.echo, args=(call, number), timeout=LIMIT)
            return rref.to_here(LIMIT)

        _expect(number, self._caller.end(call, get))
        return number, rref

    def _passed_on(self, to: str) -> None:
        number, rref = self._make(to, "remote")
        third = self._dice.choice(self._others)
        _expect(number, self._caller.sync(third, "passed on", tasks.fetch, rref, limit=LIMIT))

    def _impatient(self, to: str) -> None:
        self._caller.sync(to, "impatient", tasks.echo, "late", 0.2, limit=0.1)


def _expect(expected: Any, found: Any) -> None:
    """Raise an AssertionError where a call returned something else than its arguments ask for."""
    if recorder.digest(expected) != recorder.digest(found):
        raise AssertionError(f"expected {str(expected)[:80]}, found {str(found)[:80]}")
