"""Much printed text: a cell keeps the first and last lines of each worker, and the log has the rest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.notebook.frontend import Notebook
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.output import print_log
from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.output_cutter import OutputCutter
from nbdist.cluster.output.print_log import PrintLog
from nbdist.errors import UsageError
from nbdist.magics.lines import read
from nbdist.views.workers.printed import say


def out(text, stream="stdout"):
    return Published("stream", {"name": stream, "text": text})


def numbered(first, last):
    return "".join(f"{number}\n" for number in range(first, last + 1))


def text_of(messages):
    """The text of messages; ``<7>`` for a message that says so many lines are left out, ``<>`` for one that wipes."""
    return "".join(m.content.get("text") or f"<{m.content.get('lines', '')}>\n" for m in messages)


def cut(*messages):
    """What is shown of messages at once, and at the end."""
    cutter = OutputCutter(12, {"stdout", "stderr"})
    shown = [passed for message in messages for passed in cutter.take(message)]
    return text_of(shown), text_of(cutter.release())


# -- what is kept: pure ---------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 100, 1000, 100_000])
def test_the_first_and_last_lines_are_kept(piece):
    text = numbered(1, 10_000)
    shown, last = cut(*(out(text[at : at + piece]) for at in range(0, len(text), piece)))
    assert shown == numbered(1, 2000)
    assert last == "<6000>\n" + numbered(8001, 10_000)


@pytest.mark.parametrize("before", [1, 3000])
def test_one_long_line_is_cut_in_its_middle(before):
    shown, last = cut(out(numbered(1, before)), out("a" * 2_000_000 + "b" * 3_000_000 + "\nend\n"))
    assert shown + last == numbered(1, before) + (
        f"{'a' * 100_000} ... 4,800,000 characters left out ... {'b' * 100_000}\nend\n"
    )
    line = "c" * 200_000
    bar = "d" * 150_000 + "\r" + "e" * 150_000
    assert cut(out(f"{line}\n{bar}"))[0] == f"{line}\n{bar}"


def test_four_thousand_lines_are_all_shown():
    shown, last = cut(out(numbered(1, 4000)))
    assert shown + last == numbered(1, 4000)


def test_a_bar_moves_on_and_counts_as_one_line():
    bar = [out(f"\r{percent} %", "stderr") for percent in range(5000)]
    shown, last = cut(out(numbered(1, 3000)), *bar, out("\n", "stderr"), out("end"))
    assert shown.startswith(numbered(1, 2000) + "\r0 %\r1 %")
    assert shown.endswith("\r4999 %\n")
    assert last == numbered(2001, 3000) + "end"


def test_a_wiped_cell_begins_anew():
    wipe = Published("clear_output", {"wait": True})
    shown, last = cut(*[out(numbered(1, 1500)), wipe] * 4, out("x\n"))
    assert shown == (numbered(1, 1500) + "<>\n") * 4 + "x\n"
    assert last == ""


def test_a_result_comes_below_the_last_lines():
    cutter = OutputCutter(12, {"stdout"})
    result = Published("execute_result", {"data": {"text/plain": "7"}})
    cutter.take(out(numbered(1, 9000)))
    assert text_of(cutter.take(result)[:-1]) == "<5000>\n" + numbered(7001, 9000)


def test_a_colour_ends_where_lines_are_left_out():
    _, last = cut(out(numbered(1, 2000)), out("\x1b[31m" + numbered(1, 3000) + "\x1b[0m"))
    assert last.startswith("<1000>\n\x1b[0m1001\n")


# -- the log --------------------------------------------------------------------------------------


def lines_of(log, cell=None):
    return [line for _, line in log.read(cell).lines()]


def test_the_log_has_whole_lines_by_cell(tmp_path):
    log = PrintLog(tmp_path, "worker1")
    for cell, stream, text in [
        (1, "stdout", "a"),
        (2, "stderr", "b\n"),
        (1, "stderr", "c\n"),
        (1, "stdout", "a\n\r7 %"),
    ]:
        log.write(cell, stream, text)
    assert lines_of(log, 1) == ["c", "aa", "7 %"]
    assert lines_of(log, 2) == ["b"]
    assert lines_of(log, 3) == []
    assert lines_of(log) == ["b", "c", "aa", "7 %"]


def test_the_oldest_lines_are_dropped_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(print_log, "_FILE_BYTES", 10_000)
    log = PrintLog(tmp_path, "worker1")
    log.write(1, "stdout", "early\n")
    for number in range(1, 20_001):
        log.write(2, "stdout", f"{number}\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000
    kept = lines_of(log, 2)
    assert kept[-1] == "20000"
    said = say([log.read(2)], None).splitlines()
    assert said[1] == f"the first {20_000 - len(kept):,} lines are gone: of each worker the newest 200 MB are kept"
    assert (
        say([log.read(1)], None).splitlines()[0]
        == "the first 1 lines are gone: of each worker the newest 200 MB are kept"
    )
    assert str(20_001 - len(kept)) == kept[0]


def test_a_long_text_goes_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(print_log, "_FILE_BYTES", 10_000)
    monkeypatch.setattr(print_log, "_PIECE", 1000)
    log = PrintLog(tmp_path, "worker1")
    log.write(1, "stdout", "ü" * 20_000 + "\n")
    assert lines_of(log) == ["ü" * 20_000]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000


def test_a_log_that_cannot_be_written_says_so(tmp_path):
    log = PrintLog(tmp_path / "gone", "worker1")
    log.write(1, "stdout", "x\n")
    assert "No such file" in say([log.read(1)], None)


def test_which_lines_are_shown(tmp_path):
    log = PrintLog(tmp_path, "worker1")
    log.write(3, "stdout", numbered(1, 10_000))
    log.write(4, "stderr", "four\n")

    def shown(cell, span=None):
        said = say([log.read(cell)], span).splitlines()
        return said[0], said[1], said[-1]

    assert shown(3) == ("lines 2,001 to 6,000 of 10,000 in cell 3; `--lines FIRST:LAST` shows others", "2001", "6000")
    assert shown(3, (9999, None))[1:] == ("9999", "10000")
    assert shown(3, (1, 3))[1:] == ("1", "3")
    assert shown(3, (None, 2))[1:] == ("9999", "10000")
    assert say([log.read(3)], (20_000, None)) == "there are 10,000 lines in cell 3"
    assert say([log.read(4)], None) == "four"
    assert say([log.read(5)], None) == "nothing printed in cell 5"
    assert shown(None)[1:] == ("-- cell 3 --", "four")
    other = PrintLog(tmp_path, "worker2")
    other.write(4, "stdout", "four\n")
    assert say([log.read(4), other.read(4)], None) == "[worker1,2] four"


@pytest.mark.parametrize("line", ["--cell x", "--cell 0", "--lines 0:3", "--lines a", "--nothing"])
def test_a_wrong_line_says_how_to_write_it(line):
    with pytest.raises(UsageError, match="write: %dist_log"):
        read("%dist_log", line)


# -- in a notebook --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none -t 60")
        yield notebook


def test_a_cell_keeps_the_first_and_last_lines_of_each_worker(notebook, tmp_path):
    cell = notebook.run("%%remote\nfor i in range(1, 100_001): print('line', i, 'of', rank)")
    number = cell.reply["content"]["execution_count"]
    for rank in range(2):
        mine = [line for line in cell.stdout.splitlines() if line.startswith((f"[worker{rank}]", "[worker0,1]"))]
        left_out = mine.pop(2000)
        assert mine == [f"[worker{rank}] line {i} of {rank}" for i in [*range(1, 2001), *range(98_001, 100_001)]]
        # Both workers' lines are equal here, so they are one line if they come at the same time.
        assert left_out in [
            f"[worker{who}] 96,000 lines left out: `%dist_log worker{who} --cell {number}`" for who in (rank, "0,1")
        ]
    last = [m["content"]["data"]["text/plain"] for m in cell.messages if m["msg_type"] == "update_display_data"]
    assert last[-1] == ""
    assert all(len(shown.splitlines()) <= 22 for shown in last)
    log = notebook.run(f"%dist_log worker1 --cell {number}").stdout.splitlines()
    assert log[0] == f"lines 2,001 to 6,000 of 100,000 in cell {number}; `--lines FIRST:LAST` shows others"
    assert log[1:] == [f"line {i} of 1" for i in range(2001, 6001)]
    file = tmp_path / "saved.txt"
    assert notebook.run(f"%dist_log 1 --cell {number} --save {file}").stdout == f"100,000 lines are in {file}.\n"
    assert len(file.read_text().splitlines()) == 100_000


def test_equal_lines_are_folded_also_where_lines_are_left_out(notebook):
    cell = notebook.run("%%remote\nprint(*range(5000), sep='\\n')")
    number = cell.reply["content"]["execution_count"]
    lines = [f"[worker0,1] {i}" for i in [*range(2000), *range(3000, 5000)]]
    lines.insert(2000, f"[worker0,1] 1,000 lines left out: `%dist_log worker0,1 --cell {number}`")
    assert cell.stdout.splitlines() == lines


def test_one_worker_and_the_handle(notebook):
    cell = notebook.run("%%remote 0\nprint(*range(5000), sep='\\n')\nrank")
    number = cell.reply["content"]["execution_count"]
    lines = [str(i) for i in [*range(2000), *range(3000, 5000)]]
    lines.insert(2000, f"1,000 lines left out: `%dist_log worker0 --cell {number}`")
    assert cell.stdout.splitlines() == lines
    notebook.run(
        "from nbdist import Cluster\nhandle = Cluster.current.execute(\"print(*range(5000), sep='\\\\n')\", '0')"
    )
    assert notebook.run("handle.outputs['worker0'][0]['text'].count('\\n')").result == "4001"


def test_what_is_not_cut(notebook):
    notebook.answers.append(lambda request: "yes")
    cell = notebook.run(
        "%%remote 0\nprint(*range(2500), sep='\\n')\nfor i in range(9): print(end=f'\\r{i} %', flush=True)\n"
        "display({'text/plain': 'figure'}, raw=True)\nprint('\\nsure? ', end='')\nprint(input(), 'it was')"
    )
    assert "\r8 %" in cell.stdout
    assert "figure" in [data["text/plain"] for data in cell.displays]
    assert cell.stdout.endswith("yes it was\n")
    assert "sure? " in cell.stdout


def test_what_a_called_function_prints_is_cut_as_well(notebook):
    notebook.run("def say(n):\n    print(*range(n), sep='\\n')")
    cell = notebook.run("rpc.rpc_sync('worker0', say, args=(5000,))")
    number = cell.reply["content"]["execution_count"]
    notebook.until(lambda: "4999" in cell.stdout, what="the last line")
    assert f"[worker0] 1,000 lines left out: `%dist_log worker0 --cell {number}`" in cell.stdout.splitlines()
    assert len(cell.stdout.splitlines()) == 4001
    assert "of 5,000 in" in notebook.run(f"%dist_log 0 --cell {number}").stdout


def test_the_last_lines_of_all_cells(notebook):
    notebook.run("%%remote\nprint('one')")
    cell = notebook.run("%%remote\nprint('two', rank)")
    number = cell.reply["content"]["execution_count"]
    said = notebook.run("%dist_log worker1").stdout.splitlines()
    assert said[-4:] == [f"-- cell {number - 1} --", "one", f"-- cell {number} --", "two 1"]


def test_a_script_is_not_cut(capfd):
    with nbdist.Cluster(1, backend="none") as cluster:
        cluster.execute("print(*range(5000), sep='\\n')")
        deadline = time.monotonic() + 20
        text = ""
        while text.count("\n") < 5000 and time.monotonic() < deadline:
            text += capfd.readouterr().out
        assert text.splitlines() == [str(i) for i in range(5000)]
        assert list(Path(cluster.folder).glob("*.printed-*"))
        folder = cluster.folder
    assert not Path(folder).exists()


def test_what_was_printed_while_no_page_was_open(notebook, tmp_path):
    gate, done = tmp_path / "gate", tmp_path / "done"
    cell = notebook.run(
        f"%%remote 0 -a\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        f"print('nobody saw this', flush=True)\nopen({str(done)!r}, 'w').close()"
    )
    number = cell.reply["content"]["execution_count"]
    notebook.client.stop_channels()
    gate.touch()
    wait_until(done.exists)
    notebook.client = notebook.manager.client()
    notebook.client.start_channels()
    notebook.client.wait_for_ready(timeout=20)
    assert notebook.run(f"%sync\n%dist_log 0 --cell {number}").stdout.endswith("nobody saw this\n")
    assert "nobody saw this" not in cell.stdout
