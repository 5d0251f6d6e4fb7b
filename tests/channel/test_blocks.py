"""The books of an arena: sizes, what is kept warm, bounds, and what becomes of blocks whose receiver is gone. Pure."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nbdist.channel.shared_memory.blocks import Blocks, Close, Empty, Open, size_class

K, M = 1 << 10, 1 << 20
ALICE, BOB = 1, 2


def take(blocks, length, to=ALICE):
    block, instructions = blocks.take(length)
    if block is not None:
        blocks.send(block, to)
    return block, instructions


def key(block):
    return block.segment.number, block.offset


def test_sizes():
    assert [size_class(n) for n in (1, 64 * K, 64 * K + 1, 80 * K, 1 * M, M + 1)] == [
        *(64 * K, 64 * K, 80 * K, 80 * K, M, M + M // 4)
    ]
    for length in (*range(1, 300 * K, 977), 5 * M + 3, 64 * M, 100 * M + 1):
        assert length <= size_class(length) <= max(64 * K, length * 1.25 + 1)
        assert size_class(size_class(length)) == size_class(length)
        assert size_class(length) % 4096 == 0


def test_small_blocks_share_a_segment_and_large_ones_have_their_own():
    blocks = Blocks(1 << 40, 100)
    small = [take(blocks, M) for _ in range(17)]
    assert [instructions for _, instructions in small] == [[Open(1, 16 * M)], *[[]] * 15, [Open(2, 16 * M)]]
    assert len({key(block) for block, _ in small}) == 17
    assert take(blocks, 64 * M)[1] == [Open(3, 64 * M)]
    assert blocks.held == blocks.used == 17 * M + 64 * M
    assert (blocks.segments, blocks.outstanding) == (3, 18)


def test_the_block_that_came_back_last_is_taken_first():
    blocks = Blocks(1 << 40, 100)
    first, second = take(blocks, M)[0], take(blocks, M)[0]
    blocks.give_back(ALICE, *key(first))
    blocks.give_back(ALICE, *key(second))
    assert take(blocks, M)[0] is second
    assert take(blocks, M - 5)[0] is first
    assert blocks.held == 2 * M


def test_what_somebody_does_not_have_he_cannot_give_back():
    blocks = Blocks(1 << 40, 100)
    block, _ = take(blocks, M)
    blocks.give_back(BOB, *key(block))
    blocks.give_back(ALICE, 7, 0)
    assert blocks.outstanding == 1
    blocks.give_back(ALICE, *key(block))
    blocks.give_back(ALICE, *key(block))
    assert (blocks.used, blocks.held, blocks.outstanding) == (0, M, 0)
    assert take(blocks, M)[0] is not take(blocks, M)[0]


def test_the_bound_holds_and_warm_blocks_of_other_sizes_give_way():
    blocks = Blocks(4 * M, 100)
    a = [take(blocks, M)[0] for _ in range(4)]
    assert take(blocks, 1) == (None, [])
    for block in a[:2]:
        blocks.give_back(ALICE, *key(block))
    block, instructions = take(blocks, 2 * M)
    assert instructions == [Empty(1, a[0].offset, M), Empty(1, a[1].offset, M), Open(2, 16 * M)]
    assert blocks.held == blocks.used == 4 * M
    assert take(Blocks(4 * M, 100), 4 * M + 1)[0] is None


def test_no_more_segments_than_allowed():
    blocks = Blocks(1 << 40, 2)
    assert take(blocks, 32 * M)[0] is not None
    assert take(blocks, 32 * M)[0] is not None
    assert take(blocks, 32 * M)[0] is None
    assert blocks.used == 64 * M


def test_several_times_the_working_set_is_never_held():
    blocks = Blocks(1 << 40, 1000)
    for length in range(1 * M, 40 * M, M // 2):  # one block at a time, of ever another size
        block, _ = take(blocks, length)
        blocks.give_back(ALICE, *key(block))
        assert blocks.held <= 4 * size_class(length)


def test_what_is_not_needed_any_more_goes_after_two_periods():
    blocks = Blocks(1 << 40, 100)
    small, large = take(blocks, M)[0], take(blocks, 64 * M)[0]
    assert blocks.trim() == []
    blocks.give_back(ALICE, *key(large))
    blocks.give_back(ALICE, *key(small))
    assert blocks.trim() == []
    assert blocks.trim() == []
    assert blocks.trim() == [Empty(2, 0, 64 * M), Close(2), Empty(1, 0, M), Close(1)]
    assert (blocks.held, blocks.segments) == (0, 0)
    assert take(blocks, M)[1] == [Open(3, 16 * M)]


def test_a_dead_receiver_leaves_its_blocks():
    blocks = Blocks(1 << 40, 100)
    hers, his = take(blocks, M, ALICE)[0], take(blocks, M, BOB)[0]
    assert blocks.forget(ALICE, is_dead=True) == []
    assert (blocks.used, blocks.held, blocks.outstanding) == (M, 2 * M, 1)
    assert take(blocks, M)[0] is hers
    blocks.give_back(ALICE, *key(his))
    assert blocks.outstanding == 2


def test_blocks_of_one_that_may_live_are_never_used_again():
    blocks = Blocks(1 << 40, 100)
    hers, his, idle = take(blocks, M, ALICE)[0], take(blocks, M, BOB)[0], take(blocks, M, BOB)[0]
    blocks.give_back(BOB, *key(idle))
    assert blocks.forget(ALICE, is_dead=False) == [Empty(1, idle.offset, M)]
    assert take(blocks, M, BOB)[1] == [Open(2, 16 * M)]
    # The segment's file is closed when the last of the others comes back; hers is not emptied.
    assert blocks.give_back(BOB, *key(his)) == [Empty(1, his.offset, M), Close(1)]
    assert blocks.give_back(ALICE, *key(hers)) == []
    assert (blocks.used, blocks.held, blocks.segments) == (M, M, 1)


def test_a_large_block_that_is_lost_is_closed_at_once():
    blocks = Blocks(1 << 40, 100)
    block, _ = take(blocks, 64 * M)
    assert blocks.lose(ALICE, *key(block)) == [Close(1)]
    assert (blocks.used, blocks.held, blocks.segments) == (0, 0, 0)


def test_a_segment_that_cannot_be_made():
    blocks = Blocks(1 << 40, 100)
    block, _ = blocks.take(M)
    assert blocks.discard(block)[-1] == Close(1)
    assert (blocks.used, blocks.held, blocks.segments) == (0, 0, 0)
    assert take(blocks, M)[1] == [Open(2, 16 * M)]


class Machine(RuleBasedStateMachine):
    """Whatever happens, nobody's block is anybody else's, and the sums are right."""

    def __init__(self):
        super().__init__()
        self.blocks = Blocks(40 * M, 5)
        self.open = {}
        self.taken = []
        self.has = {ALICE: [], BOB: []}
        self.lost = set()

    def do(self, instructions):
        owned = {key(block) for block in self.taken} | {key(b) for blocks in self.has.values() for b in blocks}
        for instruction in instructions:
            if isinstance(instruction, Open):
                assert instruction.segment not in self.open
                self.open[instruction.segment] = instruction.size
            elif isinstance(instruction, Empty):
                place = instruction.segment, instruction.offset
                assert place not in owned
                assert place not in self.lost
                assert instruction.offset + instruction.size <= self.open[instruction.segment]
            else:
                del self.open[instruction.segment]
                assert not any(segment == instruction.segment for segment, _ in owned)

    @rule(length=st.sampled_from([1, 64 * K, 100 * K, M, 3 * M, 17 * M, 41 * M]))
    def take(self, length):
        before = [*self.taken, *self.has[ALICE], *self.has[BOB]]
        block, instructions = self.blocks.take(length)
        self.do(instructions)
        if block is not None:
            assert all(block is not other for other in before)
            assert key(block) not in self.lost
            assert length <= block.size
            assert block.segment.number in self.open
            self.taken.append(block)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), to=st.sampled_from([ALICE, BOB, None]))
    def send(self, data, to):
        block = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        if to is None:
            self.do(self.blocks.put_back(block))
        else:
            self.blocks.send(block, to)
            self.has[to].append(block)

    @precondition(lambda self: self.has[ALICE] or self.has[BOB])
    @rule(data=st.data(), lose=st.booleans())
    def give_back(self, data, lose):
        by = ALICE if not self.has[BOB] or (self.has[ALICE] and data.draw(st.booleans())) else BOB
        block = self.has[by].pop(data.draw(st.integers(0, len(self.has[by]) - 1)))
        if lose:
            self.lost.add(key(block))
            self.do(self.blocks.lose(by, *key(block)))
        else:
            self.do(self.blocks.give_back(by, *key(block)))

    @rule(who=st.sampled_from([ALICE, BOB]), is_dead=st.booleans())
    def forget(self, who, is_dead):
        if not is_dead:
            self.lost |= {key(block) for block in self.has[who]}
        self.has[who] = []
        self.do(self.blocks.forget(who, is_dead=is_dead))

    @rule()
    def trim(self):
        self.do(self.blocks.trim())

    @invariant()
    def sums(self):
        used = [*self.taken, *self.has[ALICE], *self.has[BOB]]
        assert self.blocks.used == sum(block.size for block in used)
        assert self.blocks.used <= self.blocks.held <= 40 * M
        assert self.blocks.outstanding == len(self.has[ALICE]) + len(self.has[BOB])
        assert self.blocks.segments == len(self.open) <= 5

    def teardown(self):
        while self.taken:
            self.do(self.blocks.put_back(self.taken.pop()))
        for who in (ALICE, BOB):
            self.has[who] = []
            self.do(self.blocks.forget(who, is_dead=True))
        for _ in range(3):
            self.do(self.blocks.trim())
        assert self.blocks.held == self.blocks.used == self.blocks.segments == 0
        assert not self.open


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
