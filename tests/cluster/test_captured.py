"""`%%capture` and `redirect_stdout` in the notebook: they take what workers put out, as a cell's own output."""

import pytest
from helpers.notebook.frontend import Notebook

SAY = "import sys; print('said', 1); print('oh', file=sys.stderr)"


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none -t 60")
        notebook.run(
            "import contextlib, io\nfrom nbdist import Cluster\nfrom IPython.utils.capture import capture_output"
        )
        yield notebook


def test_capture_takes_text_displays_and_results(notebook):
    cell = notebook.run(f"%%capture taken\n%%remote\n{SAY}\ndisplay({{'text/plain': 'shown'}}, raw=True)")
    assert (cell.stdout, cell.stderr, cell.displays) == ("", "", [])
    assert notebook.run("taken.stdout, taken.stderr").result == (
        "('[worker0,1] said 1\\n[worker0,1]\\n', '[worker0,1] oh\\n')"
    )
    assert notebook.run("[output.data for output in taken.outputs]").result == "[{'text/plain': 'shown'}]"
    cell = notebook.run("%%capture taken\n%%remote 0\n1 + 1")
    assert cell.result is None
    assert notebook.run("[output.data for output in taken.outputs]").result == "[{'text/plain': '2'}]"


def test_a_stream_that_is_not_captured_is_shown(notebook):
    cell = notebook.run(f"%%capture --no-stderr taken\n%%remote\n{SAY}")
    assert (cell.stdout, cell.stderr) == ("", "[worker0,1] oh\n")
    assert notebook.run("taken.stdout").result == "'[worker0,1] said 1\\n'"


def test_redirect_stdout_takes_it_whole(notebook):
    code = "for i in range(5000): print(i)\\nfor i in range(3): print(i, end='\\\\r', flush=True)"
    cell = notebook.run(
        "with contextlib.redirect_stdout(io.StringIO()) as taken:\n"
        f'    Cluster.current.execute("{code}")\n'
        "print('after')"
    )
    assert cell.stdout == "after\n"
    assert cell.displays == []  # the bar
    lines = "[f'[worker0,1] {i}' for i in [*range(5000), 2]]"
    assert notebook.run(f"taken.getvalue().splitlines() == {lines}").result == "True"


def test_a_worker_that_wipes_its_output_takes_back_no_text(notebook):
    code = "from IPython.display import clear_output; print('one'); clear_output(); print('two')"
    notebook.run(f"%%capture taken\n%%remote\n{code}")
    assert notebook.run("taken.stdout.replace('\\x1b[2K\\r', '')").result == ("'[worker0,1] one\\n[worker0,1] two\\n'")


def test_a_file_that_was_closed_takes_nothing(notebook):
    cell = notebook.run(
        "with io.StringIO() as taken, contextlib.redirect_stdout(taken):\n"
        "    handle = Cluster.current.execute('import time; time.sleep(0.5); print(rank)', '0', block=False)\n"
        "handle.wait()"
    )
    assert cell.stdout == "0\n"


def test_what_a_called_function_prints(notebook):
    notebook.run("def say(n):\n    print('called', n)")
    cell = notebook.run("%%capture taken\nrpc.rpc_sync('worker1', say, args=(7,))")
    assert cell.stdout == ""
    assert notebook.run("taken.stdout").result == "'[worker1] called 7\\n'"


def test_a_failure_is_told_below_the_cell(notebook):
    cell = notebook.send(
        "%%capture taken\n%%remote\nimport time\nif rank: 1 / 0\nprint('on')\nwhile not time.sleep(0.01): pass"
    )
    notebook.until(lambda: "[worker1] ZeroDivisionError" in cell.stderr)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.stdout == ""


def test_input_is_asked_for(notebook):
    notebook.answers.append(lambda request: request["prompt"].upper())
    cell = notebook.run("%%capture taken\n%%remote 0\nprint(input('name? '))")
    assert cell.stdout == ""
    assert notebook.run("taken.stdout").result == "'NAME? \\n'"
