"""How far each worker is while a cluster starts."""

from __future__ import annotations

from nbdist.cluster.kernels.workers import STEPS
from nbdist.cluster.output.sinks import PlainSink
from nbdist.views.workers.progress import StartProgress, draw

NAMES = ["worker0", "worker1"]


class Sink:
    """Keeps what is shown."""

    id = "cell"

    def __init__(self, *, interactive=True) -> None:
        self.interactive = interactive
        self.shown = []

    def publish(self, message) -> None:
        kind, content, metadata, _ = message
        assert metadata == content["metadata"] == {}
        self.shown.append((kind, content["data"]["text/plain"], content["transient"]["display_id"]))

    def hand_on(self, payload) -> None:
        raise AssertionError


def test_a_bar_grows_with_each_step():
    assert [draw(["w"], {"w": step}) for step in ("starting", *STEPS, "ready")] == [
        "w  ░░░░░░░░░░░░  starting",
        "w  ███░░░░░░░░░  process",
        "w  ██████░░░░░░  kernel",
        "w  █████████░░░  rpc",
        "w  ████████████  process group",
        "w  ████████████  ready",
    ]


def test_bars_begin_in_one_column():
    names = ["worker9", "worker10", "worker11"]
    assert draw(names, {"worker10": "ready", "elsewhere": "ready", "worker11": "lost"}) == (
        "worker9   ░░░░░░░░░░░░  starting\nworker10  ████████████  ready\nworker11  ░░░░░░░░░░░░  lost"
    )
    assert draw([], {}) == ""


def test_each_step_is_drawn_anew_in_one_display():
    sink = Sink()
    progress = StartProgress(NAMES, sink)
    progress("worker1", "process")
    progress("worker1", "ready")
    (id,) = {id for _, _, id in sink.shown}
    assert sink.shown == [
        ("display_data", draw(NAMES, {}), id),
        ("update_display_data", draw(NAMES, {"worker1": "process"}), id),
        ("update_display_data", draw(NAMES, {"worker1": "ready"}), id),
    ]


def test_what_is_drawn_already_is_not_drawn_again():
    sink = Sink()
    progress = StartProgress(NAMES, sink)
    progress("worker0", "kernel")
    progress("worker0", "kernel")
    assert len(sink.shown) == 2


def test_two_clusters_have_two_displays():
    first, second = Sink(), Sink()
    StartProgress(NAMES, first)
    StartProgress(NAMES, second)
    assert first.shown[0][2] != second.shown[0][2]


def test_where_nobody_watches_only_the_end_is_drawn():
    sink = Sink(interactive=False)
    progress = StartProgress(NAMES, sink)
    for step in (*STEPS, "ready"):
        for name in NAMES:
            progress(name, step)
    progress("worker1", "ready")
    assert [(kind, text) for kind, text, _ in sink.shown] == [
        ("display_data", draw(NAMES, dict.fromkeys(NAMES, "ready")))
    ]


def test_where_not_all_get_ready_nothing_is_drawn_there():
    sink = Sink(interactive=False)
    StartProgress(NAMES, sink)("worker0", "ready")
    assert sink.shown == []


def test_on_a_terminal_lines_are_not_drawn_over_and_over(capsys):
    progress = StartProgress(NAMES, PlainSink())
    for name in NAMES:
        for step in ("process", "ready"):
            progress(name, step)
    assert capsys.readouterr().out == "worker0  ████████████  ready\nworker1  ████████████  ready\n"
