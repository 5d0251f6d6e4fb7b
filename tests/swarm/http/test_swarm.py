"""A swarm over HTTP, on real workers that are killed: its texts are those of the model in one process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import openai
import pytest
import torch
from helpers.hosts.keepers import Keepers
from helpers.models import tiny_tokenizer
from helpers.suite.python_path import python_path
from helpers.waiting import wait_until

import nbdist
from nbdist.__main__ import main
from nbdist.errors import UsageError
from nbdist.swarm import model_cache, serve
from nbdist.swarm.http.endpoint import Endpoint
from nbdist.swarm.http.limits import Limits


@pytest.fixture
def swarm(three):
    swarm = serve(tiny_tokenizer.model(2000), workers=[0, 1, 2])
    yield swarm
    swarm.close()


@pytest.fixture
def endpoint(swarm):
    endpoint = swarm.http(tokenizer=tiny_tokenizer.make(), name="tiny")
    yield endpoint
    endpoint.close()


def client_of(endpoint):
    return openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)


def test_streams_go_on_with_the_same_texts_when_a_worker_is_killed(swarm, endpoint):
    """Two at once, one of them with random numbers, and several texts each; through two deaths."""
    model = tiny_tokenizer.model(2000)
    alone = Endpoint(model, tiny_tokenizer.make(), "tiny", dict, Limits(1, 8, 600), host="127.0.0.1", port=0, key=True)
    asked = [
        {"temperature": 0, "max_tokens": 60},
        {"temperature": 0.9, "top_p": 0.8, "seed": 7, "n": 2, "max_tokens": 40, "stop": ["never there"]},
    ]
    expected = [client_of(alone).completions.create(model="tiny", prompt="Hello", **each) for each in asked]
    alone.close()
    found = {}

    def write(number, act):
        texts = {}
        stream = client_of(endpoint).completions.create(model="tiny", prompt="Hello", stream=True, **asked[number])
        for count, chunk in enumerate(stream):
            choice = chunk.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            act(count)
        found[number] = [texts[index] for index in sorted(texts)]

    other = threading.Thread(target=write, args=(1, lambda count: swarm.kill(0) if count == 30 else None))
    other.start()
    write(0, lambda count: swarm.kill(1) if count == 10 else None)
    other.join()
    assert found == {number: [choice.text for choice in each.choices] for number, each in enumerate(expected)}
    assert set(swarm.blocks) == {"worker2"}
    with urllib.request.urlopen(f"{endpoint.url.removesuffix('/v1')}/health") as answer:
        assert json.load(answer) == {"status": "ok"}


def test_who_hangs_up_frees_caches_on_the_workers(swarm, endpoint):
    stream = client_of(endpoint).completions.create(model="tiny", prompt="x", max_tokens=1900, stream=True, n=2)
    next(iter(stream))
    assert sum(info.sessions for info in swarm.info().values()) > 0
    stream.close()
    wait_until(lambda: not sum(info.sessions for info in swarm.info().values()))
    assert not swarm.sessions.open()


def test_a_closed_swarm_and_one_without_workers_say_so(swarm, endpoint):
    client = client_of(endpoint)
    for worker in range(3):
        swarm.kill(worker)
    with pytest.raises(openai.InternalServerError, match="no server is left") as found:
        client.completions.create(model="tiny", prompt="x")
    assert (found.value.status_code, found.value.code) == (503, "unavailable")
    swarm.close()
    with pytest.raises(openai.InternalServerError, match="closed"):
        client.completions.create(model="tiny", prompt="x")


def test_max_tokens_that_never_fit_are_the_clients_error(three):
    with contextlib.closing(serve(tiny_tokenizer.model(2000), workers=[0, 1], cache_bytes=20_000)) as swarm:
        endpoint = swarm.http(tokenizer=tiny_tokenizer.make(), name="tiny")
        client = client_of(endpoint)
        with pytest.raises(openai.BadRequestError, match="can never fit") as found:
            client.completions.create(model="tiny", prompt="x", max_tokens=1900)
        assert found.value.param == "max_tokens"
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens <= 2
        endpoint.close()


@pytest.mark.timeout(280)  # less than `cache_timeout`
@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_while_his_text_waits_for_cache_memory_gives_up_his_turn(three, stream):
    room = {"cache_bytes": 2_000_000, "cache_timeout": 300.0}  # for one text of 1900 tokens
    with contextlib.closing(serve(tiny_tokenizer.model(2000), workers=[0, 1], **room)) as swarm:
        endpoint = swarm.http(tokenizer=tiny_tokenizer.make(), name="tiny", at_once=1)
        cache = model_cache.new_cache(swarm.checkpoint.config)
        swarm.session(cache, expected=1900)
        with torch.no_grad():
            swarm.causal_lm()(torch.tensor([[5, 6]]), past_key_values=cache)
        held = [info.cache for info in swarm.info().values()]
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 1900}
        with pytest.raises(openai.APITimeoutError):
            client_of(endpoint).with_options(timeout=2.0).completions.create(**asked, stream=stream)
        wait_until(lambda: endpoint.texts == (0, 0))
        wait_until(lambda: [(info.sessions, info.wanting) for info in swarm.info().values()] == [(1, 0), (1, 0)])
        assert [info.cache for info in swarm.info().values()] == held
        assert set(swarm.states.values()) == {"online"}
        del cache
        assert client_of(endpoint).completions.create(**asked).usage.completion_tokens
        endpoint.close()


def test_its_arguments(swarm):
    tokenizer = tiny_tokenizer.make()
    for wrong in ({"at_once": 0}, {"queue": -1}, {"rate": 0.5}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            swarm.http(tokenizer=tokenizer, **wrong)
    with pytest.raises(UsageError, match="came without a tokenizer: pass one"):
        swarm.http()
    endpoint = swarm.http(tokenizer=tokenizer, at_once=None, queue=None, rate=None, key=False)
    assert repr(endpoint).startswith("<Endpoint of llama at http://127.0.0.1:")
    endpoint.close()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_ctrl_c(tmp_path, ending):
    tiny_tokenizer.model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.make().save_pretrained(tmp_path / "tiny")
    # As a script starts it with `&`: SIGINT is ignored.
    ignoring = ["env", "--ignore-signal=INT"]
    command = [*ignoring, sys.executable, "-m", "nbdist", "swarm", "serve", str(tmp_path / "tiny"), "-n", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = list(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
        url, key = lines[2].split()[-1].rstrip(">"), lines[3].split()[-1]
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens <= 2
        process.send_signal(ending)
        assert process.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].removesuffix("/v1"))))


def test_a_worker_joins_the_command_and_serves(tmp_path):
    tiny_tokenizer.model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.make().save_pretrained(tmp_path / "tiny")
    command = [sys.executable, "-m", "nbdist", "swarm", "serve", str(tmp_path / "tiny"), "-n", "1"]
    keepers = Keepers(tmp_path)
    with subprocess.Popen([*command, "--invite", str(keepers.file)], stdout=subprocess.PIPE, text=True) as process:
        lines = list(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
        url, key = lines[2].split()[-1].rstrip(">"), lines[3].split()[-1]
        keeper = keepers.start("--serve")
        assert "worker1" in process.stdout.readline()
        metrics = urllib.request.Request(url.replace("/v1", "/metrics"), headers={"Authorization": f"Bearer {key}"})
        wait_until(lambda: b'nbdist_servers{state="online"} 2' in urllib.request.urlopen(metrics).read())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert keeper.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--http {}", "Address already in use"),
        ("--http 99999", "port must be a number from 0 to 65535, not 99999"),
        ("--host myhost", "not 'myhost'"),
        ("--host 0.0.0.0 --no-key", "needs a key"),
    ],
)
def test_the_command_checks_the_address_before_it_starts_workers(options, words, monkeypatch, capsys):
    monkeypatch.setattr(nbdist, "Cluster", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = options.format(taken.getsockname()[1])
        assert main(["swarm", "serve", "no-model", *options.split()]) == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_while_a_model_is_loaded_ends_the_command():
    code = (
        "import signal, sys\nimport nbdist.swarm\nfrom nbdist.__main__ import main\n"
        "nbdist.swarm.serve = lambda *_, **__: signal.raise_signal(signal.SIGINT)\n"
        "sys.exit(main(['swarm', 'serve', 'no-model', '-n', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_without_starlette(tmp_path):
    (tmp_path / "starlette.py").write_text("raise ImportError('no starlette')")
    code = "import nbdist.swarm\nassert 'uvicorn' not in __import__('sys').modules\nimport nbdist.swarm.http.endpoint"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, **python_path(tmp_path)}, capture_output=True, text=True
    )
    words = 'an HTTP endpoint needs starlette and uvicorn: pip install "nbdist[serve]"'
    assert f"ImportError: {words}" in done.stderr
    done = subprocess.run(
        [sys.executable, "-P", "-m", "nbdist", "swarm", "serve", "no-model"],
        env={**os.environ, **python_path(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (2, f"nbdist: {words}\n")
