"""What a server does next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.swarm.server.queues import QueuedRequest, RequestQueues, TooLarge, prioritize


def request(kind="forward", size=1, priority=0.0, together=None):
    return QueuedRequest(kind, size, priority, None, together)


def test_text_before_training_and_then_who_came_first():
    pools = RequestQueues()
    train, text, back, text2 = (
        request(kind, priority=prioritize(kind, 1, 0.0)) for kind in ("forward", "step", "backward", "step")
    )
    for each in (train, text, back, text2):
        pools.submit(each)
    assert [pools.take() for _ in range(5)] == [[text], [text2], [train], [back], []]


def test_points_come_first_within_a_kind_only():
    orders = [prioritize("step", 1, 0.0), prioritize("forward", 1, 1e9), prioritize("forward", 1, 1.0)]
    assert orders == sorted(orders)
    assert prioritize("forward", 1, 1.0) < prioritize("forward", 1, 0.0) < prioritize("forward", 1, -1.0)


def test_what_is_alike_is_done_together_up_to_a_size():
    pools = RequestQueues(batch=10)
    a, b, c, d, e = (request(size=4, together="x") for _ in range(5))
    other, alone = request(size=1, together="y"), request(size=1)
    step = request("step", size=1, priority=-1.0, together="x")
    for each in (a, other, b, alone, c, d, e, step):
        pools.submit(each)
    assert [pools.take() for _ in range(6)] == [[step], [a, b], [other], [alone], [c, d], [e]]
    assert len(pools) == 0


def test_too_large_is_an_error_and_what_is_withdrawn_is_not_done():
    pools = RequestQueues(largest=8)
    with pytest.raises(TooLarge, match="forward of 9 tokens is more than the 8"):
        pools.submit(request(size=9))
    a, b = request(), request()
    pools.submit(a)
    pools.submit(b)
    pools.withdraw(a)
    assert pools.take() == [b]
    pools.withdraw(b)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "forward"]),
            st.integers(1, 6),
            st.integers(0, 2),
            st.sampled_from([None, "x", "y"]),
        )
    )
)
def test_each_is_done_once_and_the_first_of_a_batch_is_the_first_of_all(told):
    pools = RequestQueues(batch=8)
    requests = [request(kind, size, float(priority), together) for kind, size, priority, together in told]
    for each in requests:
        pools.submit(each)
    left = list(requests)
    while batch := pools.take():
        assert batch[0] is min(left, key=lambda each: (each.priority, each.number))
        assert len(batch) == 1 or sum(each.size for each in batch) <= 8
        assert len({(each.kind, each.together) for each in batch}) == 1
        for each in batch:
            left.remove(each)
    assert not left
