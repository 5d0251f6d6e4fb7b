"""Places in cells are named by the notebook's numbers, such as In[3]:2, wherever the code runs."""

import pytest
from helpers.notebook.frontend import Notebook

WHERE = """
import sys
from nbdist.code_places import shown_name
def where():
    return shown_name(sys._getframe().f_code.co_filename)
"""
THREAD = """
import threading
def boom():
    1 / 0
thread = threading.Thread(target=boom, name="of mine")
thread.start()
thread.join()
"""


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("from nbdist import rpc\n%dist_init -n 2 --backend none -t 60")
        yield notebook


def test_a_cell_of_a_worker_has_the_number_of_the_notebook(notebook):
    first, second = (notebook.run(f"%%remote 0{WHERE}print(where())") for _ in range(2))
    assert (first.stdout, second.stdout) == (f"{first.name}\n", f"{second.name}\n")
    assert first.name != second.name, "the same text ran twice: the last number counts"


def test_a_cell_of_the_notebook_has_its_number_there_and_where_it_is_sent(notebook):
    typed = notebook.run(WHERE.replace("where", "typed_here"))
    assert notebook.run("typed_here()").result == f"'{typed.name}'"
    assert notebook.run("rpc.rpc_sync('worker1', typed_here)").result == f"'{typed.name}'"
    told = notebook.run("rpc.rpc_sync('worker0', rpc.rpc_sync, ('worker1', typed_here))")
    assert told.result == f"'{typed.name}'"


def test_a_function_of_a_workers_cell_has_its_number_where_it_is_sent(notebook):
    typed = notebook.run(f"%%remote 0{WHERE}")
    sent = notebook.run("%%remote 0\nfrom nbdist import rpc\nprint(rpc.rpc_sync('notebook', where))")
    assert sent.stdout == f"{typed.name}\n"


@pytest.mark.parametrize(
    ("code", "place"),
    [(f"%%remote 0{THREAD}", " on worker0, line 4"), (THREAD.lstrip(), ", line 3")],
    ids=["worker", "notebook"],
)
def test_an_error_that_ends_a_thread_names_the_cell(notebook, code, place):
    cell = notebook.run(code)
    shown = f"Cell {cell.name}{place}, in boom\n"
    notebook.until(lambda: shown in cell.stderr and "ZeroDivisionError: division by zero" in cell.stderr)
    assert "Exception in thread of mine" in cell.stderr
    assert "1 / 0" in cell.stderr
    assert "ipykernel" not in cell.stderr


def test_the_line_that_made_a_node_names_the_cell_of_its_worker(notebook):
    """The notebook has not compiled the text, so only the worker knows the number."""
    program = "def square(x):\n    return x * x"
    typed = notebook.run(f"__import__('nbdist').Cluster.current.execute({program!r}, 0).number")
    notebook.run("import torch\nfrom nbdist import autograd")
    told = notebook.run(
        "x = torch.ones(2, requires_grad=True)\n"
        "with autograd.context(lines=True) as context:\n"
        "    y = rpc.rpc_sync('worker0', eval, ('__import__(\"__main__\").square(x)', {'x': x}))\n"
        "    nodes = autograd.trace(context).nodes\n"
        "[node.line for node in nodes['worker0'] if node.line]"
    )
    assert told.result == f"['In[{typed.result}]:2: return x * x']"
