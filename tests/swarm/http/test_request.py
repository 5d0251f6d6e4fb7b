"""What a client may ask for, field by field."""

import json

import pytest

from nbdist.swarm.http.api_error import ApiError
from nbdist.swarm.http.request import TextRequest


def read(chat=False, **fields):
    own = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    return TextRequest.read(json.dumps({"model": "m", **own, **fields}).encode(), chat=chat)


def refused(chat=False, **fields):
    with pytest.raises(ApiError) as found:
        read(chat, **fields)
    assert found.value.status == 400
    error = found.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] in str(found.value)
    return error


def test_the_defaults():
    asked = read()
    assert (asked.prompts, asked.max_tokens, asked.temperature, asked.top_p, asked.n) == (["Hello"], 16, 1.0, 1.0, 1)
    assert (asked.seed, asked.stop, asked.logprobs, asked.stream, asked.include_usage) == (None, [], None, False, False)
    assert read(chat=True).max_tokens is None


def test_each_field_is_read():
    asked = read(
        chat=True,
        max_completion_tokens=7,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        seed=-3,
        n=2,
        stop="x",
        logprobs=True,
        top_logprobs=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.seed, asked.n) == (7, 0, 0.5, -3, 2)
    assert (asked.stop, asked.logprobs, asked.stream, asked.include_usage) == (["x"], 4, True, True)
    assert read(logprobs=0).logprobs == 0
    assert read(chat=True, logprobs=True).logprobs == 0
    assert read(chat=True, logprobs=False).logprobs is None
    assert read(stop=["a", "b"]).stop == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts_are_texts_or_tokens(prompt, prompts):
    assert read(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 7, {}, [None], [1, "a"], [[1], 2], [True], [["a"]]])
def test_other_prompts_are_refused(prompt):
    assert refused(prompt=prompt)["param"] == "prompt"


def test_contents_may_be_lists_of_text_parts():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be short"}, {"role": "user", "content": parts, "tool_calls": None}]
    assert read(chat=True, messages=messages).prompts == [
        [{"role": "system", "content": "Be short"}, {"role": "user", "content": "Hello"}]
    ]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "Hello",
        ["Hello"],
        [{"content": "Hello"}],
        [{"role": "tool", "content": "Hello"}],
        [{"role": ["user"], "content": "Hello"}],
        [{"role": "user"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["Hello"]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "Hello", "name": "Ann"}],
    ],
)
def test_other_messages_are_refused(messages):
    assert refused(chat=True, messages=messages)["param"] in ("messages", "messages[0]")


ASKS_FOR_NOTHING = {
    "frequency_penalty": (0, 0.5),
    "presence_penalty": (0.0, -1),
    "logit_bias": ({}, {"5": 1}),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "tools": ([], [{"type": "function"}]),
    "tool_choice": ("auto", "required"),
    "parallel_tool_calls": (True, "x"),
    "functions": ([], [{}]),
    "function_call": ("none", {"name": "f"}),
    "modalities": (["text"], ["text", "audio"]),
    "audio": (None, {"voice": "x"}),
    "prediction": (None, {"type": "content"}),
    "reasoning_effort": ("none", "high"),
    "verbosity": ("medium", "low"),
    "web_search_options": (None, {}),
    "store": (False, True),
    "service_tier": ("auto", "flex"),
    "best_of": (1, 3),
    "echo": (False, True),
    "suffix": ("", "x"),
    "top_logprobs": (0, 3),
}
"""Fields with a value that asks for nothing, and one that would change the answer."""


@pytest.mark.parametrize("name", ASKS_FOR_NOTHING)
def test_a_value_that_asks_for_nothing_is_accepted_and_another_is_refused(name):
    nothing, something = ASKS_FOR_NOTHING[name]
    for chat in (True, False):
        assert read(chat, **{name: nothing}) == read(chat, **{name: None}) == read(chat)
        error = refused(chat, **{name: something})
        assert (error["param"], error["code"]) == (name, "unsupported_value")


@pytest.mark.parametrize("name", ["user", "metadata", "safety_identifier", "prompt_cache_key"])
def test_fields_without_effect_are_accepted(name):
    assert read(**{name: {"any": "value"}}) == read()


@pytest.mark.parametrize("name", ["top_k", "min_p", "repetition_penalty", "ignore_eos", "messages"])
def test_fields_that_are_not_there_are_refused(name):
    error = refused(**{name: 3})
    assert (error["param"], error["code"]) == (name, "unknown_parameter")


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "model": (None, 7),
        "max_tokens": (0, -1, 1.5, "7", True, 2**40),
        "temperature": (-0.1, 2.1, "1", True, [1]),
        "top_p": (-0.1, 1.1, "1"),
        "seed": (2**63, 1.0, "1", True),
        "n": (0, 17, "1", True),
        "stop": ("", ["a", ""], [1], 7, {}, ["a", "b", "c", "d", "e"]),
        "logprobs": (-1, 6, True, "1"),
        "stream": (1, "true"),
        "stream_options": (7, {"include_usage": True}, {}),
    }.items(),
)
def test_values_that_are_not_valid_are_refused(name, values):
    for value in values:
        assert refused(**{name: value})["param"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprobs", 3), ("top_logprobs", 21), ("top_logprobs", 2), ("max_completion_tokens", 0), ("prompt", "a")],
)
def test_values_that_are_not_valid_in_a_chat_are_refused(name, value):
    shown = {"logprobs": True} if value == 21 else {}
    assert refused(chat=True, **shown, **{name: value})["param"] == name


@pytest.mark.parametrize("options", [{"include_usage": 1}, {"include_obfuscation": True}, {"other": 1}])
def test_other_options_of_streams_are_refused(options):
    assert refused(stream=True, stream_options=options)["param"] == f"stream_options.{next(iter(options))}"


def test_a_stream_without_obfuscation_is_any_stream():
    assert read(stream=True, stream_options={"include_obfuscation": False}) == read(stream=True)


def test_there_is_a_limit_to_the_texts_of_a_request():
    assert read(prompt=["a"] * 8, n=2).n == 2
    assert refused(prompt=["a"] * 9, n=2)["param"] == "n"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"7", b"\xff", b'{"prompt": "\\ud800"}', b'{"n": NaN}', b"[" * 200_000]
)
def test_a_body_that_is_no_object_is_refused(raw):
    with pytest.raises(ApiError, match="not a JSON object") as found:
        TextRequest.read(raw, chat=False)
    assert found.value.status == 400
