"""The last lines of what a worker has written."""

from nbdist.cluster.output.tail import Tail


def test_lines_in_pieces_and_an_open_one():
    tail = Tail(3, 100)
    for piece in ("on", "e\ntwo\n\n   \nth", "ree\nfour\nfi"):
        tail.feed(piece)
    assert tail.lines() == ["three", "four", "fi"]
    tail.feed("ve\n")
    assert tail.lines() == ["three", "four", "five"]
    tail.clear()
    assert tail.lines() == []


def test_a_progress_bar_is_one_line_as_it_was_last():
    tail = Tail(3, 100)
    tail.feed("before\n")
    for percent in range(0, 101, 10):
        tail.feed(f"\r{percent}%")
    assert tail.lines() == ["before", "100%"]
    tail.feed("\rdone\r\nafter\n")
    assert tail.lines() == ["before", "done", "after"]


def test_what_is_long_is_cut_to_its_end():
    tail = Tail(2, 10)
    tail.feed("x" * 1000 + "end\n" + "y" * 1000)
    tail.feed("END")
    assert tail.lines() == ["x" * 7 + "end", "y" * 7 + "END"]
