"""`App`: the ASGI application of an endpoint: checks each request, has its texts written, and sends the answer."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nbdist.swarm.http.api_error import ApiError
from nbdist.swarm.http.limits import Limits
from nbdist.swarm.http.metrics import Metrics
from nbdist.swarm.http.prompt_tokens import prompt_tokens
from nbdist.swarm.http.request import TextRequest
from nbdist.swarm.http.request_texts import RequestTexts
from nbdist.swarm.http.text_answer import TextAnswer
from nbdist.swarm.http.writing import Piece, Writing

_MOST_BYTES = 1_000_000  # of a request
_BODY_SECONDS = 30.0  # within which a request must have come
_TEXT_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}  # by path: whether it is for chats


@dataclass(eq=False)
class App:
    """Answers requests over HTTP. Only the thread of the event loop calls it."""

    model: Any
    tokenizer: Any
    name: str  # of the model, for clients
    states: Callable[[], Mapping[str, str]]  # of the workers, by name
    limits: Limits
    key: str | None  # that clients must send
    hosts: set[str]  # names of this server, in lower case, without a dot at the end
    _metrics: Metrics = field(default_factory=Metrics)
    _running: set[RequestTexts] = field(default_factory=set)
    _created: int = field(default_factory=lambda: int(time.time()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks for it."""
        request = Request(scope, receive)
        with contextlib.ExitStack() as ending:  # entered until all was sent, or the client has hung up
            try:
                self._check(request)
                response = await self._respond(request, ending)
            except Exception as error:
                refusal = ApiError.of(error)
                response = JSONResponse(refusal.body, refusal.status, refusal.headers)
            path = scope["path"] if scope["path"] in _TEXT_PATHS else "other"
            self._metrics.requests[f'{{path="{path}",status="{response.status_code}"}}'] += 1
            await response(scope, receive, send)

    def end_all(self, why: str) -> None:
        """End all texts; their clients get the error ``why``."""
        for texts in self._running:
            texts.end(ApiError(503, why, code="interrupted"))

    def _check(self, request: Request) -> None:
        """Raise `ApiError` if a request is for another host, or lacks the key."""
        # A page of any site can have its own name lead to this address, and so reach it by a user's browser. It cannot
        # do so with an address in place of the name.
        host = re.sub(r":\d*$", "", request.headers.get("host", "").lower()).removesuffix(".")
        if host not in self.hosts:
            try:
                ipaddress.ip_address(host.strip("[]"))
            except ValueError:
                raise ApiError(421, f"the header Host names another server, {host!r:.80}") from None
        if self.key is not None and request.scope["path"] != "/health":
            sent = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(sent, f"Bearer {self.key}".encode()):
                raise ApiError(401, "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")

    async def _respond(self, request: Request, ending: contextlib.ExitStack) -> Response:
        path = request.scope["path"]
        if path in _TEXT_PATHS and request.method == "POST":
            return await self._write_texts(request, ending, chat=_TEXT_PATHS[path])
        if path in _TEXT_PATHS or request.method != "GET":
            raise ApiError(405, f"{request.method} {path:.80} is not possible here")
        if path == "/v1/models":
            model = {"id": self.name, "object": "model", "created": self._created, "owned_by": "nbdist"}
            return JSONResponse({"object": "list", "data": [model]})
        if path == "/health":
            serves = "online" in self.states().values()
            return JSONResponse({"status": "ok" if serves else "no worker serves"}, 200 if serves else 503)
        if path == "/metrics":
            return PlainTextResponse(self._metrics.text(self.limits, self.states().values()))
        raise ApiError(404, f"there is no {path:.80} here")

    async def _write_texts(self, request: Request, ending: contextlib.ExitStack, *, chat: bool) -> Response:
        asked = TextRequest.read(await _body(request), chat=chat)
        if asked.model != self.name:
            why = f"there is no model {asked.model!r:.80}; this server has {self.name!r}"
            raise ApiError(404, why, "model", "model_not_found")
        self.limits.admit(time.monotonic())
        config = self.model.config.get_text_config(decoder=True)
        prompts = await asyncio.to_thread(prompt_tokens, asked, self.tokenizer, config)
        writings = [
            Writing(asked, self.tokenizer, tokens, most, number)
            for tokens, most in prompts
            for number in range(asked.n)
        ]
        texts = RequestTexts(self.limits, [partial(writing.run, self.model) for writing in writings])
        ending.callback(texts.halt)
        self._running.add(texts)
        ending.callback(self._running.discard, texts)
        watch = asyncio.create_task(_end_when_gone(request, texts))
        ending.callback(watch.cancel)
        answers = TextAnswer(asked, secrets.token_hex(12), int(time.time()), sum(len(tokens) for tokens, _ in prompts))
        ending.callback(self._metrics.count, answers.usage)
        pieces = texts.pieces()
        if asked.stream:
            first = await anext(pieces)  # before the status is sent: what fails now has a status of its own
            return StreamingResponse(_events(first, pieces, answers), media_type="text/event-stream")
        return JSONResponse(answers.whole([each async for each in pieces]))


async def _body(request: Request) -> bytes:
    # Pages of other sites may send other types without asking by CORS first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BYTES:
                    raise ApiError(413, f"a request has {_MOST_BYTES} bytes at most")
    except (TimeoutError, ClientDisconnect):
        raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s") from None
    return bytes(body)


async def _end_when_gone(request: Request, texts: RequestTexts) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    texts.end(ApiError(499, "the client has hung up"))


async def _events(
    first: tuple[int, Piece], pieces: AsyncIterator[tuple[int, Piece]], answers: TextAnswer
) -> AsyncIterator[str]:
    """Yield a stream of server-sent events, from the piece ``first`` on; an error is its last event."""
    try:
        yield f"data: {json.dumps(answers.chunk(*first))}\n\n"
        async for number, piece in pieces:
            yield f"data: {json.dumps(answers.chunk(number, piece))}\n\n"
        for chunk in answers.last_chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
