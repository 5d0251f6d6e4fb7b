"""The stop button of a notebook that serves over HTTP: which texts of clients it ends, and which not."""

import time

import openai
import pytest
from helpers.notebook.frontend import Notebook
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

SERVE = """
%dist_init -n 1 --backend none --preload nbdist.swarm
import nbdist
from helpers.models import tiny_tokenizer
model = tiny_tokenizer.model(2000)
model.generation_config.eos_token_id = 10**6  # no text ends before its last token
sw = nbdist.swarm.serve(model, workers=[0])
endpoint = sw.http(tokenizer=tiny_tokenizer.make(), name="tiny")
print(endpoint.url, endpoint.key)
"""


@pytest.fixture(scope="module")
def serving():
    with Notebook(env=python_path(TESTS)) as notebook:
        url, key = notebook.run(SERVE).stdout.split()[-2:]
        yield notebook, openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        notebook.run("%dist_shutdown")


def stream(client):
    """A stream that has begun, of a text that takes some seconds."""
    found = client.completions.create(model="tiny", prompt="x", max_tokens=1900, temperature=0, stream=True)
    next(found)
    return found


def stop(notebook, cell):
    """Press Stop when the cell runs."""
    notebook.until(lambda: "it runs" in cell.stdout)
    time.sleep(0.3)  # nothing tells that the cell has come to its last line
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error["ename"] == "KeyboardInterrupt"


def test_stop_ends_the_streams_of_a_cell_that_waits_for_clients(serving):
    notebook, client = serving
    cell = notebook.send("print('it runs', flush=True)\nendpoint.wait()")
    text = stream(client)
    stop(notebook, cell)
    with pytest.raises(openai.APIError, match="the text was interrupted at the server"):
        list(text)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens  # it still serves
    wait_until(lambda: notebook.run("sw.snapshot()['clients']").result == "[]")


def test_stop_of_another_cell_ends_no_stream(serving):
    notebook, client = serving
    cell = notebook.send("import time\nprint('it runs', flush=True)\ntime.sleep(600)")
    text = stream(client)
    stop(notebook, cell)
    assert list(text)[-1].choices[0].finish_reason == "length"
