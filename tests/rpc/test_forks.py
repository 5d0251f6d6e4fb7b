"""The reference counting by itself: events in, messages and drops out. Whole agents are in `test_histories`."""

from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.core.forks import Drop, Forks, ForkStanding, Send
from nbdist.wire.messages import ChildAccept, Fork, ForkConfirm, ForkRequest, RRefState, State, UserDelete

OWNER, USER, OTHER, THIRD = 11, 22, 33, 44
INT = State("builtins", "int")


def forks(me):
    return Forks(me, IdSource(me, me))


def ids(agent):
    source = IdSource(agent, agent)
    return source.next(), source.next()


def is_empty(agent):
    return (agent.owned, agent.users, agent.early, agent.forks, agent.pending) == ({}, {}, {}, 0, 0)


# --- one agent, by events -------------------------------------------------------------------------


def test_remote_creates_confirms_and_deletes():
    owner, user = forks(OWNER), forks(USER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    assert user.standing(fork) is ForkStanding.PENDING
    owner.create(rref, fork, USER)
    assert owner.set_state(rref, INT) == []  # the reply carries it to the creator
    assert owner.release_owned(rref) == []  # the user's fork remains
    assert (owner.owners, owner.forks, owner.forks_of(rref)) == (1, 1, 1)
    assert user.confirm(fork, INT) == []
    assert user.standing(fork) is ForkStanding.CONFIRMED
    assert user.state(rref, fork) == INT
    (delete,) = user.release(fork)
    assert delete == Send(OWNER, UserDelete(rref, fork))
    assert owner.on_user_delete(delete.message, USER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_a_reference_released_before_its_confirmation_is_deleted_after_it():
    user = forks(USER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    assert user.release(fork) == []
    assert user.confirm(fork, INT) == [Send(OWNER, UserDelete(rref, fork))]
    assert is_empty(user)


def test_a_delete_that_overtakes_the_creation_ends_it():
    owner = forks(OWNER)
    rref, fork = ids(USER)
    assert owner.on_user_delete(UserDelete(rref, fork), USER) == []
    owner.create(rref, fork, USER)
    assert owner.owns(rref)  # the call is running
    assert owner.release_owned(rref) == [Drop(rref)]
    assert is_empty(owner)


def test_a_timed_out_creation_tells_the_owner_and_a_failed_one_does_not():
    for may_exist, expected in ((True, 1), (False, 0)):
        user = forks(USER)
        rref, fork = ids(USER)
        user.begin(rref, fork, OWNER)
        assert user.fail(fork, may_exist=may_exist) == []
        assert user.standing(fork) is ForkStanding.FAILED
        assert user.release(fork) == [Send(OWNER, UserDelete(rref, fork))] * expected
        assert is_empty(user)


def test_a_late_answer_revives_a_timed_out_reference():
    user = forks(USER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    user.fail(fork, may_exist=True)
    user.confirm(fork, INT)
    assert user.standing(fork) is ForkStanding.CONFIRMED


def test_an_owner_counts_a_fork_before_it_is_sent():
    owner, user = forks(OWNER), forks(USER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    owner.set_state(rref, INT)
    handed = owner.hand_over(rref, None, USER)
    assert (handed.owner, handed.parent, handed.state) == (OWNER, OWNER, INT)
    assert owner.release_owned(rref) == []
    assert user.accept(handed) == []
    assert user.standing(handed.fork) is ForkStanding.CONFIRMED
    (delete,) = user.release(handed.fork)
    assert owner.on_user_delete(delete.message, USER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_a_reference_that_comes_home_is_a_handle():
    owner, user = forks(OWNER), forks(USER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    handed = owner.hand_over(rref, None, USER)
    user.accept(handed)
    back = user.hand_over(rref, handed.fork, OWNER)
    assert user.pending == 0  # who sends it keeps its own fork until the message has arrived
    assert owner.accept(back) == []
    assert owner.release_owned(rref) == []
    (delete,) = user.release(handed.fork)
    assert owner.on_user_delete(delete.message, USER) == []
    assert owner.release_owned(rref) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_an_owner_that_hands_to_itself_counts_no_fork():
    owner = forks(OWNER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    handed = owner.hand_over(rref, None, OWNER)
    assert owner.forks == 0
    assert owner.accept(handed) == []
    assert owner.release_owned(rref) == []
    assert owner.release_owned(rref) == [Drop(rref)]


def shared_by_a_third(*, is_made=True):
    """An owner, a user with a confirmed fork, and another that has just been handed a child of it."""
    owner, user, other = forks(OWNER), forks(USER), forks(OTHER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    owner.create(rref, fork, USER)
    if is_made:
        owner.set_state(rref, INT)
        owner.release_owned(rref)
    user.confirm(fork, INT)
    handed = user.hand_over(rref, fork, OTHER)
    (request,) = other.accept(handed)
    assert request == Send(OWNER, ForkRequest(rref, handed.fork))
    return owner, user, other, rref, fork, handed, request.message


def test_a_parent_lives_until_its_child_is_confirmed():
    owner, user, other, rref, fork, handed, request = shared_by_a_third()
    assert user.release(fork) == []  # the child may not be known yet
    assert other.standing(handed.fork) is ForkStanding.PENDING
    (confirm,) = owner.on_fork_request(request, OTHER)
    assert confirm == Send(OTHER, ForkConfirm(rref, handed.fork, INT))
    assert owner.forks_of(rref) == 2
    assert other.on_fork_confirm(confirm.message) == [Send(USER, ChildAccept(handed.fork))]
    (delete,) = user.on_child_accept(ChildAccept(handed.fork))
    assert delete == Send(OWNER, UserDelete(rref, fork))
    assert owner.on_user_delete(delete.message, USER) == []
    (last,) = other.release(handed.fork)
    assert owner.on_user_delete(last.message, OTHER) == [Drop(rref)]
    assert all(map(is_empty, (owner, user, other)))


def test_control_messages_twice_change_nothing():
    owner, user, other, rref, _fork, handed, request = shared_by_a_third()
    owner.on_fork_request(request, OTHER)
    owner.on_fork_request(request, OTHER)
    assert owner.forks_of(rref) == 2
    confirm = ForkConfirm(rref, handed.fork, INT)
    assert len(other.on_fork_confirm(confirm)) == 1
    assert other.on_fork_confirm(confirm) == []
    assert user.on_child_accept(ChildAccept(handed.fork)) == []
    assert user.on_child_accept(ChildAccept(handed.fork)) == []
    assert user.pending == 0


def test_a_child_that_was_never_sent_is_taken_back():
    owner, user = forks(OWNER), forks(USER)
    rref, _ = ids(OWNER)
    owner.retain(rref)
    handed = owner.hand_over(rref, None, USER)
    user.accept(handed)
    child = user.hand_over(rref, handed.fork, OTHER)
    assert user.release(handed.fork) == []
    assert user.take_back(child, OTHER) == [Send(OWNER, UserDelete(rref, handed.fork))]
    owner.release_owned(rref)
    assert owner.take_back(handed, USER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(user)


def test_users_that_were_confirmed_too_early_learn_what_the_value_is():
    owner, _user, other, rref, _fork, handed, request = shared_by_a_third(is_made=False)
    (confirm,) = owner.on_fork_request(request, OTHER)
    other.on_fork_confirm(confirm.message)
    assert other.state(rref, handed.fork) == INT  # it came along with the fork
    (told,) = owner.set_state(rref, State("builtins", "str"))
    assert told == Send(OTHER, RRefState(rref, State("builtins", "str")))
    assert other.on_state(told.message) == [handed.fork]
    assert other.state(rref, handed.fork) == State("builtins", "str")
    assert owner.set_state(rref, INT) == []  # once


# --- overtaking -----------------------------------------------------------------------------------


def test_a_request_that_overtakes_the_creation_is_not_refused():
    """The creator's call is slow; whom it gave the reference to asks first."""
    owner, user, other = forks(OWNER), forks(USER), forks(OTHER)
    rref, fork = ids(USER)
    user.begin(rref, fork, OWNER)
    handed = user.hand_over(rref, fork, OTHER)
    (request,) = other.accept(handed)
    (confirm,) = owner.on_fork_request(request.message, OTHER)
    assert not confirm.message.gone
    owner.create(rref, fork, USER)
    told = owner.set_state(rref, INT)
    assert told == [Send(OTHER, RRefState(rref, INT))]
    assert owner.release_owned(rref) == []
    assert owner.forks_of(rref) == 2


def test_a_request_for_what_its_creator_can_no_longer_create_is_refused():
    owner = forks(OWNER)
    rref, _fork = ids(USER)
    owner.on_lost(USER)
    child = GlobalId(USER, 7, USER)
    assert owner.on_fork_request(ForkRequest(rref, child), OTHER) == [Send(OTHER, ForkConfirm(rref, child, gone=True))]
    assert is_empty(owner)


def test_a_request_for_a_value_that_was_dropped_is_refused():
    """Its parent was lost before the owner heard of the child; the creator had let go."""
    owner = forks(OWNER)
    rref, fork = ids(USER)
    owner.create(rref, fork, USER)
    owner.on_fork_request(ForkRequest(rref, GlobalId(OTHER, 1, OTHER)), OTHER)
    owner.release_owned(rref)
    owner.on_user_delete(UserDelete(rref, fork), USER)
    assert owner.on_lost(OTHER) == [Drop(rref)]
    (refusal,) = owner.on_fork_request(ForkRequest(rref, GlobalId(OTHER, 2, OTHER)), THIRD)
    assert refusal.message.gone
    assert owner.on_lost(USER) == []
    assert is_empty(owner)


def test_a_call_that_is_to_be_repeated_leaves_nothing():
    owner = forks(OWNER)
    rref, fork = ids(USER)
    owner.create(rref, fork, USER)
    owner.uncreate(rref, fork)
    assert is_empty(owner)
    owner.create(rref, fork, USER)
    assert owner.forks_of(rref) == 1


# --- death ----------------------------------------------------------------------------------------


def test_what_a_lost_user_held_is_dropped():
    owner, _user, _other, rref, _fork, _handed, request = shared_by_a_third()
    owner.on_fork_request(request, OTHER)
    assert owner.on_lost(USER) == []
    assert owner.on_lost(OTHER) == [Drop(rref)]
    assert is_empty(owner)


def test_what_a_lost_owner_held_is_dead_at_once():
    _, user, other, _rref, fork, handed, _ = shared_by_a_third()
    assert user.on_lost(OWNER) == []
    assert other.on_lost(OWNER) == [Send(USER, ChildAccept(handed.fork))]  # whose parent may not know yet
    assert user.standing(fork) is ForkStanding.DEAD
    assert other.standing(handed.fork) is ForkStanding.DEAD
    assert user.release(fork) == []
    assert other.release(handed.fork) == []
    assert is_empty(user), "the child will never accept, for its owner is gone"
    assert is_empty(other)


def test_a_reference_to_an_owner_that_is_known_to_be_lost_is_dead_on_arrival():
    _, _user, _, rref, _fork, handed, _ = shared_by_a_third()
    late = forks(THIRD)
    late.on_lost(OWNER)
    instructions = late.accept(Fork(rref, handed.fork, OWNER, USER, INT))
    assert late.standing(handed.fork) is ForkStanding.DEAD
    for instruction in instructions:  # its parent need not wait for it
        assert instruction == Send(USER, ChildAccept(handed.fork))
    assert late.release(handed.fork) == []
    assert is_empty(late)


def test_a_lost_child_frees_its_parent():
    _owner, user, _, rref, fork, _, _ = shared_by_a_third()
    assert user.release(fork) == []
    assert user.on_lost(OTHER) == [Send(OWNER, UserDelete(rref, fork))]
    assert is_empty(user)


def test_a_lost_parent_leaves_a_confirmed_child():
    owner, _, other, rref, _, handed, request = shared_by_a_third()
    (confirm,) = owner.on_fork_request(request, OTHER)
    assert owner.on_lost(USER) == []
    assert other.on_lost(USER) == []
    assert other.on_fork_confirm(confirm.message) == [Send(USER, ChildAccept(handed.fork))]
    assert other.standing(handed.fork) is ForkStanding.CONFIRMED
    (delete,) = other.release(handed.fork)
    assert owner.on_user_delete(delete.message, OTHER) == [Drop(rref)]
    assert is_empty(owner)
    assert is_empty(other)


def test_a_child_that_its_parents_death_orphaned_is_told_so():
    owner, _, other, rref, _, handed, request = shared_by_a_third()
    assert owner.on_lost(USER) == [Drop(rref)]
    (refusal,) = owner.on_fork_request(request, OTHER)
    assert refusal == Send(OTHER, ForkConfirm(rref, handed.fork, gone=True))
    other.on_fork_confirm(refusal.message)
    assert other.standing(handed.fork) is ForkStanding.DEAD
    assert other.release(handed.fork) == []
    assert is_empty(owner)
    assert is_empty(other)


def test_a_lost_user_leaves_no_memory_of_its_early_deletes():
    owner = forks(OWNER)
    rref, fork = ids(USER)
    owner.on_user_delete(UserDelete(rref, fork), USER)
    assert owner.on_lost(USER) == []
    assert is_empty(owner)
