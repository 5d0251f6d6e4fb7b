"""`TextRequest`: what a client asks for, read from its JSON. Pure.

A field falls into one of four groups: it is done; its value asks for nothing; it cannot change the text; or it would
change the text, and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbdist.swarm.http.api_error import ApiError

MOST_TEXTS = 16
"""The most texts of one request: its prompts times its ``n``."""

# Values of fields that ask for nothing. null is one for each field.
_NOTHING: dict[str, list[Any]] = json.loads(
    """{"frequency_penalty": [0], "presence_penalty": [0], "logit_bias": [{}], "response_format": [{"type": "text"}],
    "tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [true, false],
    "functions": [[]], "function_call": ["none", "auto"], "modalities": [["text"]], "audio": [], "prediction": [],
    "reasoning_effort": ["none"], "verbosity": ["medium"], "web_search_options": [], "store": [false],
    "service_tier": ["auto", "default"], "best_of": [1], "echo": [false], "suffix": [""],
    "top_logprobs": [0], "stream_options.include_obfuscation": [false]}"""
)
_WITHOUT_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class TextRequest:
    """One request for texts, checked."""

    chat: bool
    model: str
    prompts: list[Any]  # texts, or lists of tokens; in a chat, the list of messages alone
    max_tokens: int | None  # None for as many as fit
    temperature: float  # 0 for the most probable token
    top_p: float
    seed: int | None
    n: int  # texts for each prompt
    stop: list[str]
    logprobs: int | None  # how many other tokens each token is shown with; None for no probabilities
    stream: bool
    include_usage: bool

    @classmethod
    def read(cls, raw: bytes, *, chat: bool) -> TextRequest:
        """Read the body of a request; raise `ApiError` (400), which names the field, if it is not valid."""
        try:
            body = json.loads(raw)
            json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no text, but JSON has it
            fields = {name: value for name, value in body.items() if value is not None}
        except (ValueError, RecursionError, AttributeError) as error:
            raise ApiError(400, f"the body is not a JSON object: {error}") from None
        take, number, flag = partial(_take, fields), partial(_number, fields), partial(_flag, fields)
        stream = flag("stream")
        options = take("stream_options", {}, "an object, with stream: true", lambda it: stream and type(it) is dict)
        others = {f"stream_options.{name}": value for name, value in options.items() if value is not None}
        most, shown = number("max_tokens", None if chat else 16, 1, 2**31), None
        if not chat:
            shown = number("logprobs", None, 0, 5)
        elif flag("logprobs"):
            shown = number("top_logprobs", 0, 0, 20)
        found = cls(
            chat=chat,
            model=_take({"model": None, **fields}, "model", None, "the name of a model", lambda it: type(it) is str),
            prompts=[_messages(fields.pop("messages", None))] if chat else _prompts(fields.pop("prompt", None)),
            max_tokens=number("max_completion_tokens", most, 1, 2**31) if chat else most,
            temperature=number("temperature", 1.0, 0.0, 2.0),
            top_p=number("top_p", 1.0, 0.0, 1.0),
            seed=number("seed", None, -(2**63), 2**63 - 1),
            n=number("n", 1, 1, MOST_TEXTS),
            stop=_stops(fields.pop("stop", [])),
            logprobs=shown,
            stream=stream,
            include_usage=_flag(others, "stream_options.include_usage"),
        )
        if found.n * len(found.prompts) > MOST_TEXTS:
            raise ApiError(400, f"a request is for {MOST_TEXTS} texts at most: its prompts times n", "n")
        for name, value in (fields | others).items():  # that nothing has read
            if name not in {*_WITHOUT_EFFECT, "model"} and value not in _NOTHING.get(name, []):
                why = f"{name:.60}={json.dumps(value):.60} could change the answer, and this server does not do it"
                code = "unsupported_value" if name in _NOTHING else "unknown_parameter"
                raise ApiError(400, f"{why}: leave it out", name, code)
        return found


def _take(fields: dict[str, Any], name: str, default: Any, words: str, is_valid: Callable[[Any], bool]) -> Any:
    if name not in fields:
        return default
    if not is_valid(value := fields.pop(name)):
        raise ApiError(400, f"{name} must be {words}, not {value!r:.60}", name)
    return value


def _number(fields: dict[str, Any], name: str, default: Any, low: float, high: float) -> Any:
    kinds, word = ((int, float), "a number") if isinstance(low, float) else ((int,), "an integer")
    words = f"{word} from {low} to {high}"
    return _take(fields, name, default, words, lambda it: type(it) in kinds and low <= it <= high)


def _flag(fields: dict[str, Any], name: str) -> bool:
    return bool(_take(fields, name, False, "true or false", lambda it: type(it) is bool))


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > 4 or not all(isinstance(each, str) and each for each in texts):
        raise ApiError(400, "stop must be a text, or up to 4 texts, none of them empty", "stop")
    return texts


def _prompts(value: Any) -> list[Any]:
    def are_tokens(row: Any) -> bool:
        return isinstance(row, list) and all(type(each) is int for each in row)

    rows: Any = [value] if isinstance(value, str) or are_tokens(value) else value
    if not isinstance(rows, list) or not all(isinstance(row, str) or are_tokens(row) for row in rows):
        raise ApiError(400, "prompt must be a text, a list of texts, a list of tokens, or a list of those", "prompt")
    return rows


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list with at least one message", "messages")
    return [_message(f"messages[{number}]", each) for number, each in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise ApiError(400, f"{where} must have a role, one of {', '.join(_ROLES)}", where)
    if more := [name for name in value if name not in ("role", "content") and value[name] not in (None, [], {}, "")]:
        raise ApiError(400, f"{where}.{more[0]:.60} is not read by this server: leave it out", where)
    content = value.get("content")
    parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [dict(part) if isinstance(part, dict) else {} for part in parts] if isinstance(parts, list) else [{}]
    if not all(text.get("type") == "text" and isinstance(text.get("text"), str) for text in texts):
        raise ApiError(400, f"{where}.content must be a text, or a list of parts of type text", where)
    # "developer" is OpenAI's newer name of the role, which chat templates do not know.
    role = "system" if value["role"] == "developer" else value["role"]
    return {"role": role, "content": "".join(text["text"] for text in texts)}
