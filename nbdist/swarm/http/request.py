"""`TextRequest`: what a client asks for, read from its JSON. Pure.

A field falls into one of four groups: it is done; its value asks for nothing; it cannot change the text; or it would
change the text, and is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, MsgspecError, Struct, ValidationError, convert
from msgspec import json as msgspec_json

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
_NewTokens = Annotated[int, Meta(ge=1, le=2**31)]
_Stop = Annotated[str, Meta(min_length=1)]


class _TextPart(Struct, tag_field="type", tag="text"):
    text: str


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]


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
            body = msgspec_json.decode(raw, type=dict[str, Any])
        except (MsgspecError, RecursionError) as error:
            raise ApiError(400, f"the body is not a JSON object: {error}") from None
        needed = {"model": None, "messages" if chat else "prompt": None}
        fields = needed | {name: value for name, value in body.items() if value is not None}
        take = partial(_take, fields)
        stream = take("stream", bool, False)
        if "stream_options" in fields and not stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
        options = take("stream_options", dict[str, Any], {})
        others = {f"stream_options.{name}": value for name, value in options.items() if value is not None}
        most, shown = take("max_tokens", _NewTokens, None if chat else 16), None
        if not chat:
            shown = take("logprobs", Annotated[int, Meta(ge=0, le=5)], None)
        elif take("logprobs", bool, False):
            shown = take("top_logprobs", Annotated[int, Meta(ge=0, le=20)], 0)
        stop = take("stop", _Stop | Annotated[list[_Stop], Meta(max_length=4)], [])
        found = cls(
            chat=chat,
            model=take("model", str, None),
            prompts=[_messages(fields)] if chat else _prompts(fields),
            max_tokens=take("max_completion_tokens", _NewTokens, most) if chat else most,
            temperature=take("temperature", Annotated[float, Meta(ge=0, le=2)], 1.0),
            top_p=take("top_p", Annotated[float, Meta(ge=0, le=1)], 1.0),
            seed=take("seed", Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], None),
            n=take("n", Annotated[int, Meta(ge=1, le=MOST_TEXTS)], 1),
            stop=[stop] if isinstance(stop, str) else stop,
            logprobs=shown,
            stream=stream,
            include_usage=_take(others, "stream_options.include_usage", bool, False),
        )
        if found.n * len(found.prompts) > MOST_TEXTS:
            raise ApiError(400, f"a request is for {MOST_TEXTS} texts at most: its prompts times n", "n")
        for name, value in (fields | others).items():  # that nothing has read
            if name not in _WITHOUT_EFFECT and value not in _NOTHING.get(name, []):
                why = f"{name:.60}={json.dumps(value):.60} could change the answer, and this server does not do it"
                code = "unsupported_value" if name in _NOTHING else "unknown_parameter"
                raise ApiError(400, f"{why}: leave it out", name, code)
        return found


def _take(fields: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    """Remove a field, and return its value, or ``default`` if it is not there; raise `ApiError` for another kind."""
    if name not in fields:
        return default
    value = fields.pop(name)
    try:
        return convert(value, kind)
    except ValidationError as error:
        raise ApiError(400, f"{name} is not valid: {error}", name) from None


def _prompts(fields: dict[str, Any]) -> list[Any]:
    rows: str | list[Any] = _take(fields, "prompt", str | list[str | int | list[int]], None)
    numbers = [row for row in rows if isinstance(row, int)]
    if isinstance(rows, str) or len(numbers) == len(rows):
        return [rows]
    if numbers:
        raise ApiError(400, "prompt must be a text, a list of texts, a list of tokens, or a list of those", "prompt")
    return rows


def _messages(fields: dict[str, Any]) -> list[dict[str, str]]:
    given = fields["messages"]
    messages = _take(fields, "messages", Annotated[list[_Message], Meta(min_length=1)], None)
    for number, each in enumerate(given):
        more = [name for name in each if name not in ("role", "content") and each[name] not in (None, [], {}, "")]
        if more:
            where = f"messages[{number}]"
            raise ApiError(400, f"{where}.{more[0]:.60} is not read by this server: leave it out", where)
    return [_for_template(each) for each in messages]


def _for_template(message: _Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    # "developer" is OpenAI's newer name of the role, which chat templates do not know.
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
