"""The account by which the root of a pass knows whether any worker still has work to do.

Every mark and every gradient message carries a *token*. Its sender reports the token as sent and its receiver as
settled, both to the root. One report names the tokens that a worker has settled, together with the tokens that it has
sent because of these::

    reported as sent            open      the message is on its way, or its receiver works on it
    then reported as settled    forgotten
    settled before sent         early     the receiver's report has overtaken the sender's
    then reported as sent       forgotten
    reported as marked, too     open, but its receiver only waits for the end of the marking

As long as a worker has anything to do, some token is open or early, whichever report comes first. So when no token is
open or early, the pass is over.

The ledger is pure: reports go in, answers come out. It has no lock; `Passes` uses it with `Run.lock` held.
"""

from __future__ import annotations

from nbdist.autograd.graph.messages import Missing, Report, Token


class Ledger:
    """The root's account of one pass: the *tokens* of messages that are sent or dealt with, as workers report them."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.workers: set[int] = set()  # that take part, as far as reports have named them
        self.waiting: set[int] = set()  # the workers that have to be told of the end of the marking
        self.reducing: set[int] = set()  # the workers on which the pass reaches a DistributedDataParallel module
        # In FAST mode, the gates of each worker whose gradients had not come at its last report.
        self.missing: dict[int, list[Missing]] = {}
        self.observed: dict[int, int] = {}  # how many messages each worker has sent to the pass's watch
        self._taken: dict[int, int] = {}
        self._overtaken: dict[int, dict[int, Report]] = {}
        self._open: set[Token] = set()
        self._early: set[Token] = set()
        self._marked: set[Token] = set()
        # True once the root's own first report has arrived. Other workers' may arrive earlier, and nothing must seem to
        # be over by them (test_nothing_is_over_before_the_root_has_said_what_it_began_with).
        self._begun = False

    def take(self, sender: int, report: Report) -> None:
        """Enter a report: the tokens of the messages that ``sender`` has sent, and of those that it has settled."""
        # A report that has overtaken earlier ones of its sender waits for them. It could settle a token before the
        # earlier report has named the messages that were sent because of this token: then the pass would seem to be
        # over (test_a_report_that_has_overtaken_another_waits_for_it).
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
            settled = set(following.settled)
            self._early |= settled - self._open
            self._open -= settled
            self._marked.update(following.marked)
            if following.waits:
                self.waiting.add(sender)
            if following.reduces:
                self.reducing.add(sender)
            self.missing[sender] = following.missing
            self.observed[sender] = following.observed

    @property
    def marking_is_over(self) -> bool:
        """True if the marking is over: no mark will be sent any more, and none is on its way."""
        # Gradients that run at once are not marked first, and may cause marks where they arrive. So every open token
        # must be one that waits for just this end, after it has caused all the marks that it can.
        return self._begun and not self._early and self._open <= self._marked

    @property
    def over(self) -> bool:
        """True if no worker has anything left to do, and no message of the pass is on its way."""
        return self._begun and not self._open and not self._early

    def owed(self) -> list[tuple[int, Missing]]:
        """Return the sent messages for which gradients never came, each with its sender: a FAST pass fails by them."""
        if not any(self.missing.values()):
            return []
        # Sorted, the root first, so that the text of the error does not depend on the order of the reports.
        workers = sorted(self.missing, key=lambda worker: (worker != self._root, worker))
        return [(worker, missing) for worker in workers for missing in sorted(self.missing[worker])]
