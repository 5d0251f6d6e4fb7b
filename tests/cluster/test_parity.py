"""A cell on a worker gives the messages that it gives in a local kernel.

Each cell runs in a plain kernel, and behind ``%%remote 0`` in a notebook that has a worker. What a front end gets is
compared message by message, but for what cannot be the same twice: ids, addresses, times.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from unittest import mock

import pytest
from helpers.notebook.frontend import Executed, Notebook

for needed in ("ipywidgets", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

_ID = re.compile(r"\b(IPY_MODEL_)?([0-9a-f]{32})\b")
_NEVER_TWICE = [
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),  # where an object lies
    (re.compile(r"(ipykernel_\d+/)?\b\d{5,}\.py"), "….py"),  # the file of a cell: it has the pid, and a hash
    (re.compile(r"(\\u001b\[32m      1\\u001b\[39m) .*?\\n"), r"\1 …\\n"),  # the first line of a cell, see `Pair.run`
    (re.compile(r"[\d.]+(e[+-]?\d+)? ?(ns|μs|µs|us|ms|s)\b"), "… s"),
]


class Pair:
    """A plain kernel, and a notebook with a worker."""

    def __init__(self) -> None:
        with mock.patch.dict(os.environ):
            os.environ.pop("PYTEST_CURRENT_TEST", None)  # a kernel that sees it does not watch file descriptors
            self.plain = Notebook(load=False)
            self.notebook = Notebook()
        self.both = (self.plain, self.notebook)
        self.notebook.run("%dist_init -n 1 --backend none")
        self.notebook.run("__import__('nbdist.cluster.kernels.comms', fromlist=['_'])._HANDLED_WITHIN = 60")
        self._counts = dict.fromkeys(self.both, 0)
        for notebook in self.both:
            self.only(notebook, "None")
        self.ids: tuple[dict, dict] = {}, {}

    def close(self) -> None:
        self.plain.close()
        self.notebook.run("%dist_shutdown")
        self.notebook.close()

    def _count(self, notebook: Notebook, cell: Executed) -> None:
        self._counts[notebook] = cell.reply["content"]["execution_count"]

    def only(self, notebook: Notebook, code: str) -> Executed:
        """Run a cell in one of them."""
        cell = notebook.run(code)
        self._count(notebook, cell)
        return cell

    def run(self, code: str, answers: tuple[str, ...] = (), **options) -> tuple[Executed, Executed]:
        """Run a cell in both, under one number, and wait for its end. The two of them: the local one, the remote one.

        What they ask for is answered with ``answers``; how they ask is in their ``prompts``.
        """
        while len(set(self._counts.values())) > 1:
            self.only(min(self._counts, key=self._counts.__getitem__), "None")
        cells = []
        # Lines are counted from the top, where the magic is.
        local = code if code.startswith("%%") else f"# local\n{code}"
        for notebook, text in zip(self.both, (local, f"%%remote 0\n{code}"), strict=True):
            prompts: list[dict] = []
            notebook.answers = [_answer(text, prompts) for text in answers]
            cells.append(notebook.send(text, **options))
            cells[-1].prompts = prompts
        for notebook, cell in zip(self.both, cells, strict=True):
            notebook.finish(cell)
            self._count(notebook, cell)
        return cells[0], cells[1]

    def until(self, cells: tuple[Executed, Executed], condition, what: str) -> None:
        """Wait for what may come after the end of the cells."""
        for notebook, cell in zip(self.both, cells, strict=True):
            notebook.until(lambda cell=cell: condition(cell), what=f"{what} in {cell}")

    def say(self, comm_ids: tuple[str, str], data: dict, buffers=()) -> tuple[Executed, Executed]:
        """Say something on a comm of both; what came of it."""
        said = [self.tell(notebook, id, data, buffers) for notebook, id in zip(self.both, comm_ids, strict=True)]
        self.until((said[0], said[1]), lambda cell: cell.idle, "the end")
        return said[0], said[1]

    @staticmethod
    def tell(notebook: Notebook, comm_id: str, data: dict, buffers=()) -> Executed:
        """Say something on a comm, as the front end does when a user moves a slider."""
        session = notebook.client.session
        message = session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        said = notebook.cells[message["header"]["msg_id"]] = Executed(message["header"]["msg_id"])
        session.send(notebook.client.shell_channel.socket, message, buffers=list(buffers))
        return said

    def same(self, cells: tuple[Executed, Executed], *, replies: bool = True) -> list:
        """Hold the two against each other; what both have said. Ids stay the same from one cell to the next."""
        local, remote = (messages(cell, ids) for cell, ids in zip(cells, self.ids, strict=True))
        assert without_worker(remote) == local
        if replies:
            assert without_worker(reply(cells[1])) == reply(cells[0])
        return local


@pytest.fixture(scope="module")
def kernels() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.close()


@pytest.fixture
def pair(kernels) -> Pair:
    kernels.ids = {}, {}
    return kernels


def _answer(text: str, prompts: list):
    def reply(request):
        prompts.append(request)
        return text

    return reply


# -- what is compared ---------------------------------------------------------------------------


def messages(cell: Executed, ids: dict) -> list:
    """What a front end gets for a cell, without what cannot be the same twice.

    Of what is not in a fixed order even locally, an order is made: each stream is flushed when its time has come, so
    the text between two other messages is put together, by stream. An error comes last: a cell on workers fails when
    all of them have ended.
    """
    found: list = []
    errors: list = []
    streams: dict[str, str] = {}

    def end_streams() -> None:
        found.extend(["stream", name, streams[name]] for name in sorted(streams))
        streams.clear()

    for message in cell.messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            streams[content["name"]] = streams.get(content["name"], "") + content["text"]
        elif kind == "error":
            errors.append(["error", content])
        elif kind not in ("status", "execute_input"):
            end_streams()
            buffers = [bytes(buffer).hex() for buffer in message.get("buffers") or ()]
            found.append([kind, content, message["metadata"], buffers])
    end_streams()
    text = json.dumps(found + errors, sort_keys=True, ensure_ascii=False).replace(cell.msg_id, "this cell")
    text = _ID.sub(lambda match: (match[1] or "") + ids.setdefault(match[2], f"id{len(ids)}"), text)
    return _without_chance(text)


def reply(cell: Executed) -> dict:
    content = cell.reply["content"]
    kept = ("status", "execution_count", "payload", "ename", "evalue", "traceback")
    return _without_chance(json.dumps({key: content[key] for key in kept if key in content}))


def _without_chance(text: str):
    for pattern, shown in _NEVER_TWICE:
        text = pattern.sub(shown, text)
    return json.loads(text)


def without_worker(said):
    """With frames named as the local kernel names them, and without the line that tells how to debug the worker."""
    text = re.sub(r"In\[\d+\](?=:\d+: \w*Warning)", "/tmp/….py", json.dumps(said, ensure_ascii=False))
    text = text.replace("] on worker0", "]")
    return json.loads(text.replace(f", {json.dumps(HOW_TO_DEBUG)}", ""))


HOW_TO_DEBUG = "To look around where it failed: `%dist_debug worker0`"


# -- cells --------------------------------------------------------------------------------------

CELLS = {
    "print": "print('one')\nprint('two', end='')",
    "print to stderr": "import sys\nprint('out')\nprint('err', file=sys.stderr)",
    "value": "[1, 2, 3]",
    "None": "None",
    "semicolon": "5;",
    "comment": "# nothing",
    "value behind output": "print('first')\n'second'",
    "last value": "11",
    "underscore": "_ + 1",
    "Out": "Out[max(Out)], In[-1].splitlines()[-1]",
    "object": "class Mine:\n    pass\n\nMine, Mine(), __name__",
    "unicode": "print('Grüße, 世界 🌍')\n'é\\u2028\\x00'",
    "long line": "print('x' * 100_000)",
    "many lines": "for i in range(2000):\n    print(i)",
    "carriage return": "print('one\\rtwo', end='')\n5",
    "tensor": "import torch\ntorch.arange(3)",
    "HTML": "from IPython.display import HTML\nHTML('<b>bold</b>')",
    "display": "print('a')\ndisplay(HTML('<b>bold</b>'), 5, {'a': 1})\nprint('b')\ndisplay(2)\n3",
    "display, other kinds": (
        "from IPython.display import JSON, Latex, Markdown\n"
        "display(Markdown('# x'), Latex('$y$'), JSON({'a': 1}))\n"
        "display({'text/plain': 'p', 'application/json': [1]}, raw=True, metadata={'text/plain': {'m': 1}})"
    ),
    "representations": (
        "class Shown:\n    def _repr_html_(self):\n        return '<i>x</i>'\n"
        "    def _repr_latex_(self):\n        return '$x$'\n\nShown()"
    ),
    "display updated": (
        "handle = display('begin', display_id='mine')\nhandle.update('middle')\ndisplay(1, display_id=True)"
    ),
    "display updated from another cell": "handle.update('end')",
    "clear_output": (
        "from IPython.display import clear_output\n"
        "for i in range(3):\n    clear_output(wait=True)\n    print('step', i)\n    display(i)\n"
        "clear_output()\nprint('here')"
    ),
    "plot": "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])",
    "two axes": "figure, axes = plt.subplots(1, 2)\naxes[0].bar([1, 2], [3, 4])\naxes[1].plot([1, 4, 2]);",
    "image": (
        "from IPython.display import Image\n"
        "Image(data=b'\\x89PNG\\r\\n\\x1a\\n\\x00\\x00\\x00\\rIHDR' + bytes(9), format='png')"
    ),
    "await": "import asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, 'value')",
    "async generator": (
        "async def count():\n    for i in range(3):\n        yield i\n        await asyncio.sleep(0)\n\n"
        "async for i in count():\n    print(i)\n[i async for i in count()]"
    ),
    "!echo": "word = 'spoken'\n!echo {word} $word\n!exit 3\n_exit_code",
    "!ls": "!ls /\nlines = !printf 'a\\nb\\n'\nlines",
    "%%bash": "%%bash\necho from bash\necho err >&2",
    "%timeit": "%timeit -n1 -r1 None",
    "%%time": "%%time\ntotal = sum(range(10))\ntotal",
    "%%capture": "%%capture kept\nprint('hidden')\ndisplay(1)",
    "captured": "kept.show()\nkept.stdout",
    "%who_ls": "word = 'x'\n%who_ls str",
    "tqdm": (
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(3), bar_format='{l_bar}{bar}|', mininterval=0, miniters=1):\n    pass"
    ),
    "logging": "import logging\nlogging.warning('logged')\nlogging.getLogger('a').error('also')",
    "warnings": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "help of a builtin": "len?",
    "source": "def documented():\n    'Says so.'\n\ndocumented??",
    "%pdoc": "%pdoc documented",
    "help()": "help(documented)",
    "next input": "get_ipython().set_next_input('x = 1')",
    "error shown and survived": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    get_ipython().showtraceback()\ndisplay('and on')"
    ),
    "traceback printed": "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()",
    "subprocess captured": "import subprocess\nsubprocess.run(['echo', 'x'], capture_output=True).stdout",
}


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_gives_what_it_gives_locally(pair, name):
    cells = pair.run(CELLS[name])
    pair.same(cells)
    assert cells[0].reply["content"]["status"] == "ok"
    asked = [cell.of("execute_input")[0] for cell in cells]
    assert asked[1]["execution_count"] == asked[0]["execution_count"]


ERRORS = {
    "ZeroDivisionError": "def divide(x):\n    return 1 / x\n\ndivide(0)",
    "output before": "print('before')\ndisplay(1)\n1 / 0",
    "own class": "class Odd(Exception):\n    pass\n\nraise Odd('strange', 7)",
    "from": "try:\n    divide(0)\nexcept ZeroDivisionError as error:\n    raise RuntimeError('outer') from error",
    "while handling": "try:\n    {}['x']\nexcept KeyError:\n    int('y')",
    "KeyError": "{}['k']",
    "OSError": "open('/nonexistent/file')",
    "UnicodeDecodeError": "b'\\xff'.decode()",
    "NameError": "undefined_name",
    "ImportError": "import nonexistent_module",
    "without text": "raise ValueError",
    "note": "error = ValueError('v')\nerror.add_note('a note')\nraise error",
    "in a library": "import json\njson.loads('{')",
    "SyntaxError at run time": "eval('1 +')",
    "sys.exit": "import sys\nsys.exit()",
    "sys.exit with a status": "sys.exit(3)",
    "after await": "async def bad():\n    await asyncio.sleep(0)\n    raise LookupError('async')\n\nawait bad()",
    "shown before": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    get_ipython().showtraceback()\nint('x')",
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_the_local_one_but_for_the_worker_s_name(pair, name):
    cells = pair.run(ERRORS[name])
    said = pair.same(cells)
    assert said[-1][0] == "error"
    assert re.search(r"In\[\d+\] on worker0", cells[1].traceback) or "In[" not in cells[0].traceback


def test_a_syntax_error_is_found_before_anything_is_sent_and_is_no_worker_s(pair):
    cells = pair.run("1 +* 2\nprint(")
    pair.same(cells)
    assert "on worker0" not in cells[1].traceback


# Where a cell on a worker deliberately gives more: where it was interrupted; and an `error` message, without which
# tools pass a broken notebook.


def test_an_interrupt_says_where_it_came(pair):
    local, remote = pair.run("raise KeyboardInterrupt")
    assert (reply(local)["ename"], reply(local)["evalue"]) == ("KeyboardInterrupt", "")
    assert reply(remote)["evalue"] == f"stopped in raise KeyboardInterrupt, {remote.name}:2"


def test_an_exception_group_has_an_error_message_which_it_does_not_have_locally(pair):
    local, remote = pair.run("raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])")
    *said, error = without_worker(messages(remote, {}))
    assert said == messages(local, {})
    assert error[0] == "error"
    assert reply(remote)["ename"] == reply(local)["ename"] == "ExceptionGroup"
    assert reply(remote)["evalue"] == reply(local)["evalue"]


def test_a_magic_that_does_not_exist_is_an_error_message_too(pair):
    local, remote = pair.run("%no_such_magic")
    *said, error = messages(remote, {})
    assert said == messages(local, {})
    assert (error[0], error[1]["ename"]) == ("error", reply(local)["ename"])


def test_an_object_that_cannot_be_shown_has_its_error_in_the_reply_too(pair):
    local, remote = pair.run("class Bad:\n    def __repr__(self):\n        raise ValueError('no repr')\n\nBad()")
    assert without_worker(messages(remote, {})) == messages(local, {})
    assert (reply(local)["ename"], reply(remote)["ename"]) == ("NoneType", "ValueError")


def test_endless_recursion_differs_in_how_deep_it_came(pair):
    cells = pair.run(
        "import inspect\nimport sys\nlimit = sys.getrecursionlimit()\n"
        "sys.setrecursionlimit(len(inspect.stack(0)) + 25)\n\n"
        "def again(n):\n    return again(n + 1)\n\n"
        "try:\n    again(0)\nfinally:\n    sys.setrecursionlimit(limit)"
    )
    shown = [list(dict.fromkeys(messages(cell, {})[-1][1]["traceback"])) for cell in cells]
    assert without_worker(shown[1]) == shown[0]
    assert "RecursionError" in shown[0][-1]


# -- input --------------------------------------------------------------------------------------


def test_input_and_getpass_are_asked_of_the_user(pair):
    code = (
        "from getpass import getpass\nname = input('Name? ')\nword = getpass('Password: ')\nprint(name)\n(name, word)"
    )
    cells = pair.run(code, answers=("Ada", "secret"))
    pair.same(cells)
    assert cells[1].prompts == cells[0].prompts
    assert [prompt["password"] for prompt in cells[1].prompts] == [False, True]
    assert cells[1].result == "('Ada', 'secret')"


def test_input_fails_where_nobody_can_be_asked(pair):
    cells = pair.run("input('Name? ')", allow_stdin=False)
    pair.same(cells)
    assert cells[1].error["ename"] == "StdinNotImplementedError"


# -- output that is not of the cell's main thread -----------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.system('echo to the descriptor')",
        "import subprocess\nsubprocess.run(['echo', 'to the descriptor']).returncode",
        "import os\nos.write(1, b'to the descriptor\\n')",
    ],
)
def test_output_at_the_level_of_file_descriptors(pair, code):
    cells = pair.run(code)
    pair.until(cells, lambda cell: "to the descriptor\n" in cell.stdout, "the text")
    assert sorted(messages(cells[1], {})) == sorted(messages(cells[0], {}))


def test_output_after_the_end_of_its_cell(pair, tmp_path):
    path = tmp_path / "opened when the thread shall go on"
    os.mkfifo(path)
    cells = pair.run(
        "import threading\n\n"
        "def late():\n    print('at once')\n"
        f"    open({str(path)!r}).close()\n    print('late')\n    display('later')\n\n"
        "thread = threading.Thread(target=late)\nthread.start()"
    )
    # A worker's kernel may be asked for completions in the meantime: its output is not theirs.
    assert "thread" in pair.notebook.complete("%%remote 0\nthr")["matches"]
    with open(path, "w"):
        pair.until(cells, lambda cell: cell.displays, "late output")
        pair.same(cells)
    assert cells[1].stdout == "at once\nlate\n"


def test_output_of_a_thread_while_another_cell_runs(pair):
    first = pair.run(
        "more = threading.Event()\n\ndef late():\n    more.wait()\n    print('late')\n\n"
        "thread = threading.Thread(target=late)\nthread.start()"
    )
    second = pair.run("more.set()\nthread.join()\nprint('second')")
    pair.same(first)
    pair.same(second)
    assert "late\n" in first[1].stdout + second[1].stdout


def test_output_of_a_task(pair):
    first = pair.run(
        "async def soon():\n    await asyncio.sleep(0)\n    print('in the task')\n\ntask = asyncio.create_task(soon())"
    )
    second = pair.run("await task")
    pair.until(first, lambda cell: cell.stdout == "in the task\n", "the task's output")
    pair.same(first)
    pair.same(second)


# -- widgets ------------------------------------------------------------------------------------


def opened(cells: tuple[Executed, ...], model: str) -> tuple[str, ...]:
    """The ids of the comms of a widget's model, of which each cell has made one."""
    return tuple(
        message["comm_id"]
        for cell in cells
        for message in cell.of("comm_open")
        if message["data"]["state"].get("_model_name") == model
    )


def updates(cell: Executed) -> list[dict]:
    return [message["data"]["state"] for message in cell.of("comm_msg")]


def test_a_slider_works_in_both_directions(pair):
    made = pair.run(
        "import ipywidgets\n"
        "slider = ipywidgets.IntSlider(3, 0, 10)\n"
        "slider.observe(lambda change: print('now', change.new), 'value')\n"
        "slider"
    )
    pair.same(made)
    slider = opened(made, "IntSliderModel")
    for notebook, id in zip(pair.both, slider, strict=True):
        reply = notebook.client.comm_info(reply=True, timeout=20)
        assert id in reply["content"]["comms"]

    # The user moves it: its observer on the worker prints, under the front end's message.
    said = pair.say(slider, {"method": "update", "state": {"value": 7}, "buffer_paths": []})
    pair.same(said, replies=False)
    assert said[1].stdout == "now 7\n"
    assert {"value": 7} in updates(said[1])
    assert pair.run("slider.value")[1].result == "7"

    # A later cell moves it: the front end learns of it.
    moved = pair.run("slider.value = 5")
    pair.same(moved)
    assert updates(moved[1]) == [{"value": 5}]

    # The front end asks for its state, as after a reload of the page.
    asked = pair.say(slider, {"method": "request_state"})
    pair.same(asked, replies=False)
    assert updates(asked[1])[0]["value"] == 5

    closed = pair.run("slider.close()")
    pair.same(closed)
    assert [message["comm_id"] for message in closed[1].of("comm_close")] == [slider[1]]
    assert slider[1] not in pair.notebook.client.comm_info(reply=True, timeout=20)["content"]["comms"]


def test_a_widget_s_handler_may_display_and_fail(pair):
    made = pair.run(
        "def pressed(button):\n    print('pressed')\n    display('and more')\n    1 / 0\n\n"
        "button = ipywidgets.Button(description='Do')\nbutton.on_click(pressed)\nbutton"
    )
    pair.same(made)
    said = pair.say(opened(made, "ButtonModel"), {"method": "custom", "content": {"event": "click"}})
    pair.until(said, lambda cell: cell.error, "the error")  # a busy machine may take longer than the notebook waits
    pair.same(said, replies=False)
    assert "on worker0" in said[1].traceback


def test_a_widget_moved_by_a_thread_after_its_cell(pair, tmp_path):
    path = tmp_path / "opened when the thread shall go on"
    os.mkfifo(path)
    made = pair.run(
        "bar = ipywidgets.IntProgress()\n\n"
        f"def work():\n    open({str(path)!r}).close()\n    bar.value = 50\n    print('done')\n\n"
        "thread = threading.Thread(target=work)\nthread.start()\nbar"
    )
    with open(path, "w"):
        pair.until(made, lambda cell: cell.stdout, "the end of the work")
    pair.same(made)
    assert updates(made[1]) == [{"value": 50}]


def test_a_widget_of_a_worker_that_computes_is_heard_when_it_has_ended(pair, tmp_path):
    made = pair.only(
        pair.notebook,
        "%%remote 0\nslider = ipywidgets.IntSlider()\n"
        "slider.observe(lambda change: print('now', change.new), 'value')\nslider",
    )
    (slider,) = opened((made,), "IntSliderModel")
    path = tmp_path / "opened when it shall end"
    os.mkfifo(path)
    pair.only(pair.notebook, f"%%remote 0 -a -o later\nopen({str(path)!r}).close()")
    said = pair.tell(pair.notebook, slider, {"method": "update", "state": {"value": 7}, "buffer_paths": []})
    pair.notebook.until(lambda: said.idle, what="the end of what the notebook itself has to do")
    assert pair.only(pair.notebook, "1 + 1").result == "2"  # it does not wait for the worker
    assert said.stdout == ""
    with open(path, "w"):
        pair.notebook.until(lambda: said.stdout == "now 7\n", what="the observer's output")


def test_an_output_widget_captures_what_belongs_to_its_cell(pair):
    made = pair.run("out = ipywidgets.Output()\nout")
    pair.same(made)
    filled = pair.run("with out:\n    print('captured')\n    display(1)\nprint('not')")
    pair.same(filled)
    # The front end is told to capture what has that cell as its parent: the notebook's, which it knows.
    assert [state["msg_id"] for state in updates(filled[1])] == [filled[1].msg_id, ""]
    failed = pair.run("with out:\n    1 / 0\nprint('on')")
    assert [cell.reply["content"]["status"] for cell in failed] == ["ok", "ok"]
    pair.same(failed)
    appended = pair.run("out.append_stdout('more')\nout.outputs")
    pair.same(appended)


def test_an_output_widget_captures_what_a_handler_puts_out(pair):
    made = pair.run(
        "out = ipywidgets.Output()\nbutton = ipywidgets.Button()\n\n"
        "@button.on_click\ndef pressed(button):\n    with out:\n        print('pressed')\n\n"
        "display(button, out)"
    )
    said = pair.say(opened(made, "ButtonModel"), {"method": "custom", "content": {"event": "click"}})
    pair.same(said, replies=False)
    assert [state["msg_id"] for state in updates(said[1])] == [said[1].msg_id, ""]


def test_binary_buffers_go_both_ways(pair):
    made = pair.run("picture = ipywidgets.Image(value=b'\\x00\\x01\\xff' * 100)\npicture")
    said = pair.same(made)
    buffers = [message[3] for message in said if message[0] == "comm_open" and message[3]]
    assert buffers == [[(b"\x00\x01\xff" * 100).hex()]]
    data = {"method": "update", "state": {}, "buffer_paths": [["value"]]}
    pair.same(pair.say(opened(made, "ImageModel"), data, [b"\xfe\x00" * 50]), replies=False)
    assert pair.run("picture.value == b'\\xfe\\x00' * 50")[1].result == "True"


def test_interact_and_a_bar_of_tqdm(pair):
    pair.same(pair.run("ipywidgets.interact(lambda x: x, x=(0, 4));"))
    pair.same(
        pair.run(
            "from tqdm.notebook import tqdm as bars\n"
            "for _ in bars(range(3), bar_format='{l_bar}{bar}|', mininterval=0, miniters=1):\n    pass"
        )
    )


# -- the end of a worker's shell ----------------------------------------------------------------


def test_exit_ends_neither_the_worker_nor_the_notebook(pair):
    cell = pair.notebook.run("%%remote 0\nexit", check=False)
    assert cell.error["ename"] == "UsageError"
    assert cell.reply["content"].get("payload", []) == []
    assert pair.only(pair.notebook, "%remote 0 1 + 1").result == "2"
