"""The map of a swarm, of one that only says what it is told to: its form on paper, and what goes to a page."""

import base64
import gc
import json
import re
import time
import weakref
from xml.etree import ElementTree

import pytest
from helpers.notebook.frontend import Notebook
from helpers.simulated import swarm_double
from helpers.simulated.swarm_double import Swarm, large, server, three
from helpers.waiting import wait_until

from nbdist.views.map import as_html, as_svg, in_order, missing, parts, snapshot_of
from nbdist.views.widgets.map import MapView
from nbdist.views.widgets.view import View

WIDGET = "application/vnd.jupyter.widget-view+json"


# --- what is drawn --------------------------------------------------------------------------------


def test_a_row_is_cut_where_it_looks_otherwise():
    route = [["a", 0, 4], ["b", 4, 6], ["a", 6, 7]]
    assert parts(server("a", (2, 8)), route) == [(2, 4, "route"), (4, 6, "held"), (6, 7, "route"), (7, 8, "held")]
    assert parts(server("a", (0, 2), (2, 4), (6, 7)), []) == [(0, 4, "held"), (6, 7, "held")]
    assert parts(server("a", (0, 4), state="offline"), route) == [(0, 4, "away")]
    assert parts(server("a", (0, 4), state="draining"), route) == [(0, 4, "route")]
    assert parts(server("a", (0, 4), state="gone"), route) == []


def test_what_nobody_has():
    assert missing(snapshot_of(three())) == [(10, 20, "missing")]
    assert missing(snapshot_of(large())) == []
    silent = Swarm(4, [server("a", (0, 2), state="offline"), server("b", (1, 3))])
    assert missing(snapshot_of(silent)) == [(0, 1, "missing"), (3, 4, "missing")]
    assert missing(snapshot_of(Swarm(2))) == [(0, 2, "missing")]


@pytest.mark.parametrize("swarm", [three(), large(), Swarm(), Swarm(0), Swarm(300, [server("x" * 90, (0, 300))])])
def test_a_picture_in_which_everything_has_its_place(swarm):
    picture = ElementTree.fromstring(as_svg(snapshot_of(swarm)))
    width, height = float(picture.get("width")), float(picture.get("height"))
    assert width <= 1400
    for box in picture.findall("{*}g/{*}rect"):
        left, top, wide, tall = (float(box.get(side)) for side in ("x", "y", "width", "height"))
        assert wide > 0
        assert left + wide <= width
        assert top + tall <= height


def client(name, sessions=1, rate=0.0, cache=0, texts=(0, 0)):
    return {"name": name, "sessions": sessions, "rate": rate, "cache": cache, "texts": texts}


def test_who_uses_it_is_said():
    clients = [client("notebook"), client("client4711", 2, 23.44, 1_200_000, (1, 3)), client("<b>")]
    swarm = Swarm(2, clients=clients)
    assert snapshot_of(swarm)["users"][:2] == [
        "used by notebook: 1 session",
        "used by client4711: 2 sessions, 23.4 tokens/s, 1.2 MB of caches, over HTTP 1 text, and 3 wait",
    ]
    assert "4711: 2 sessions, 23.4 tokens/s" in as_html(snapshot_of(swarm))
    saved = as_html(snapshot_of(swarm), lasting=True)
    assert "<div>used by another program: 2 sessions</div><div>used by &lt;b&gt;: 1 session</div>" in saved
    swarm.ended = True
    assert "used by" not in as_html(snapshot_of(swarm)) + as_html(snapshot_of(swarm), lasting=True)


@pytest.mark.parametrize("lasting", [True, False])
def test_of_a_swarm_that_is_over_nobody_misses_blocks(lasting):
    swarm = three()
    swarm.ended = True
    told = as_html(snapshot_of(swarm), lasting=lasting)
    assert "this swarm is over; it had 30 blocks, 540 MB, and 3 workers" in told
    assert "nobody" not in told
    assert "route" not in told
    drawn = base64.b64decode(re.search(r"base64,([^\"]+)", told)[1]).decode()
    assert "#c53030" not in drawn
    assert "nobody" not in drawn
    assert "blocks 0-9: worker0" in drawn  # where they were
    assert "online" not in told
    assert ">gone<" in told


def test_rows_are_in_the_order_of_the_workers_numbers():
    names = ["worker10", "worker2", "worker0", "gpu-b", "gpu-a", "worker1"]
    swarm = Swarm(4, [server(name, (0, 1)) for name in names])
    assert [row["name"] for row in snapshot_of(swarm)["servers"]] == [
        *("gpu-a", "gpu-b", "worker0", "worker1", "worker2", "worker10")
    ]
    told = as_html(snapshot_of(swarm))
    assert told.index(">worker2<") < told.index(">worker10<")


def test_a_worker_that_is_back_has_one_row_where_it_was():
    gone, other, back = server("worker0", state="gone"), server("worker1", (0, 4)), server("worker0", (4, 8))
    assert in_order([gone, other, back]) == [back, other]
    assert in_order([gone, other]) == [gone, other]
    told = as_html(snapshot_of(Swarm(8, [other, gone])))
    assert re.search(r'<tr style="opacity:.6"><td[^>]*>worker0<', told)


def test_it_is_told_whose_blocks_are_pointed_at():
    told = as_html(snapshot_of(three()))
    titles = re.findall(r'<span [^>]*title="([^"]+)"', told)
    assert titles == [
        "blocks 0-9: worker0, on the session&#x27;s route",
        "blocks 20-21: worker0, on the session&#x27;s route",
        "blocks 22-29: worker1, on the session&#x27;s route",
        "blocks 10-19: nobody",
    ]


def test_the_form_on_paper():
    told = as_html(snapshot_of(three()))
    assert "30 blocks, 540 MB; 3 workers: 2 online, 1 gone; nobody has blocks 10-19" in told
    assert "session 4711.3: recovering, 57 tokens, 23.4 tokens/s" in told
    assert "route: worker0 0-9 → worker2 10-19 → worker0 20-21 → worker1 22-29" in told
    assert "1.2 MB of 50.0 MB" in told
    assert "300 B</td>" in told
    clock = time.strftime("%H:%M:%S", time.localtime(1763812345.12))
    assert f"{clock}  worker2, which had blocks 10-19, is gone: WorkerLost: &lt;killed&gt;" in told
    assert "<script" not in told
    assert "<svg" not in told  # which a page that is not trusted would not have
    drawn = base64.b64decode(re.search(r"base64,([^\"]+)", told)[1]).decode()
    assert "worker2" in drawn


def test_where_nobody_watches_it_is_the_same_each_time():
    swarm = three()
    told = "session {} goes on by worker0 (blocks 10-19): 9 steps again, {}"
    swarm.told["log"].append([1763812345.3, told.format("4711.3", "21.4 ms")])
    first = as_html(snapshot_of(swarm), lasting=True)
    swarm.tell(session={"id": "9.9", "tokens": 57, "rate": 1.0, "state": "recovering"})
    swarm.told["servers"][0].update(cache=5, sessions=2, steps=3)
    swarm.told["log"][0][0] += 1000
    swarm.told["log"][1] = [1763812399.3, told.format("9.9", "1.02 s")]
    assert as_html(snapshot_of(swarm), lasting=True) == first
    assert "session goes on by worker0 (blocks 10-19): 9 steps again\n" in f"{first}\n".replace("</pre>", "\n")
    assert "57 tokens" in first
    assert "WorkerLost" in first


def test_a_swarm_of_many_is_a_picture_of_some_kilobytes():
    assert len(as_html(snapshot_of(large()))) < 60_000
    assert "session 1.1: idle, 1 token<" in as_html(snapshot_of(large()))


# --- the live view --------------------------------------------------------------------------------


@pytest.fixture
def shown():
    swarm = three()
    view = MapView(swarm)
    published = []
    view.observe(lambda change: published.append(change["new"]), "snapshot")
    yield swarm, view, published
    view.close()


def look(view):
    view.receive({"press": "looking"})
    wait_until(lambda: view.looking)


def test_nothing_is_published_while_nobody_looks(shown):
    swarm, view, published = shown
    before = swarm.looks
    for tokens in range(100):
        swarm.tell(session={"id": "1", "tokens": tokens, "rate": 1.0, "state": "writing"})
    time.sleep(0.3)
    assert swarm.looks == before
    assert not published
    look(view)
    wait_until(lambda: published)
    assert published[-1]["session"]["tokens"] == 99


def test_what_is_news_is_published_at_most_ten_times_a_second_and_what_is_none_is_not(shown):
    swarm, view, published = shown
    look(view)
    end = time.monotonic() + 1.5
    tokens = 0
    while time.monotonic() < end:
        tokens += 1
        swarm.tell(session={"id": "1", "tokens": tokens, "rate": 1.0, "state": "writing"})
        time.sleep(0.001)
    wait_until(lambda: published and published[-1]["session"]["tokens"] == tokens)
    assert 3 < len(published) <= 17
    count = len(published)
    swarm.tell()
    look(view)
    time.sleep(0.4)
    assert len(published) == count


def test_who_has_said_that_somebody_looks_says_so_again(shown, monkeypatch):
    _, view, _ = shown
    monkeypatch.setattr("nbdist.views.widgets.view._LOOKING_SECONDS", 0.1)
    looked, heard = view.looked, []
    view.looked = lambda: heard.append(looked())
    view.receive({"press": "looking"})
    wait_until(lambda: heard)  # `looking` may be over already
    wait_until(lambda: not view.looking)


def test_a_page_that_asks_whether_it_is_heard_presses_nothing(shown, monkeypatch):
    _, view, _ = shown
    sent = []
    view.send = sent.append
    monkeypatch.setattr(view, "press", lambda message: pytest.fail(f"pressed: {message}"))
    view.notice = "an error before"
    view.receive({"number": 1})
    assert sent == [{"received": 1}]
    assert view.notice == "an error before"


def test_killing(shown):
    swarm, view, _ = shown
    sent = []
    view.send = sent.append
    view.receive({"press": "kill", "worker": "worker1", "number": 7})
    assert sent == [{"received": 7}]
    wait_until(lambda: swarm.killed == ["worker1"])
    for message, told in [
        ({"press": "kill", "worker": "worker9"}, "there is no 'worker9'"),
        ({"press": "sing", "worker": "worker1"}, "there is no button 'sing'"),
    ]:
        view.receive({**message, "number": 8})
        wait_until(lambda told=told: told in view.notice)
    assert swarm.killed == ["worker1"]


def test_a_press_does_not_wait_for_the_one_before(shown):
    swarm, view, _ = shown
    names = []

    def kill(name):
        names.append(name)
        if name == "worker0":
            time.sleep(5)

    swarm.kill = kill
    view.receive({"press": "kill", "worker": "worker0", "number": 1})
    view.receive({"press": "kill", "worker": "worker1", "number": 2})
    wait_until(lambda: set(names) == {"worker0", "worker1"})


def test_a_view_keeps_no_swarm_alive_and_shows_how_it_was():
    swarm = three()
    view = MapView(swarm)
    look(view)
    known = weakref.ref(swarm)
    del swarm
    gc.collect()
    wait_until(lambda: known() is None)  # threads that look at it may hold it for a moment
    wait_until(lambda: view.snapshot["over"])
    assert view.snapshot["count"] == 30
    view.receive({"press": "kill", "worker": "worker0", "number": 1})
    wait_until(lambda: "is over" in view.notice)
    view.close()


def test_when_a_swarm_ends_its_view_says_so_and_is_closed_though_nobody_looks(shown):
    swarm, view, published = shown
    swarm.ended = True
    swarm.tell()
    wait_until(lambda: view.comm is None)
    assert published[-1]["over"]
    assert not swarm.listeners
    view.receive({"press": "kill", "worker": "worker0", "number": 1})
    wait_until(lambda: "this swarm is over" in view.notice)
    assert not swarm.killed


def test_when_the_cluster_is_to_end_the_view_shows_how_the_swarm_was(shown):
    swarm, view, published = shown
    swarm.told["servers"][0]["steps"] = 99  # nobody looked since
    view.leave()
    assert view.comm is None
    assert published[-1]["over"]
    assert published[-1]["servers"][0]["steps"] == 99
    swarm.tell(servers=[server("worker0", state="gone")])  # which the workers' ends bring about
    assert view.look()["servers"][0]["blocks"] == [[0, 10], [20, 22]]


def test_a_view_that_is_closed_is_told_nothing(shown):
    swarm, view, _ = shown
    assert len(swarm.listeners) == 1
    view.close()
    view.close()
    assert not swarm.listeners
    assert not view.looking


def test_a_snapshot_is_json(shown):
    assert json.loads(json.dumps(shown[1].snapshot))["servers"][2]["state"] == "gone"


def test_a_view_that_is_gone_when_its_news_is_read_stops_nothing(shown):
    for _ in range(20):
        view = MapView(three())
        look(view)
        view.close()
        View.changed(view)
        del view
        gc.collect()
    swarm, view, published = shown
    look(view)
    swarm.tell(count=31)
    wait_until(lambda: published and published[-1]["count"] == 31)


# --- in a kernel ----------------------------------------------------------------------------------

SWARM = f"exec(open({swarm_double.__file__!r}).read())\nsw = three()"


@pytest.mark.parametrize("watched", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_swarm_as_the_value_of_a_cell(watched):
    with Notebook(watched=watched) as notebook:
        notebook.run(SWARM)
        for _ in range(2):
            told = notebook.run("sw").value
            assert told["text/plain"] == "<Swarm of 30 blocks>"
            assert "nobody has blocks 10-19" in told["text/html"]
            assert (WIDGET in told) == watched
            assert ("tokens/s" in told["text/html"]) == watched
        notebook.run("%unload_ext nbdist")
        assert set(notebook.run("sw").value) == {"text/plain"}
        notebook.run("%load_ext nbdist")
        assert "text/html" in notebook.run("sw").value
        assert notebook.run("'transformers' in __import__('sys').modules").result == "False"


def test_a_swarm_that_is_over_is_a_picture_and_so_is_its_view_when_the_cluster_is_shut_down():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 1 --backend none\n" + SWARM)
        shown = notebook.run("sw")
        model = shown.value[WIDGET]["model_id"]
        notebook.run("%dist_shutdown")
        pictures = [
            told["data"]["text/html"] for told in shown.of("update_display_data") if "text/html" in told["data"]
        ]
        assert "this swarm is over" in pictures[-1]
        assert "nobody has" not in pictures[-1]
        notebook.until(lambda: any(each["msg_type"] == "comm_close" for each in notebook.comms))
        assert model in [each["content"]["comm_id"] for each in notebook.comms if each["msg_type"] == "comm_close"]
        told = notebook.run("sw.ended = True\nsw").value
        assert WIDGET not in told
        assert "this swarm is over" in told["text/html"]
