"""What one worker sees of a pass, and how it halts: told in any order."""

import threading

import pytest
import torch
from helpers.waiting import wait_until

from nbdist.autograd.graph.messages import Control, Watching
from nbdist.autograd.graph.numbers import NodeNumbers
from nbdist.autograd.passes.claims import Claim
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.autograd.watching.observer import Observer, Stopped


class Halted:
    """An observer that is halted before a node, on a thread of its own."""

    def __init__(self, control):
        self.told = []
        self.observer = Observer("worker0", NodeNumbers(), Watching(1, 1, False, control), self._send)
        self.stopped = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            with Claim([], GradientStore(), self):  # as within a call of the engine
                self.observer.come_to(3, "Mul", (), sends=False)
        except Stopped:
            self.stopped = True

    def _send(self, number, happened, version):
        self.told += [(each.what, each.halt, each.version) for each in happened]


def test_it_goes_on_when_it_is_let_go():
    halted = Halted(Control(7, True))
    wait_until(lambda: halted.told == [("halted", 1, 7)])
    halted.observer.steer(None, 1)
    halted.thread.join(10)
    assert not halted.thread.is_alive()


def test_it_is_told_again_where_letting_go_was_overtaken_by_halting():
    halted = Halted(Control(7, True))
    wait_until(lambda: len(halted.told) == 1)
    halted.observer.steer(Control(9, True), 0)  # 8 was to let all go on
    wait_until(lambda: halted.told == [("halted", 1, 7), ("halted", 1, 9)])
    halted.observer.steer(Control(8), 0)  # too late
    assert halted.thread.is_alive()
    halted.observer.steer(Control(10), 1)
    halted.thread.join(10)
    assert not halted.thread.is_alive()


@pytest.mark.parametrize("end", ["stop", "leave"])
def test_its_end(end):
    halted = Halted(Control(7, True))
    wait_until(lambda: len(halted.told) == 1)
    getattr(halted.observer, end)()
    halted.thread.join(10)
    assert not halted.thread.is_alive()
    assert halted.stopped == (end == "stop")


@pytest.mark.parametrize(("later", "told"), [(Control(8, True), ["nan"]), (Control(8), [])])
def test_a_nan_of_a_node_that_began_before_the_pause_is_told(later, told):
    happened = []
    first = Control(7, until="nan")
    observer = Observer(
        "worker0", NodeNumbers(), Watching(1, 1, False, first), lambda *batch: happened.extend(batch[1])
    )
    observer.come_to(3, "Mul", [torch.ones(2)], sends=False)
    observer.steer(later, 0)  # another worker has found a NaN, or the user resumes
    observer.made(3, "Mul", [torch.tensor(torch.nan)], [torch.ones(2)])
    observer.flush()
    assert [each.what for each in happened if each.what == "nan"] == told
