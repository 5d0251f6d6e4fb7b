"""Room for caches: in order, with deadlines; what never fits fails at once, and what is over makes room."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nbdist.swarm.server.cache_budget import Budget, CacheFull


def test_in_the_order_of_asking():
    budget = Budget(10)
    a, b, c = (budget.ask(name, size, deadline=9) for name, size in [("a", 8), ("b", 5), ("c", 2)])
    assert [a.state, b.state, c.state] == ["granted", "waiting", "waiting"]  # c does not overtake
    assert budget.release("a") == [b, c]
    assert budget.used == 7


def test_what_never_fits_fails_at_once():
    budget = Budget(10)
    with pytest.raises(CacheFull, match="11 bytes of caches can never fit, as the limit is 10 bytes"):
        budget.ask("a", 11, deadline=9)
    budget.ask("a", 8, deadline=9)
    with pytest.raises(CacheFull, match="besides 8 that it has"):
        budget.ask("a", 3, deadline=9)
    assert Budget().ask("a", 1 << 60, deadline=9).state == "granted"


def test_who_has_something_comes_before_who_has_nothing():
    budget = Budget(10)
    budget.ask("a", 4, deadline=9)
    budget.ask("b", 4, deadline=9)
    new, more = budget.ask("c", 6, deadline=9), budget.ask("a", 4, deadline=9)
    assert budget.waiting == [more, new]
    assert budget.release("b") == [more]
    assert budget.release("a") == [new]


def test_who_gets_its_first_memory_comes_before_others_with_its_next_request():
    budget = Budget(20)
    budget.ask("a", 15, deadline=9)
    first, large, second = (budget.ask(name, size, deadline=9) for name, size in [("b", 6), ("c", 16), ("b", 1)])
    assert budget.release("a") == [first, second]
    assert budget.waiting == [large]


def test_deadlines():
    budget = Budget(10)
    budget.ask("a", 8, deadline=9)
    b, c = budget.ask("b", 5, deadline=3), budget.ask("c", 2, deadline=7)
    assert budget.expire(2.9) == []
    assert budget.expire(3) == [b, c]
    assert (b.state, c.state, budget.used) == ("expired", "granted", 10)


def test_who_is_cancelled_while_waiting_lets_others_through():
    budget = Budget(10)
    a = budget.ask("a", 8, deadline=9)
    b, c = budget.ask("b", 5, deadline=9), budget.ask("c", 2, deadline=9)
    assert budget.cancel(b) == [c]
    assert budget.cancel(a) == []
    assert (budget.used, budget.of("a"), budget.of("c")) == (2, 0, 2)
    assert budget.cancel(a) == []  # once more is no matter


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: no more is used than there is, who fits is not kept waiting, and nothing is lost."""

    def __init__(self):
        super().__init__()
        self.budget = Budget(20)
        self.now = 0
        self.tickets = []

    @rule(owner=st.sampled_from("abcd"), size=st.integers(1, 25), patience=st.integers(1, 5))
    def ask(self, owner, size, patience):
        fits = self.budget.of(owner) + size <= 20
        try:
            self.tickets.append(self.budget.ask(owner, size, self.now + patience))
            assert fits
        except CacheFull:
            assert not fits

    @rule(owner=st.sampled_from("abcd"))
    def release(self, owner):
        self.budget.release(owner)
        assert all(ticket.state in ("over", "expired") for ticket in self.tickets if ticket.owner == owner)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data):
        self.budget.cancel(data.draw(st.sampled_from(self.tickets)))

    @rule()
    def tick(self):
        self.now += 1
        self.budget.expire(self.now)
        assert not any(ticket.state == "waiting" and ticket.deadline <= self.now for ticket in self.tickets)

    @invariant()
    def is_right(self):
        granted = [ticket for ticket in self.tickets if ticket.state == "granted"]
        assert self.budget.used == sum(ticket.nbytes for ticket in granted) <= 20
        waiting = self.budget.waiting
        assert set(waiting) == {ticket for ticket in self.tickets if ticket.state == "waiting"}
        if waiting:
            assert self.budget.used + waiting[0].nbytes > 20


TestAnyOrder = AnyOrder.TestCase
