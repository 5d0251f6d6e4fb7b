"""The table of `%dist_status`, as text and as HTML."""

from __future__ import annotations

from html.parser import HTMLParser

from nbdist.cluster.inspection.status import WorkerStatus
from nbdist.cluster.inspection.status_report import StatusReport
from nbdist.views.workers.status import StatusTable

HEAD = ["worker", "rank", "pid", "device", "state", "runs", "memory", "calls"]
IDLE = WorkerStatus("worker0", 0, 4711, "cpu", "idle", "", StatusReport(0, memory=47_000_000))
LARGE = StatusReport(12, memory=3_072_000_000)
BUSY = WorkerStatus("worker10", 10, 4712, "cuda:1 (GPU 3)", "busy", "train(model) (2.5 s)", LARGE)
LOST = WorkerStatus(
    "worker2", 2, None, "cpu", "was killed by SIGKILL\nits standard error:\n  x", "", StatusReport(None)
)


class Table(HTMLParser):
    """The texts of a table's cells, by row."""

    def __init__(self, html) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data) -> None:
        self.rows[-1][-1] += data


def test_columns_stand_under_their_names():
    assert repr(StatusTable([IDLE, BUSY, LOST])).split("\n") == [
        "worker    rank  pid   device          state                  runs                  memory   calls",
        "worker0   0     4711  cpu             idle                                         47.0 MB  0",
        "worker10  10    4712  cuda:1 (GPU 3)  busy                   train(model) (2.5 s)  3.1 GB   12",
        "worker2   2           cpu             was killed by SIGKILL",
    ]


def test_html_says_the_same():
    assert Table(StatusTable([IDLE, BUSY, LOST])._repr_html_()).rows == [
        HEAD,
        ["worker0", "0", "4711", "cpu", "idle", "", "47.0 MB", "0"],
        ["worker10", "10", "4712", "cuda:1 (GPU 3)", "busy", "train(model) (2.5 s)", "3.1 GB", "12"],
        ["worker2", "2", "", "cpu", "was killed by SIGKILL", "", "", ""],
    ]


def test_code_is_shown_and_not_taken_for_html():
    row = WorkerStatus("worker0", 0, 1, "cpu", "busy", "x < y & '<script>'", StatusReport(1, memory=0))
    table = Table(StatusTable([row])._repr_html_())
    assert table.rows[1][5] == "x < y & '<script>'"
    assert "script" not in table.tags


def test_a_row_is_one_line_whatever_runs():
    row = WorkerStatus("worker0", 0, 1, "cpu", "busy", "first\nsecond", StatusReport(1, memory=0))
    assert len(repr(StatusTable([row])).split("\n")) == 2
    assert "second" not in StatusTable([row])._repr_html_()


def test_a_table_without_workers_has_a_head():
    assert repr(StatusTable([])) == "  ".join(HEAD)
    assert Table(StatusTable([])._repr_html_()).rows == [HEAD]


def test_rows_can_be_read():
    assert StatusTable([IDLE]).rows == [IDLE]
