"""A model of this process over HTTP: the real server, the openai package, curl and bare sockets."""

import contextlib
import gc
import json
import logging
import shlex
import signal
import socket
import subprocess
import threading
import time
import weakref

import openai
import pytest
import torch
import transformers
from helpers.models import tiny_tokenizer
from helpers.waiting import wait_until

from nbdist.errors import UsageError
from nbdist.swarm import NoRoute
from nbdist.swarm.http import endpoint as endpoint_module
from nbdist.swarm.http.endpoint import Endpoint
from nbdist.swarm.http.limits import Limits
from nbdist.swarm.http.request import TextRequest
from nbdist.swarm.http.writing import Writing

ASK = {"model": "tiny", "prompt": "Hello", "max_tokens": 5}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer.make()


@pytest.fixture(scope="module")
def model():
    return tiny_tokenizer.model()


@contextlib.contextmanager
def opened(model, tokenizer, *, key=True, host="127.0.0.1", limits=None, hosts=()):
    endpoint = Endpoint(
        model,
        tokenizer,
        "tiny",
        lambda: {"worker0": "online"},
        limits or Limits(2, 8, 10**6),
        host=host,
        port=0,
        key=key,
        hosts=hosts,
    )
    try:
        yield endpoint
    finally:
        endpoint.close()


@pytest.fixture(scope="module")
def endpoint(model, tokenizer):
    with opened(model, tokenizer) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def client(endpoint):
    with openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        yield client


def greedy(model, tokenizer, prompt, tokens):
    """What the model writes without HTTP."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)


def send(endpoint, method, path, body=b"", **headers):
    """Return (status, headers, body) of the answer to one request, as bytes on a socket have it."""
    known = {"Host": "127.0.0.1", "Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}
    all_headers = {**known, "Content-Length": str(len(body)), "Connection": "close"}
    all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in all_headers.items() if value is not None),
    ]
    with connected(endpoint) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # the server does not read what is too much
            while part := connection.recv(65536):
                answer += part
    head, _, rest = answer.partition(b"\r\n\r\n")
    status, *rows = head.decode().split("\r\n")
    return int(status.split()[1]), {each.split(": ")[0].lower(): each.split(": ")[1] for each in rows}, rest


def connected(endpoint):
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=60)


def post(endpoint, path="/v1/completions", body=ASK, **headers):
    return send(endpoint, "POST", path, json.dumps(body).encode(), **headers)


def code_of(answer):
    error = json.loads(answer[2])["error"]
    return answer[0], error["code"]


# --- texts ----------------------------------------------------------------------------------------


def test_models_are_listed(client):
    (found,) = client.models.list()
    assert (found.id, found.owned_by) == ("tiny", "nbdist")


def test_a_text_is_that_of_the_model(client, model, tokenizer):
    prompt = tokenizer("Hello the")["input_ids"]
    expected = greedy(model, tokenizer, prompt, 30)
    for given in ("Hello the", prompt):
        found = client.completions.create(model="tiny", prompt=given, max_tokens=30, temperature=0)
        assert found.choices[0].text == expected
    assert found.usage.prompt_tokens == len(prompt)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (30, "length")
    stream = client.completions.create(model="tiny", prompt="Hello the", max_tokens=30, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_a_chat_uses_the_template_of_the_tokenizer(client, model, tokenizer):
    messages = [{"role": "system", "content": "Be short"}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = greedy(model, tokenizer, prompt, 12)
    found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", expected)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == expected
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == len(prompt) + 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_text_without_max_tokens_ends_with_the_context(client, model):
    found = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], seed=1)
    assert found.usage.total_tokens <= model.config.max_position_embeddings
    if found.choices[0].finish_reason == "length":
        assert found.usage.total_tokens == model.config.max_position_embeddings


def test_a_seed_makes_the_same_texts_whatever_else_is_written(client):
    def write(seed, n=3):
        found = client.completions.create(model="tiny", prompt="Hello", max_tokens=20, seed=seed, n=n, top_p=0.9)
        return [choice.text for choice in sorted(found.choices, key=lambda choice: choice.index)]

    alone = [write(5), write(77)]
    found = {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: write(seed)})) for seed in (5, 77)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[5], found[77]] == alone
    assert len({*alone[0], *alone[1]}) == 6
    assert write(5, n=1) == alone[0][:1]
    assert client.completions.create(model="tiny", prompt="a", seed=1).choices[0].text != write(None, n=1)[0]


def test_temperature_and_top_p_change_what_is_picked(client):
    def write(**options):
        return client.completions.create(model="tiny", prompt="Hello", max_tokens=20, seed=1, **options).choices[0].text

    cold = write(temperature=0)
    assert write(top_p=0) == cold
    assert write(temperature=1e-9) == cold
    assert len({cold, write(), write(temperature=1.9), write(top_p=0.3)}) == 4


def test_several_prompts_have_texts_each(client, model, tokenizer):
    found = client.completions.create(model="tiny", prompt=["a", "b c"], n=2, temperature=0, max_tokens=6)
    expected = [greedy(model, tokenizer, tokenizer(each)["input_ids"], 6) for each in ("a", "b c")]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert found.usage.completion_tokens == 24


def test_a_text_is_cut_before_a_stop_text(client):
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=40, temperature=0).choices[0].text
    stop = whole[5:9]  # over the borders of tokens
    assert stop not in whole[:5]
    for stream in (False, True):
        found = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=40, temperature=0, stop=[stop, "never there"], stream=stream
        )
        chunks = list(found) if stream else [found]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_end_token_ends_a_text(tokenizer, model):
    first = int(model(torch.tensor([tokenizer("Hello")["input_ids"]])).logits[0, -1].argmax())
    own = tiny_tokenizer.model()
    own.generation_config.eos_token_id = [first, 299]
    with opened(own, tokenizer) as endpoint:
        found = json.loads(post(endpoint, body={**ASK, "temperature": 0})[2])
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "stop")
    assert found["usage"]["completion_tokens"] == 1


def test_a_text_that_the_models_configuration_ends_is_over(tokenizer):
    own = tiny_tokenizer.model()
    own.generation_config.max_time = 1e-9
    with opened(own, tokenizer) as endpoint:
        found = json.loads(post(endpoint, body={**ASK, "max_tokens": 50})[2])
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 50


def test_the_models_configuration_counts_where_no_field_does(tokenizer):
    """As those of many chat models do, it samples, and has a penalty: that stays, and the client decides the rest."""
    own = tiny_tokenizer.model()
    own.generation_config.update(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=3, num_beams=2, repetition_penalty=1.9
    )
    prompt = tokenizer("Hello")["input_ids"]
    ids = torch.tensor([prompt])
    alone = own.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, num_beams=1, pad_token_id=0
    )
    with opened(own, tokenizer) as endpoint:
        found = json.loads(post(endpoint, body={**ASK, "max_tokens": 30, "temperature": 0})[2])
    assert found["choices"][0]["text"] == tokenizer.decode(alone[0, len(prompt) :], skip_special_tokens=True)


def test_probabilities_are_those_of_the_model(client, model, tokenizer):
    ids = tokenizer("Hello")["input_ids"]
    expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).detach()
    found = client.completions.create(model="tiny", prompt="Hello", max_tokens=2, temperature=0, logprobs=2).choices[0]
    assert found.logprobs.token_logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)
    assert found.logprobs.text_offset[0] == 0
    assert list(found.logprobs.top_logprobs[0].values()) == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=3, seed=1
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(each.top_logprobs) == 3 and each.logprob <= each.top_logprobs[0].logprob for each in content)
    assert all(each.bytes is None or bytes(each.bytes).decode() == each.token for each in content)


def test_a_model_of_few_tokens_has_no_more_probabilities(model, tokenizer):
    prompt = tokenizer("Hello")["input_ids"]
    request = TextRequest.read(json.dumps({**ASK, "logprobs": 5}).encode(), chat=False)
    writing = Writing(request, tokenizer, prompt, 5, 0)
    assert len(writing._score(2, torch.zeros(3), 5).top) == 3


def test_curl_as_the_endpoint_shows_it(endpoint):
    command = repr(endpoint)[repr(endpoint).index("curl") :]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 40, done
    stream = f"{command[: command.index(' -d ')]} -N -d {shlex.quote(json.dumps({**ASK, 'stream': True}))}"
    done = subprocess.run(["bash", "-c", stream], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


# --- what is refused ------------------------------------------------------------------------------


def test_a_text_that_is_too_long(client, endpoint, model):
    most = model.config.max_position_embeddings
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", prompt="x" * most, max_tokens=1)
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "prompt")
    assert code_of(post(endpoint, body={**ASK, "max_tokens": most})) == (400, "context_length_exceeded")
    assert post(endpoint, body={**ASK, "prompt": "x" * (most - 5), "max_tokens": 5})[0] == 200


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="gpt-17", prompt="x")
    assert (found.value.code, found.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("prompt", ["", [], [0, 300], [-1], [[5], []]])
def test_tokens_that_the_model_does_not_know(endpoint, prompt):
    found = json.loads(post(endpoint, body={**ASK, "prompt": prompt})[2])
    assert found["error"]["param"] == "prompt"


def test_a_refused_field_has_its_name(client):
    with pytest.raises(openai.BadRequestError, match="could change the answer") as found:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], frequency_penalty=0.5)
    assert found.value.param == "frequency_penalty"


def test_chats_need_a_template(model):
    with opened(model, tiny_tokenizer.make(template=None)) as endpoint:
        messages = [{"role": "user", "content": "x"}]
        found = post(endpoint, "/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert code_of(found) == (400, "no_chat_template")


def test_messages_that_the_template_refuses(model):
    with opened(model, tiny_tokenizer.make(template="{{ raise_exception('no system here') }}")) as endpoint:
        messages = [{"role": "user", "content": "x"}]
        found = post(endpoint, "/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert found[0] == 400
    assert b"no system here" in found[2]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nothing", "/v1/completions"])
@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "Bearer \xe9"])
def test_without_the_key(endpoint, path, key):
    found = send(endpoint, "GET", path, Authorization=key and key.format(endpoint.key))
    assert code_of(found) == (401, "invalid_api_key")
    assert endpoint.key not in repr(found)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost.x"])
def test_another_host(endpoint, host):
    """A page of another site, whose name leads to this address: it has that name in Host, and perhaps the key."""
    assert send(endpoint, "GET", "/v1/models", Host=host)[0] == 421
    assert send(endpoint, "GET", "/health", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8", "10.0.0.7"])
def test_addresses_and_localhost_are_this_host(endpoint, host):
    assert send(endpoint, "GET", "/v1/models", Host=host)[0] == 200


def test_names_of_this_host_and_of_a_proxy(model, tokenizer, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Johns-Box")
    monkeypatch.setattr(socket, "getfqdn", lambda: "Johns-Box.example.")
    with opened(model, tokenizer, hosts=["Models.example"]) as endpoint:
        for host in ("johns-box", "Johns-Box:80", "JOHNS-BOX.EXAMPLE", "models.example.:443", "localhost."):
            assert send(endpoint, "GET", "/v1/models", Host=host)[0] == 200
        for host in ("models", "models.example..", "."):
            assert send(endpoint, "GET", "/v1/models", Host=host)[0] == 421


def test_pages_of_other_sites_get_no_permission(endpoint):
    status, headers, _ = send(
        endpoint, "OPTIONS", "/v1/completions", Origin="https://evil.example", Access_Control_Request_Method="POST"
    )
    assert status == 405
    headers |= send(endpoint, "GET", "/v1/models", Origin="https://evil.example")[1]
    assert not [name for name in headers if name.startswith("access-control")]
    for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
        assert post(endpoint, Content_Type=kind)[0] == 415


def test_a_body_that_is_too_large(endpoint):
    assert send(endpoint, "POST", "/v1/completions", b" " * 1_000_001)[0] == 413
    # A length that is not said is no way around.
    chunked = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
    found = send(
        endpoint,
        "POST",
        "/v1/completions",
        chunked * 11 + b"0\r\n\r\n",
        Content_Length=None,
        Transfer_Encoding="chunked",
    )
    assert found[0] == 413
    assert json.loads(found[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/chat", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
def test_other_paths_and_methods(endpoint, method, path, status):
    found = send(endpoint, method, path)
    assert found[0] == status
    assert path in json.loads(found[2])["error"]["message"]


def test_too_many_requests(model, tokenizer):
    with opened(model, tokenizer, limits=Limits(1, 8, 2)) as endpoint:
        assert [post(endpoint)[0] for _ in range(2)] == [200, 200]
        status, headers, body = post(endpoint)
        assert code_of((status, headers, body)) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["retry-after"]) <= 30
        assert send(endpoint, "GET", "/health")[0] == 200


# --- who comes and goes ---------------------------------------------------------------------------


class Slow:
    """A model that waits in each step until a test lets it go on."""

    def __init__(self, model):
        self._model = model
        self.config, self.generation_config = model.config, model.generation_config
        self.steps = 0
        self.go = threading.Semaphore(0)
        self.caches = []

    def generate(self, ids, **options):
        own = options["stopping_criteria"]
        cache = transformers.DynamicCache(config=self.config)
        self.caches.append(weakref.ref(cache))

        def wait(ids, scores, **_):
            self.steps += 1
            self.go.acquire()
            return torch.zeros(1, dtype=torch.bool)

        return self._model.generate(ids, past_key_values=cache, **{**options, "stopping_criteria": [wait, *own]})


@pytest.fixture
def slow(model, tokenizer):
    slow = Slow(model)
    with opened(slow, tokenizer, limits=Limits(1, 1, 10**6)) as endpoint:
        yield slow, endpoint
        slow.go.release(10**6)


def numbers(endpoint):
    """The gauges and counters of an endpoint."""
    lines = send(endpoint, "GET", "/metrics")[2].decode().splitlines()
    return {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def begin(endpoint, **fields):
    """A connection that has asked for a text."""
    body = json.dumps({**ASK, "max_tokens": 50, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {endpoint.key}\r\n"
    connection = connected(endpoint)
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_cache(slow, stream):
    slow, endpoint = slow
    connection = begin(endpoint, stream=stream)
    wait_until(lambda: slow.steps == 1)
    slow.go.release(2)
    wait_until(lambda: slow.steps == 3)
    connection.close()
    wait_until(lambda: not endpoint._app._running)
    gc.collect()
    gc.disable()
    try:
        slow.go.release()
        wait_until(lambda: slow.caches[0]() is None)
    finally:
        gc.enable()
    wait_until(lambda: numbers(endpoint)["nbdist_texts_running"] == 0)
    assert slow.steps == 3


def test_texts_wait_for_their_turn_and_not_too_many(slow):
    slow, endpoint = slow
    first = begin(endpoint, stream=True)
    wait_until(lambda: slow.steps == 1)
    second = begin(endpoint, stream=True)
    wait_until(lambda: numbers(endpoint)["nbdist_texts_queued"] == 1)
    found = post(endpoint)
    assert code_of(found) == (429, "queue_full")
    assert found[1]["retry-after"] == "5"
    assert code_of(post(endpoint, body={**ASK, "n": 3})) == (429, "queue_full")
    second.close()  # who waits and hangs up gives up his turn
    wait_until(lambda: numbers(endpoint)["nbdist_texts_queued"] == 0)
    third = begin(endpoint)
    wait_until(lambda: numbers(endpoint)["nbdist_texts_queued"] == 1)
    slow.go.release(10**6)
    assert b"200 OK" in third.recv(100)
    assert len(slow.caches) == 2
    assert numbers(endpoint)['nbdist_requests_total{path="/v1/completions",status="429"}'] == 2
    first.close()
    third.close()


def read_all(connection):
    found = b""
    while part := connection.recv(65536):
        found += part
    return found.decode()


def test_an_interrupt_ends_texts_and_not_the_endpoint(slow):
    slow, endpoint = slow
    stream = begin(endpoint, stream=True)
    wait_until(lambda: slow.steps == 1)
    whole = begin(endpoint)
    wait_until(lambda: numbers(endpoint)["nbdist_texts_queued"] == 1)
    endpoint.interrupt()
    assert b"503" in whole.recv(100)
    wait_until(lambda: not endpoint._app._running)
    slow.go.release(10**6)
    endpoint.interrupt()
    assert post(endpoint)[0] == 200
    whole.close()
    endpoint.close()
    text = read_all(stream)
    assert '"code": "interrupted"' in text
    assert "[DONE]" not in text


def test_stop_ends_the_texts_of_a_cell_that_serves(slow):
    slow, endpoint = slow
    stream = begin(endpoint, stream=True)
    wait_until(lambda: slow.steps == 1)
    stop = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    stop.start()
    with pytest.raises(KeyboardInterrupt):
        endpoint.wait()
    wait_until(lambda: not endpoint._app._running)
    slow.go.release(10**6)
    assert '"code": "interrupted"' in read_all(stream)
    assert repr(endpoint).startswith("<Endpoint of tiny at ")  # it still serves
    assert post(endpoint)[0] == 200
    closing = threading.Timer(0.3, endpoint.close)
    closing.start()
    endpoint.wait()
    assert repr(endpoint) == "<Endpoint of tiny; it is closed>"


def test_close_ends_streams(slow):
    slow, endpoint = slow
    stream = begin(endpoint, stream=True)
    wait_until(lambda: slow.steps == 1)
    endpoint.close()
    assert '"code": "interrupted"' in read_all(stream)
    assert repr(endpoint) == "<Endpoint of tiny; it is closed>"
    with pytest.raises(ConnectionRefusedError):
        connected(endpoint)
    endpoint.close()
    endpoint.interrupt()


def test_an_error_before_the_first_token_has_a_status_and_a_later_one_ends_the_stream(model, tokenizer, caplog):
    class Failing(Slow):
        def generate(self, ids, **options):
            if not self.steps:
                self.steps = 1
                raise NoRoute("no worker is left")

            def fail(ids, scores, **_):
                raise ZeroDivisionError("a secret")

            return self._model.generate(ids, **{**options, "stopping_criteria": [fail]})

    with opened(Failing(model), tokenizer) as endpoint:
        found = post(endpoint, body={**ASK, "stream": True})
        assert code_of(found) == (503, "unavailable")
        assert found[1]["retry-after"] == "5"
        client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
        with pytest.raises(openai.APIError, match="the server failed with ZeroDivisionError"):
            list(client.completions.create(**ASK, stream=True))
        assert "a secret" in caplog.text
        wait_until(lambda: numbers(endpoint)["nbdist_texts_running"] == 0)


def test_an_error_of_one_text_ends_the_other_texts_of_the_request(model, tokenizer):
    class OneFails(Slow):
        def generate(self, ids, **options):
            if not self.caches:
                self.caches.append(None)
                raise UsageError("no worker is left")
            return super().generate(ids, **options)

    slow = OneFails(model)
    with opened(slow, tokenizer) as endpoint:
        assert code_of(post(endpoint, body={**ASK, "n": 2, "max_tokens": 50})) == (503, "unavailable")
        slow.go.release(10**6)
        wait_until(lambda: numbers(endpoint)["nbdist_texts_running"] == 0)
        assert slow.steps <= 1


def test_a_thread_that_cannot_start_gives_its_turn_back(model, tokenizer, monkeypatch):
    start, fails = threading.Thread.start, [True, True]

    def start_some(thread):
        if thread.name == "swarm http text" and fails:
            fails.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with opened(model, tokenizer, limits=Limits(1, 1, 10**6)) as endpoint:
        found = post(endpoint, body={**ASK, "n": 2})
        assert (code_of(found), found[1]["retry-after"]) == ((503, "unavailable"), "5")
        wait_until(lambda: numbers(endpoint)["nbdist_texts_running"] == 0)
        fails[:] = []
        assert post(endpoint)[0] == 200


def test_a_thread_of_another_request_that_cannot_start(slow, monkeypatch):
    """Its turn comes when the text of another request ends: that one's client gets its whole answer."""
    slow, endpoint = slow
    with begin(endpoint) as first:
        wait_until(lambda: slow.steps == 1)
        with begin(endpoint) as second:
            wait_until(lambda: numbers(endpoint)["nbdist_texts_queued"] == 1)

            def fail(thread):
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(threading.Thread, "start", fail)
            slow.go.release(10**6)
            assert b"200 OK" in first.recv(100)
            assert b"503" in second.recv(100)
    monkeypatch.undo()
    wait_until(lambda: numbers(endpoint)["nbdist_texts_running"] == 0)
    assert post(endpoint)[0] == 200


def test_health_says_whether_a_worker_serves(model, tokenizer):
    states = {"worker0": "online", "worker1": "gone"}
    endpoint = Endpoint(model, tokenizer, "tiny", lambda: states, Limits(1, 1, 100), host="127.0.0.1", port=0, key=True)
    assert send(endpoint, "GET", "/health", Authorization=None)[::2] == (200, b'{"status":"ok"}')
    assert numbers(endpoint)['nbdist_servers{state="gone"}'] == 1
    states["worker0"] = "banned"
    assert send(endpoint, "GET", "/health", Authorization=None)[0] == 503
    endpoint.close()


def test_tokens_and_requests_are_counted(model, tokenizer):
    with opened(model, tokenizer) as endpoint:
        post(endpoint)
        post(endpoint, body={**ASK, "stream": True})
        send(endpoint, "GET", "/any/other")
        found = numbers(endpoint)
    assert found['nbdist_requests_total{path="/v1/completions",status="200"}'] == 2
    assert found['nbdist_requests_total{path="other",status="404"}'] == 1
    assert found['nbdist_tokens_total{kind="prompt"}'] == 2 * len(tokenizer("Hello")["input_ids"])
    assert found['nbdist_tokens_total{kind="completion"}'] == 10


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nx",
    ],
)
def test_who_sends_no_whole_request_is_not_waited_for(endpoint, monkeypatch, sent):
    monkeypatch.setattr(endpoint_module, "_HEAD_SECONDS", 0.2)
    with connected(endpoint) as mute:
        mute.sendall(sent)
        answer = read_all(mute)
    assert answer.count("HTTP/1.1 ") == sent.count(b"\r\n\r\n")


def test_an_answer_may_take_longer_than_a_request(slow, monkeypatch):
    slow, endpoint = slow
    monkeypatch.setattr(endpoint_module, "_HEAD_SECONDS", 0.2)
    closings = []
    is_idle = endpoint_module._Connection._close_if_idle
    monkeypatch.setattr(endpoint_module._Connection, "_close_if_idle", lambda each: closings.append(is_idle(each)))
    with begin(endpoint) as asking:
        wait_until(lambda: slow.steps == 1 and closings)
        slow.go.release(10**6)
        assert b"200 OK" in asking.recv(100)


def test_connections_are_limited(model, tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_MOST_CONNECTIONS", 2)
    with opened(model, tokenizer) as endpoint:
        opens = endpoint._server.server_state.connections
        with connected(endpoint), connected(endpoint):
            wait_until(lambda: len(opens) == 2)
            with connected(endpoint) as third:
                assert not third.recv(1)
        wait_until(lambda: not opens)
        assert post(endpoint)[0] == 200


# --- where it listens -----------------------------------------------------------------------------


def test_no_key_on_loopback_only(model, tokenizer):
    with opened(model, tokenizer, key=False) as endpoint:
        assert endpoint.key is None
        assert "Other users of this host reach this address" in repr(endpoint)
        assert "Authorization" not in repr(endpoint)
        assert send(endpoint, "GET", "/v1/models", Authorization=None)[0] == 200
        assert send(endpoint, "GET", "/v1/models", Authorization=None, Host="evil.example")[0] == 421
    with (
        pytest.raises(UsageError, match=r"an endpoint at 0\.0\.0\.0 needs a key"),
        opened(model, tokenizer, key=False, host="0.0.0.0"),
    ):
        pass


def test_other_addresses(model, tokenizer):
    with opened(model, tokenizer, host="0.0.0.0") as endpoint:
        assert "not encrypted" in repr(endpoint)
    with opened(model, tokenizer, host="localhost") as endpoint:
        assert "not encrypted" not in repr(endpoint)
        assert post(endpoint, Host="localhost")[0] == 200
    if socket.has_dualstack_ipv6():
        with opened(model, tokenizer, host="::1") as endpoint:
            assert endpoint.url.startswith("http://[::1]:")
            assert post(endpoint, Host="[::1]")[0] == 200


def test_it_listens_on_loopback_and_each_has_a_key_of_its_own(endpoint, model, tokenizer):
    assert endpoint._socket.getsockname()[0] == "127.0.0.1"
    with opened(model, tokenizer) as other:
        assert other.key != endpoint.key
        assert len(endpoint.key) > 30


def test_a_port_that_is_taken(model, tokenizer, endpoint):
    port = int(endpoint.url.removesuffix("/v1").rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        Endpoint(model, tokenizer, "tiny", dict, Limits(1, 1, 1), host="127.0.0.1", port=port, key=True)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("myhost", 0, "host must be an address of this machine, such as 127.0.0.1, not 'myhost'"),
        ("", 0, "not ''"),
        ("127.0.0.1", 99999, "port must be a number from 0 to 65535, not 99999"),
        ("127.0.0.1", -1, "not -1"),
    ],
)
def test_addresses_that_are_not_valid(model, tokenizer, host, port, words):
    with pytest.raises(UsageError, match=words):
        Endpoint(model, tokenizer, "tiny", dict, Limits(1, 1, 1), host=host, port=port, key=True)


def test_nothing_is_logged_for_a_healthy_request(endpoint, caplog):
    with caplog.at_level(logging.INFO, logger="nbdist"):
        post(endpoint)
        time.sleep(0)
    assert not caplog.records
