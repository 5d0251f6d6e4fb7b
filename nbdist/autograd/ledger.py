"""What the worker that began a pass knows of it: whether anything is still going on anywhere.

Every mark and every gradient that goes from worker to worker carries a *token*. Whoever sends one announces it,
and whoever has dealt with one says so, both to the pass's root, in one report: what was dealt with, and what was
sent because of that. So as long as something is on its way or being dealt with, a token is announced and not
settled, whichever worker's report comes first. When all are settled, the pass is over, exactly.

Pure: reports go in, answers come out.
"""

from __future__ import annotations

from nbdist.autograd.messages import Missing, Report, Token

__all__ = ["Ledger"]


class Ledger:
    """The tokens of one pass."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.workers: set[int] = set()
        """Those who take part, as far as is known."""
        self.waiting: set[int] = set()
        """Those who have asked to be told of the end of the marking."""
        self.reducing: set[int] = set()
        """Those that average gradients with others'."""
        self.missing: dict[int, list[Missing]] = {}
        self.observed: dict[int, int] = {}
        """How often each has told the pass's watcher of it."""
        self._taken: dict[int, int] = {}
        self._overtaken: dict[int, dict[int, Report]] = {}
        self._open: set[Token] = set()
        self._early: set[Token] = set()
        self._marked: set[Token] = set()
        self._begun = False
        """True once the root's first report has come. Reports of other workers may come before it."""

    def take(self, sender: int, report: Report) -> None:
        """Enter a report; one that has overtaken others of its sender waits for them.

        A later report may settle what was the cause of something that an earlier one announces.
        """
        waiting = self._overtaken.setdefault(sender, {})
        waiting[report.number] = report
        while (following := waiting.pop(self._taken.get(sender, 0) + 1, None)) is not None:
            self._taken[sender] = following.number
            self.workers.add(sender)
            self._begun = self._begun or sender == self._root
            for token, to in following.sent:
                self.workers.add(to)
                if token in self._early:
                    self._early.discard(token)
                else:
                    self._open.add(token)
            for token in following.settled:
                if token in self._open:
                    self._open.discard(token)
                else:
                    self._early.add(token)
            self._marked.update(following.marked)
            if following.waits:
                self.waiting.add(sender)
            if following.reduces:
                self.reducing.add(sender)
            self.missing[sender] = following.missing
            self.observed[sender] = following.observed

    @property
    def marked(self) -> bool:
        """Whether all has been marked that is going to be.

        What runs at once is not marked first: its gradients do that when they arrive. So nothing may be open but
        what waits, with all marked that will come of it.
        """
        return self._begun and not self._early and self._open <= self._marked

    @property
    def over(self) -> bool:
        """Whether nothing is on its way, nor being dealt with."""
        return self._begun and not self._open and not self._early

    def owed(self) -> list[tuple[int, Missing]]:
        """The gradients that never came, each with the worker that waits for it: the root's first, then by worker.

        Reports come in any order; what an error says must not depend on that.
        """
        if not any(self.missing.values()):
            return []
        workers = sorted(self.missing, key=lambda worker: (worker != self._root, worker))
        return [(worker, missing) for worker in workers for missing in sorted(self.missing[worker])]
