"""What a front end shows of several workers' output: every line once, under the name of who said it."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.cluster.output import screen
from nbdist.cluster.output.arranger import FOLD_AFTER, Published, Straight, say_names
from nbdist.cluster.output.line_cutting import Lines
from nbdist.cluster.output.live_order import Live
from nbdist.cluster.output.log_order import LogOrder

TWO = ["worker0", "worker1"]
FOUR = ["worker0", "worker1", "worker2", "worker3"]


# -- what workers say ---------------------------------------------------------------------------


def out(text):
    return Published("stream", {"name": "stdout", "text": text})


def err(text):
    return Published("stream", {"name": "stderr", "text": text})


def picture(data, id=None):
    transient = {} if id is None else {"display_id": id}
    data = {"image/png": data, "text/plain": "<Figure>"}
    return Published("display_data", {"data": data, "metadata": {}, "transient": transient})


def update(data, id):
    return picture(data, id)._replace(kind="update_display_data")


def result(text, **other):
    return Published("execute_result", {"data": {"text/plain": text, **other}, "metadata": {}, "execution_count": 3})


def clear(*, wait=False):
    return Published("clear_output", {"wait": wait})


def comm(kind="comm_msg"):
    return Published(kind, {"comm_id": "c", "data": {"value": 1}}, {"version": "2.1.0"}, [b"buffer"])


# -- and what comes of it -----------------------------------------------------------------------


def live(names=TWO):
    return Live(names, new_id=map("bars{}".format, itertools.count()).__next__)


def bars(*lines, id="bars0", kind="update_display_data"):
    content = {"data": {"text/plain": "\n".join(lines)}, "metadata": {}, "transient": {"display_id": id}}
    return Published(kind, content)


def new_bars(*lines, id="bars0"):
    return bars(*lines, id=id, kind="display_data")


def end(arranger, now, names=TWO):
    """All end; what is shown at last."""
    return [message for name in names for message in arranger.ended(name, now)] + arranger.finish(now)


def held(arranger, *said):
    """What is shown at the end of what workers said, and nothing before."""
    for worker, message in said:
        assert arranger.feed(worker, message, 0.0) == []
    for worker in dict(said):
        assert arranger.ended(worker, 0.0) == []
    return arranger.finish(0.0)


# -- the name of several ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["worker0"], "worker0"),
        (["worker0", "worker1"], "worker0,1"),
        (["worker0", "worker1", "worker2"], "worker0-2"),
        (["worker2", "worker0", "worker1"], "worker0-2"),
        (["worker0", "worker2", "worker3", "worker4", "worker9"], "worker0,2-4,9"),
        (["worker9", "worker10", "worker11"], "worker9-11"),
        (["worker1", "worker1"], "worker1"),
        (["worker0", "other0"], "worker0,other0"),
        (["ps", "trainer"], "ps,trainer"),
        (["worker0", "ps"], "worker0,ps"),
        (["0", "1", "2"], "0-2"),
        (["a1b2", "a1b3"], "a1b2,3"),
        (["worker01"], "worker01"),
    ],
)
def test_several_names_are_said_in_few_letters(names, said):
    assert say_names(names) == said


# -- one worker ---------------------------------------------------------------------------------


def test_one_workers_output_is_shown_as_it_came():
    arranger = Straight()
    for message in (out("a"), err("\rb"), result("3"), picture("p", "mine"), update("q", "mine"), clear(), comm()):
        assert arranger.feed("worker0", message, 0.0) == [message]
    assert arranger.next_flush() is None
    assert end(arranger, 1.0, ["worker0"]) == []


# -- several, watched: lines --------------------------------------------------------------------


def test_a_line_waits_for_others_to_say_the_same():
    arranger = live()
    assert arranger.feed("worker0", out("hello\n"), 1.0) == []
    assert arranger.next_flush() == 1.0 + FOLD_AFTER
    assert arranger.flush(1.05) == []
    assert arranger.feed("worker1", out("hello\n"), 1.06) == [out("[worker0,1] hello\n")]
    assert arranger.next_flush() is None


def test_it_does_not_wait_for_long():
    arranger = live()
    arranger.feed("worker0", out("hello\n"), 1.0)
    assert arranger.flush(1.0 + FOLD_AFTER) == [out("[worker0] hello\n")]
    assert arranger.next_flush() is None
    assert arranger.feed("worker1", out("hello\n"), 2.0) == []
    assert arranger.flush(2.0 + FOLD_AFTER) == [out("[worker1] hello\n")]


def test_nobody_waits_for_a_worker_that_has_ended():
    arranger = live()
    arranger.feed("worker0", out("a\n"), 0.0)
    assert arranger.ended("worker1", 0.01) == [out("[worker0] a\n")]
    assert arranger.feed("worker0", out("b\n"), 0.02) == [out("[worker0] b\n")]


def test_different_lines_come_in_the_workers_order():
    arranger = live(FOUR)
    for name in reversed(FOUR[1:]):
        assert arranger.feed(name, out(f"I am {name}\n"), 0.0) == []
    assert arranger.feed("worker0", out("I am worker0\n"), 0.09) == [out("[worker0] I am worker0\n")]
    rest = "".join(f"[{name}] I am {name}\n" for name in FOUR[1:])
    assert arranger.flush(FOLD_AFTER) == [out(rest)]


def test_what_came_much_sooner_comes_first():
    arranger = live(FOUR)
    arranger.feed("worker1", out("early\n"), 0.0)
    assert arranger.feed("worker0", out("late\n"), 0.2) == [out("[worker1] early\n")]  # nobody flushed meanwhile
    assert arranger.flush(0.4) == [out("[worker0] late\n")]


def test_each_line_has_its_own_time():
    arranger = live(["worker0", "worker1", "worker2"])
    arranger.feed("worker1", out("early\n"), 0.0)
    arranger.feed("worker0", out("same\n"), 0.05)
    assert arranger.flush(arranger.next_flush()) == [out("[worker1] early\n")]
    assert arranger.next_flush() == 0.05 + FOLD_AFTER
    assert arranger.feed("worker2", out("same\n"), 0.11) == []
    assert arranger.flush(0.05 + FOLD_AFTER) == [out("[worker0,2] same\n")]


def test_flushing_when_it_asks_for_it_always_gets_on():
    arranger = live(FOUR)
    for moment, name in enumerate(FOUR):
        arranger.feed(name, out("x\n" * moment + f"{name}"), moment * 0.03)
    for _ in range(20):
        due = arranger.next_flush()
        if due is None:
            break
        arranger.flush(due)
        assert arranger.next_flush() != due
    assert arranger.next_flush() is None


def test_the_same_text_on_both_streams_is_not_the_same():
    arranger = live()
    arranger.feed("worker0", out("x\n"), 0.0)
    assert arranger.feed("worker1", err("x\n"), 0.0) == [out("[worker0] x\n")]
    assert arranger.flush(FOLD_AFTER) == [err("[worker1] x\n")]


def test_empty_lines_have_a_name_and_no_blank():
    arranger = live()
    arranger.ended("worker1", 0.0)
    assert arranger.feed("worker0", out("\n\n a\n"), 0.0) == [out("[worker0]\n[worker0]\n[worker0]  a\n")]
    assert arranger.feed("worker0", out(""), 0.0) == []


def test_a_line_in_pieces_is_one_line():
    arranger = live()
    arranger.ended("worker1", 0.0)
    for piece in ("a", "", "ä", " 😀"):
        assert arranger.feed("worker0", out(piece), 0.0) == []
    arranger.feed("worker0", err("not this"), 0.0)
    assert arranger.feed("worker0", out(" b\nc"), 0.0) == [out("[worker0] aä 😀 b\n")]


def test_a_last_line_needs_no_end():
    arranger = live()
    arranger.feed("worker0", out("a"), 0.0)
    arranger.feed("worker1", out("a"), 0.0)
    assert arranger.ended("worker0", 0.0) == []
    assert arranger.ended("worker1", 0.0) == [out("[worker0,1] a\n")]
    assert arranger.finish(0.0) == []


def test_only_newlines_end_lines():
    arranger = live(["worker0"])
    arranger.ended("worker0", 0.0)
    text = "a\x0bb\x0cc\u2028d\x85e"
    assert arranger.feed("worker0", out(text + "\n"), 0.0) == [out(f"[worker0] {text}\n")]


def test_what_comes_after_the_end_is_shown_at_once():
    arranger = live()
    end(arranger, 0.0)
    assert arranger.feed("worker1", out("from a thread\n"), 5.0) == [out("[worker1] from a thread\n")]


def test_a_worker_that_was_not_announced_has_its_say():
    arranger = live()
    assert arranger.ended("worker7", 0.0) == []
    arranger.feed("worker8", out("hi\n"), 0.0)
    assert arranger.finish(0.0) == [out("[worker8] hi\n")]


def test_a_display_between_lines_ends_the_line_before_it():
    arranger = live()
    arranger.ended("worker1", 0.0)
    arranger.feed("worker0", out("before"), 0.0)
    assert arranger.feed("worker0", picture("p"), 0.0) == [out("[worker0] before\n[worker0]\n"), picture("p")]
    assert arranger.feed("worker0", out(" after\n"), 0.0) == [out("[worker0]  after\n")]


# -- results and displays -----------------------------------------------------------------------


def test_a_result_that_is_text_is_a_line():
    arranger = live()
    arranger.feed("worker0", result("3"), 0.0)
    assert arranger.feed("worker1", result("4"), 0.0) == [out("[worker0] 3\n")]
    assert arranger.flush(FOLD_AFTER) == [out("[worker1] 4\n")]


def test_results_of_several_lines_stay_whole():
    arranger = live()
    arranger.feed("worker0", result("tensor([[1, 2],\n        [3, 4]])"), 0.0)
    shown = arranger.feed("worker1", result("tensor([[1, 2],\n        [3, 5]])"), 0.0)
    assert shown == [out("[worker0] tensor([[1, 2],\n[worker0]         [3, 4]])\n")]
    assert arranger.finish(0.0) == [out("[worker1] tensor([[1, 2],\n[worker1]         [3, 5]])\n")]


def test_the_same_result_of_several_lines_is_shown_once():
    arranger = live()
    arranger.feed("worker0", result("a\n\nb"), 0.0)
    assert arranger.feed("worker1", result("a\n\nb"), 0.0) == [out("[worker0,1] a\n[worker0,1]\n[worker0,1] b\n")]


def test_a_result_that_is_more_than_text_is_a_display():
    arranger = live()
    arranger.ended("worker1", 0.0)
    rich = {"text/html": "<b>3</b>", "text/plain": "3"}
    assert arranger.feed("worker0", result("3", **{"text/html": "<b>3</b>"}), 0.0) == [
        out("[worker0]\n"),
        Published("display_data", {"data": rich, "metadata": {}}),
    ]


def test_the_same_display_of_several_is_shown_once():
    arranger = live()
    arranger.feed("worker0", picture("p"), 0.0)
    assert arranger.feed("worker1", picture("p"), 0.0) == [out("[worker0,1]\n"), picture("p")]
    arranger.feed("worker0", picture("p"), 1.0)
    assert arranger.feed("worker1", picture("q"), 1.0) == [out("[worker0]\n"), picture("p")]


def test_a_display_that_may_be_updated_stands_alone_and_waits_for_nobody():
    arranger = live()
    assert arranger.feed("worker0", picture("p", "0" * 32), 0.0) == [out("[worker0]\n"), picture("p", "0" * 32)]
    assert arranger.feed("worker1", picture("p", "1" * 32), 0.0) == [out("[worker1]\n"), picture("p", "1" * 32)]


def test_updates_reach_their_display_only():
    arranger = live()
    for name in TWO:
        shown = arranger.feed(name, picture("begin", "mine"), 0.0)
        assert shown[1] == picture("begin", f"{name}:mine")
    assert arranger.feed("worker1", update("end", "mine"), 0.0) == [update("end", "worker1:mine")]


def test_updates_of_earlier_cells_displays_go_on():
    assert live().feed("worker0", update("new", "0" * 32), 0.0) == [update("new", "0" * 32)]
    assert LogOrder(TWO).feed("worker0", update("new", "0" * 32), 0.0) == [update("new", "0" * 32)]


def test_a_display_that_waits_is_shown_with_its_update():
    arranger = live()
    assert arranger.feed("worker0", out("first\n"), 0.0) == []
    assert arranger.feed("worker0", picture("begin", "d"), 0.0) == []
    arranger.feed("worker0", update("end", "d"), 0.0)
    assert arranger.flush(FOLD_AFTER) == [out("[worker0] first\n[worker0]\n"), picture("end", "worker0:d")]


def test_messages_of_widgets_go_on_as_they_are_and_disturb_nothing():
    arranger = live()
    arranger.feed("worker0", out("same\n"), 0.0)
    assert arranger.feed("worker0", comm("comm_open"), 0.0) == [comm("comm_open")]
    assert arranger.feed("worker1", comm(), 0.01) == [comm()]
    assert arranger.feed("worker1", out("same\n"), 0.02) == [out("[worker0,1] same\n")]


def test_a_widget_is_closed_after_it_was_shown():
    arranger = live()
    arranger.feed("worker0", picture("widget"), 0.0)
    closed = arranger.feed("worker0", comm("comm_close"), 0.0)
    assert closed == [out("[worker0]\n"), picture("widget"), comm("comm_close")]


def test_a_shown_error_has_a_name():
    arranger = live()
    arranger.ended("worker1", 0.0)
    error = Published("error", {"ename": "ValueError", "evalue": "x", "traceback": ["ValueError: x"]})
    assert arranger.feed("worker0", error, 0.0) == [out("[worker0]\n"), error]


def test_kinds_that_are_not_output_go_on():
    other = Published("debug_event", {"event": "stopped"})
    assert live().feed("worker0", other, 0.0) == [other]
    assert LogOrder(TWO).feed("worker0", other, 0.0) == [other]


# -- progress bars and dots ---------------------------------------------------------------------


def test_progress_bars_have_a_line_for_each_worker():
    arranger = live()
    assert arranger.feed("worker0", err("\r 0%"), 0.0) == []
    assert arranger.feed("worker1", err("\r 0%"), 0.0) == []
    assert arranger.flush(arranger.next_flush()) == [new_bars("[worker0]  0%", "[worker1]  0%")]
    assert arranger.feed("worker0", err("\r50%"), 1.0) == []
    assert arranger.feed("worker0", err("\r60%"), 1.05) == []
    assert arranger.next_flush() == 1.0 + FOLD_AFTER
    assert arranger.flush(1.0 + FOLD_AFTER) == [bars("[worker0] 60%", "[worker1]  0%")]
    assert arranger.next_flush() is None


def test_a_finished_bar_becomes_a_line():
    arranger = live()
    arranger.feed("worker0", err("\r 50%"), 0.0)
    arranger.flush(0.1)
    arranger.feed("worker0", err("\r100%\n"), 1.0)
    assert arranger.flush(1.1) == [err("[worker0] 100%\n"), bars("")]
    assert end(arranger, 2.0) == []


def test_a_bar_that_was_left_stays_as_it_stood():
    arranger = live()
    arranger.feed("worker0", err("\r10%"), 0.0)
    assert end(arranger, 0.0) == [new_bars("[worker0] 10%")]


def test_a_bar_that_wiped_itself_leaves_nothing():
    arranger = live()
    arranger.feed("worker0", err("\r10%"), 0.0)
    arranger.flush(0.1)
    arranger.feed("worker0", err("\r   \r"), 0.2)
    assert end(arranger, 0.3) == [bars("")]
    assert LogOrder(TWO).finish(0.0) == []
    assert held(LogOrder(TWO), ("worker0", err("\r10%")), ("worker0", err("\r   \r"))) == []


def test_lines_of_the_other_stream_pass_a_bar():
    arranger = live()
    arranger.ended("worker1", 0.0)
    arranger.feed("worker0", err("\r10%"), 0.0)
    assert arranger.feed("worker0", out("epoch 1\n"), 0.0) == [out("[worker0] epoch 1\n")]
    assert arranger.flush(0.1) == [new_bars("[worker0] 10%")]
    assert arranger.feed("worker0", result("3"), 0.2) == [out("[worker0] 3\n")]
    assert arranger.finish(0.2) == []


def test_a_bar_and_a_line_that_has_begun_are_both_kept():
    arranger = live()
    arranger.feed("worker0", err("\r10%"), 0.0)
    arranger.feed("worker0", out("..."), 0.0)
    assert arranger.flush(0.3) == [new_bars("[worker0] ...", "[worker0] 10%")]
    arranger.ended("worker1", 0.4)
    assert arranger.ended("worker0", 0.4) == [out("[worker0] ...\n")]
    assert arranger.finish(0.4) == [bars("[worker0] 10%")]


def test_dots_are_shown_before_their_line_ends():
    arranger = live()
    arranger.feed("worker0", out("."), 0.0)
    arranger.feed("worker0", out("."), 0.2)
    assert arranger.flush(0.2) == []
    assert arranger.flush(arranger.next_flush()) == [new_bars("[worker0] ..")]
    arranger.feed("worker0", out(".\n"), 1.0)
    assert arranger.flush(1.1) == [out("[worker0] ...\n"), bars("")]


def test_lines_whose_end_comes_soon_are_no_dots():
    arranger = live()
    arranger.ended("worker1", 0.0)
    for number in range(100):  # wherever the stream is cut, a line has begun
        assert all(message.kind == "stream" for message in arranger.flush(number / 10))
        arranger.feed("worker0", out("end\nbegin "), number / 10)
    assert len(arranger.flush(9.9 + 0.3)) == 1


def test_dots_of_one_do_not_show_what_another_has_only_begun():
    arranger = live()
    arranger.feed("worker0", out("."), 0.0)
    arranger.feed("worker1", out("begun "), 0.29)
    assert arranger.flush(0.3) == [new_bars("[worker0] .")]
    assert arranger.feed("worker1", out("ended\n"), 0.31) == []
    assert arranger.flush(0.31 + FOLD_AFTER) == [out("[worker1] begun ended\n")]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("abc\rX", "Xbc"),
        ("abc\r\n", "abc"),
        ("abc\r", "abc"),
        ("abc\r   \rd", "d"),
        ("50%|##  |\r100%|####|", "100%|####|"),
        ("\r\rabc", "abc"),
        ("abc   \rx", "xbc"),
        ("\x1b[32m100\x1b[0m\r\x1b[31m9\x1b[0m", "\x1b[31m9\x1b[0m00\x1b[0m"),
        ("100%\r\x1b[K5%", "5%"),
        ("100%\r\x1b[2K5%", "5%"),
        ("downloading\x1b[2K\rdone", "done"),
        ("über\rÜ", "Über"),
    ],
)
def test_carriage_returns_write_over_what_was_there(written, seen):
    assert held(LogOrder(TWO), ("worker0", out(written))) == [out(f"[worker0] {seen}\n")]


def test_a_bar_takes_no_more_room_the_more_it_moves():
    lines = Lines("worker0")
    for number in range(1000):
        lines.take(err(f"\r{number:4}%" if number % 2 else f"\r\x1b[32m{number:4}%\x1b[0m"), 0.0)
    assert sum(map(len, lines._begun.values())) < 100


# -- colours ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        ("\x1b[31mred\x1b[39m\nplain\n", ["\x1b[31mred\x1b[39m", "plain"]),
        ("\x1b[31mred\nstill\x1b[0m\nplain\n", ["\x1b[31mred\x1b[0m", "\x1b[31mstill\x1b[0m", "plain"]),
        ("\x1b[1;31mred\n\nstill\x1b[m\n", ["\x1b[1;31mred\x1b[0m", "", "\x1b[1;31mstill\x1b[m"]),
        ("\x1b[1;31mred\n\x1b[22mthin\n", ["\x1b[1;31mred\x1b[0m", "\x1b[1;31m\x1b[22mthin\x1b[0m"]),
        ("\x1b[0;32mgreen\n", ["\x1b[0;32mgreen\x1b[0m"]),
        ("\x1b[38;5;196mred\nx\n", ["\x1b[38;5;196mred\x1b[0m", "\x1b[38;5;196mx\x1b[0m"]),
        ("\x1b[48;2;1;0;3;4ma\nx\n", ["\x1b[48;2;1;0;3;4ma\x1b[0m", "\x1b[48;2;1;0;3;4mx\x1b[0m"]),
        ("\x1b[38mbroken\x1b[mx\n", ["\x1b[38mbroken\x1b[mx"]),
    ],
)
def test_a_workers_colours_do_not_colour_others_lines(written, lines):
    arranger = live()
    arranger.ended("worker1", 0.0)
    assert arranger.feed("worker0", out(written), 0.0) == [
        out("".join(f"[worker0] {line}\n" if line else "[worker0]\n" for line in lines))
    ]


def test_colours_of_bars_and_results_end_with_them():
    arranger = live()
    arranger.feed("worker0", err("\r\x1b[32m10%"), 0.0)
    assert arranger.flush(0.1) == [new_bars("[worker0] \x1b[32m10%\x1b[0m")]
    arranger.ended("worker1", 1.0)
    assert arranger.feed("worker0", result("\x1b[31ma\nb"), 1.0) == [
        out("[worker0] \x1b[31ma\x1b[0m\n[worker0] \x1b[31mb\x1b[0m\n")
    ]


# -- wiping -------------------------------------------------------------------------------------


def test_one_worker_wipes_its_output_and_not_the_others():
    arranger = live()
    arranger.feed("worker0", out("mine\nours\n"), 0.0)
    assert arranger.feed("worker1", out("ours\n"), 0.0) == [out("[worker0] mine\n[worker0,1] ours\n")]
    arranger.feed("worker1", picture("p", "1" * 32), 0.0)
    arranger.ended("worker1", 0.0)
    assert arranger.feed("worker0", clear(), 0.1) == [
        clear(),
        out("[worker1] ours\n[worker1]\n"),
        picture("p", "1" * 32),
    ]


def test_wiping_waits_for_more_where_it_was_asked_to():
    arranger = live()
    arranger.feed("worker0", out("step 1\n"), 0.0)
    arranger.feed("worker1", out("mine\n"), 0.0)
    assert arranger.flush(1.0) == [out("[worker1] mine\n")]
    assert arranger.feed("worker0", clear(wait=True), 1.0) == []
    assert arranger.feed("worker0", out(""), 1.0) == []
    assert arranger.feed("worker0", comm(), 1.0) == [comm()]
    assert arranger.feed("worker0", update("p", "d"), 1.0) == [update("p", "worker0:d")]
    assert arranger.feed("worker0", out("step 2\n"), 1.0) == []
    assert arranger.flush(1.0 + FOLD_AFTER) == [clear(wait=True), out("[worker1] mine\n[worker0] step 2\n")]
    assert end(arranger, 2.0) == []


def test_all_wipe_together_and_say_the_same():
    arranger = live()
    for step in range(3):
        shown = []
        for name in TWO:
            arranger.feed(name, clear(wait=True), step)
            shown += arranger.feed(name, out(f"step {step}\n"), step)
        line = out(f"[worker0,1] step {step}\n")
        assert shown == ([line] if step == 0 else [clear(wait=True), line])


def test_wiping_nothing_disturbs_nobody():
    arranger = live()
    arranger.ended("worker1", 0.0)
    assert arranger.feed("worker0", clear(), 0.0) == []
    assert arranger.feed("worker0", out("a\n"), 0.0) == [out("[worker0] a\n")]


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("kind", [live, lambda: LogOrder(TWO)])
def test_a_line_that_has_begun_is_wiped_too(kind, wait):
    arranger = kind()
    arranger.feed("worker0", out("gone"), 0.0)
    arranger.feed("worker0", clear(wait=wait), 0.0)
    arranger.feed("worker0", out("here\n"), 0.0)
    assert end(arranger, 0.0) == [out("[worker0] here\n")]


def test_what_waits_to_be_shown_and_is_wiped_is_not_shown():
    arranger = live()
    arranger.feed("worker0", out("gone\n"), 0.0)
    arranger.feed("worker0", clear(), 0.0)
    assert end(arranger, 0.0) == []


def test_bars_of_others_are_shown_again_at_once():
    arranger = live()
    arranger.ended("worker1", 0.0)
    arranger.feed("worker1", err("\r10%"), 0.0)
    arranger.feed("worker0", err("\r20%"), 0.0)
    arranger.feed("worker0", out("mine\n"), 0.0)
    assert arranger.flush(0.1) == [new_bars("[worker0] 20%", "[worker1] 10%")]
    assert arranger.feed("worker0", clear(), 1.0) == [clear(), new_bars("[worker1] 10%", id="bars1")]
    arranger.feed("worker0", err("\r30%"), 1.0)
    assert arranger.flush(1.0 + FOLD_AFTER) == [bars("[worker0] 30%", "[worker1] 10%", id="bars1")]


def test_a_display_is_shown_again_as_it_was_updated():
    arranger = live()
    arranger.feed("worker0", picture("begin", "0" * 32), 0.0)
    arranger.feed("worker0", update("end", "0" * 32), 0.0)
    arranger.feed("worker1", picture("other", "1" * 32), 0.0)
    arranger.feed("worker1", clear(), 0.0)
    assert arranger.flush(1.0) == [clear(), out("[worker0]\n"), picture("end", "0" * 32)]


def test_what_is_remembered_for_that_has_a_limit(monkeypatch):
    monkeypatch.setattr(screen, "_CHARACTERS_KEPT", 10_000)
    arranger = live()
    for number in range(100):
        arranger.feed("worker0", picture("x" * 1000, f"{number:032}"), number)
        arranger.feed("worker0", update("y" * 1000, f"{number:032}"), number)
    arranger.feed("worker1", clear(), 200)
    _, *again = arranger.flush(201)
    displays = [message for message in again if message.kind == "display_data"]
    assert displays == [picture("y" * 1000, f"{number:032}") for number in range(92, 100)]
    assert len(arranger._screen._displays) == 8


# -- nobody watches -----------------------------------------------------------------------------


def test_output_comes_at_the_end_by_worker():
    assert held(
        LogOrder(TWO),
        ("worker1", out("b\n")),
        ("worker0", out("a\n")),
        ("worker1", out("d\n")),
        ("worker0", out("c\n")),
    ) == [out("[worker0] a\n[worker0] c\n[worker1] b\n[worker1] d\n")]


def test_workers_that_said_the_same_are_shown_together():
    said = [(name, message) for name in FOUR for message in (out("a\nb\n"), result("3"), picture("p"))]
    assert held(LogOrder(FOUR), *said) == [
        out("[worker0-3] a\n[worker0-3] b\n[worker0-3] 3\n[worker0-3]\n"),
        picture("p"),
    ]


def test_groups_are_in_the_order_of_their_first_workers():
    said = [(name, out(f"{int(name[-1]) % 2}\n")) for name in reversed(FOUR)]
    assert held(LogOrder(FOUR), *said) == [out("[worker0,2] 0\n[worker1,3] 1\n")]


def test_workers_that_said_nothing_are_not_mentioned():
    assert held(LogOrder(FOUR), ("worker2", out("x\n"))) == [out("[worker2] x\n")]
    assert LogOrder(FOUR).finish(0.0) == []


def test_displays_that_may_be_updated_are_each_shown():
    said = [(name, picture("p", name[-1] * 32)) for name in TWO]
    assert held(LogOrder(TWO), *said) == [
        out("[worker0]\n"),
        picture("p", "0" * 32),
        out("[worker1]\n"),
        picture("p", "1" * 32),
    ]


def test_held_displays_are_shown_as_they_were_updated():
    said = [(name, message) for name in TWO for message in (picture("begin", "d"), update(f"end of {name}", "d"))]
    assert held(LogOrder(TWO), *said) == [
        out("[worker0]\n"),
        picture("end of worker0", "worker0:d"),
        out("[worker1]\n"),
        picture("end of worker1", "worker1:d"),
    ]


def test_displays_that_have_been_shown_can_be_updated():
    arranger = LogOrder(TWO)
    held(arranger, ("worker0", picture("begin", "d")))
    assert arranger.feed("worker0", update("end", "d"), 1.0) == [update("end", "worker0:d")]


def test_the_order_between_streams_is_that_of_displays():
    assert held(
        LogOrder(TWO),
        ("worker0", err("e1\n")),
        ("worker0", out("o1\n")),
        ("worker0", picture("p")),
        ("worker0", err("e2\n")),
        ("worker0", out("o2\n")),
    ) == [
        out("[worker0] o1\n"),
        err("[worker0] e1\n"),
        out("[worker0]\n"),
        picture("p"),
        out("[worker0] o2\n"),
        err("[worker0] e2\n"),
    ]


def test_held_output_is_wiped():
    assert held(
        LogOrder(TWO),
        ("worker0", out("gone\n")),
        ("worker1", out("stays\n")),
        ("worker0", clear(wait=True)),
        ("worker0", out("gone too\n")),
        ("worker0", clear()),
        ("worker0", out("here\n")),
        ("worker0", clear(wait=True)),
    ) == [out("[worker0] here\n[worker1] stays\n")]


def test_messages_of_widgets_are_not_held():
    arranger = LogOrder(TWO)
    assert arranger.feed("worker0", comm(), 0.0) == [comm()]


def test_what_comes_after_the_end_is_not_lost_where_nobody_watches():
    arranger = LogOrder(TWO)
    assert held(arranger, ("worker0", out("a\n"))) == [out("[worker0] a\n")]
    assert arranger.next_flush() is None
    for name in TWO:
        assert arranger.feed(name, out("from a thread\n"), 5.0) == []
    assert arranger.flush(5.05) == []
    assert arranger.flush(arranger.next_flush()) == [out("[worker0,1] from a thread\n")]
    assert arranger.next_flush() is None


# -- whatever is said, and however it is cut ----------------------------------------------------


class FrontEnd:
    """A cell of a notebook, as far as it shows output; and whose it says that it is."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, str, str]] = []  # kind or stream, text or data, display id
        self._wipe = False

    def show(self, messages) -> None:
        for message in messages:
            content = message.content
            if message.kind == "clear_output":
                self._wipe = True
                if not content["wait"]:
                    self.wipe()
            elif message.kind == "update_display_data":
                id, data = content["transient"]["display_id"], content["data"]["text/plain"]
                self.outputs = [(k, data if i == id else t, i) for k, t, i in self.outputs]
            elif message.kind == "stream":
                self.wipe()
                assert content["text"].endswith("\n")
                self.outputs += [(content["name"], line, "") for line in content["text"][:-1].split("\n")]
            elif message.kind == "display_data":
                self.wipe()
                id = content.get("transient", {}).get("display_id", "")
                self.outputs.append(("display", content["data"]["text/plain"], id))

    def wipe(self) -> None:
        if self._wipe:
            self._wipe = False
            self.outputs.clear()

    def said(self, names):
        """What each worker is said to have said, in order; and what its bars show."""
        said: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
        begun: dict[str, list[str]] = {name: [] for name in names}
        self.wipe()
        for kind, text, id in self.outputs:
            if kind == "display" and id.startswith("bars"):
                for line in text.split("\n") if text else ():
                    (worker,), bar = self._read(line)
                    begun[worker].append(bar)
            elif kind == "display":
                assert all(said[worker].pop() == ("stdout", "") for worker in label)  # noqa: F821 (of the line before)
                for worker in label:  # noqa: F821
                    said[worker].append(("display", text))
            else:
                label, line = self._read(text)
                for worker in label:
                    said[worker].append((kind, line))
        return said, begun

    @staticmethod
    def _read(line):
        match = re.fullmatch(r"\[worker([\d,-]+)\](?: (.+))?", line, re.DOTALL)
        assert match is not None, line
        workers = []
        for part in match[1].split(","):
            first, _, last = part.partition("-")
            workers += [f"worker{number}" for number in range(int(first), int(last or first) + 1)]
        return workers, match[2] or ""


class Terminal:
    """What one worker's output is by itself."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.begun = {"stdout": "", "stderr": ""}
        self._displays: dict[str, list[int]] = {}
        self._wipe = False

    def take(self, kind, value) -> None:
        if kind == "clear":
            self._wipe = True
            if not value:
                self.wipe()
        elif kind == "update":
            for place in self._displays.get(value[1], ()):
                self.said[place] = ("display", value[0])
        elif kind in self.begun:
            if value:
                self.wipe()
            for letter in value:
                if letter == "\n":
                    self.end_line(kind)
                else:
                    self.begun[kind] += letter
        elif kind == "result":
            self.wipe()
            self.rest("stdout")
            self.said += [("stdout", line) for line in value.split("\n")]
        elif kind == "display":
            self.wipe()
            self.rest("stdout")
            self.rest("stderr")
            self._displays.setdefault(value[1], []).append(len(self.said))
            self.said.append(("display", value[0]))

    def wipe(self) -> None:
        if self._wipe:
            self.__init__()

    def rest(self, stream) -> None:
        if self.shown(stream):
            self.end_line(stream)
        self.begun[stream] = ""

    def end_line(self, stream) -> None:
        self.said.append((stream, self.shown(stream)))
        self.begun[stream] = ""

    def shown(self, stream) -> str:
        cells: list[str] = []
        at = 0
        for letter in self.begun[stream]:
            if letter == "\r":
                at = 0
            else:
                cells[at : at + 1] = [letter]
                at += 1
        return "".join(cells).rstrip() if "\r" in self.begun[stream] else "".join(cells)

    def bars(self) -> list[str]:
        return [self.shown(stream) for stream in self.begun if self.shown(stream)]


def message_of(kind, value):
    if kind in ("stdout", "stderr"):
        return Published("stream", {"name": kind, "text": value})
    if kind == "clear":
        return clear(wait=value)
    if kind == "result":
        return result(value)
    if kind == "comm":
        return comm()
    data, id = value
    transient = {"display_id": id} if id else {}
    content = {"data": {"text/plain": data}, "metadata": {}, "transient": transient}
    return Published("display_data" if kind == "display" else "update_display_data", content)


def pieces(draw, text):
    """A text, cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4))) if text else []
    return [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]


written = st.lists(st.sampled_from(["a", "b", "bc", "é ", "😀", "\n", "\n", "\r", "\r  ", " "]), max_size=8).map(
    "".join
)
coloured = st.lists(
    st.sampled_from(["a", "bc", " ", "\n", "\r", "\x1b[31m", "\x1b[0m", "\x1b[1;39m", "\x1b[K", "\x1b[2K", "\x1b"]),
    max_size=8,
).map("".join)
events = st.one_of(
    st.tuples(st.just("display"), st.tuples(st.sampled_from("pq"), st.sampled_from(["", "d", "e"]))),
    st.tuples(st.just("update"), st.tuples(st.sampled_from("rs"), st.sampled_from(["d", "e"]))),
    st.tuples(st.just("clear"), st.booleans()),
    st.tuples(st.just("result"), st.sampled_from(["1", "1\n2", "x\n\ny"])),
    st.tuples(st.just("comm"), st.none()),
)


def programs(text):
    """What a worker does: it writes to both streams until it does something else."""
    return st.lists(st.tuples(text, text, st.none() | events), max_size=5)


def interleaved(draw, *sequences):
    """In any order that keeps each one's."""
    owners = [index for index, sequence in enumerate(sequences) for _ in sequence]
    turns = draw(st.permutations(owners)) if owners else []
    each = [iter(sequence) for sequence in sequences]
    return [next(each[index]) for index in turns]


def performed(draw, program):
    """One way in which a worker's messages may be cut and ordered."""
    steps = []
    for to_stdout, to_stderr, event in program:
        steps += interleaved(
            draw,
            [("stdout", piece) for piece in pieces(draw, to_stdout)],
            [("stderr", piece) for piece in pieces(draw, to_stderr)],
        )
        if event is not None:
            steps.append(event)
    return steps


def on_three(draw, text):
    names = FOUR[:3]
    program = draw(programs(text))
    # Folding needs workers that do the same.
    return {name: program if draw(st.booleans()) else draw(programs(text)) for name in names}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_live_shows_each_worker_what_it_said_once_in_order_and_as_its_own(data):
    arranger, front, now = live(FOUR[:3]), FrontEnd(), 0.0
    steps = {name: performed(data.draw, program) for name, program in on_three(data.draw, written).items()}
    terminals = {name: Terminal() for name in steps}
    passed = Counter()
    mine = [[(name, *step) for step in [*each, ("end", None)]] for name, each in steps.items()]
    for name, kind, value in interleaved(data.draw, *mine):
        now += data.draw(st.sampled_from([0.0, 0.0, 0.03, FOLD_AFTER, 0.4]))
        due = arranger.next_flush()
        if due is not None and due <= now:
            front.show(arranger.flush(now))
            assert (arranger.next_flush() or now + 1) > now
        if kind == "end":
            shown = arranger.ended(name, now)
        else:
            terminals[name].take(kind, value)
            shown = arranger.feed(name, message_of(kind, value), now)
        passed.update(message.kind for message in shown)
        front.show(shown)
    front.show(arranger.finish(now))
    assert arranger.next_flush() is None or arranger.flush(now + 1) == []
    for terminal in terminals.values():
        for stream, begun in terminal.begun.items():
            if "\r" not in begun:
                terminal.rest(stream)
    said, shown_bars = front.said(steps)
    assert said == {name: terminal.said for name, terminal in terminals.items()}
    assert shown_bars == {name: terminal.bars() for name, terminal in terminals.items()}
    assert passed["comm_msg"] == sum(step[0] == "comm" for each in steps.values() for step in each)


def gathered(draw, work):
    """What LogOrder makes of it in the end, for one way in which the messages may come."""
    arranger = LogOrder(list(work))
    mine = [[(name, *step) for step in performed(draw, program)] for name, program in work.items()]
    for name, kind, value in interleaved(draw, *mine):
        for message in arranger.feed(name, message_of(kind, value), 0.0):
            assert message.kind in ("comm_msg", "update_display_data")
    return arranger.finish(0.0)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_grouped_does_not_depend_on_chance(data, colours):
    work = on_three(data.draw, coloured if colours else written)
    assert gathered(data.draw, work) == gathered(data.draw, work)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_grouped_shows_each_worker_what_it_said(data):
    work = on_three(data.draw, written)
    front = FrontEnd()
    front.show(gathered(data.draw, work))
    expected = {}
    for name, program in work.items():
        terminal = Terminal()
        for to_stdout, to_stderr, event in program:
            for step in (("stdout", to_stdout), ("stderr", to_stderr), *([event] if event else [])):
                terminal.take(*step)
        terminal.rest("stdout")
        terminal.rest("stderr")
        expected[name] = _by_stream(terminal.said)
    said, _ = front.said(work)
    assert said == expected


def _by_stream(said):
    """Between displays, what went to stdout comes before what went to stderr."""
    found = []
    for displays, group in itertools.groupby(said, lambda item: item[0] == "display"):
        run = list(group)
        found += run if displays else sorted(run, key=lambda item: item[0] == "stderr")
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_live_cuts_lines_alike_however_they_come(data):
    program = data.draw(programs(coloured))

    def lines(stream):
        arranger, front = live(["worker0"]), FrontEnd()
        for kind, value in performed(data.draw, program):
            front.show(arranger.feed("worker0", message_of(kind, value), 0.0))
        front.show(end(arranger, 0.0, ["worker0"]))
        return [output for output in front.outputs if output[0] == stream]

    assert lines("stdout") == lines("stdout")
    assert lines("stderr") == lines("stderr")


# -- much ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [live, LogOrder])
@pytest.mark.parametrize("chunk", [5, 10_000])
def test_many_lines_all_come_and_in_few_messages(kind, chunk):
    arranger, front, shown = kind(FOUR), FrontEnd(), 0
    for begin in range(0, 10_000, chunk):
        for name in FOUR:
            text = "".join(f"{name} {number}\n" for number in range(begin, begin + chunk))
            messages = arranger.feed(name, out(text), begin * 1e-4)
            shown += len(messages)
            front.show(messages)
    front.show(end(arranger, 10.0, FOUR))
    said, _ = front.said(FOUR)
    assert said == {name: [("stdout", f"{name} {number}") for number in range(10_000)] for name in FOUR}
    assert shown <= 4 * 10_000 / chunk


def test_bars_are_drawn_no_oftener_than_ten_times_a_second():
    arranger, drawn = live(FOUR), 0
    for step in range(2000):
        now = step / 400
        due = arranger.next_flush()
        if due is not None and due <= now:
            drawn += len(arranger.flush(now))
        for name in FOUR:
            drawn += len(arranger.feed(name, err(f"\r{step:5}"), now))
    assert 30 <= drawn <= 51
