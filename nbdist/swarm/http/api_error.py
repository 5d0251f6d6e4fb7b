"""`ApiError`: an error that the client of an endpoint gets, in the form of OpenAI's API."""

from __future__ import annotations

import logging
from typing import Any

from nbdist.errors import NbdistError, UsageError
from nbdist.swarm.server.cache_budget import NeverFits

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer with an error; ``param`` is the wrong field of the request, ``retry`` seconds after which to try again.

    With a ``status`` of 500 or more, the client is not at fault. ``retry`` is 0 if trying again is of no use.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str = "", retry: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"Retry-After": str(retry)} if retry else {}
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code or None}}

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Return the answer to a request that ``error`` has ended. An unknown error is logged, and not shown."""
        if isinstance(error, cls):
            return error
        if isinstance(error, NeverFits):
            return cls(400, f"max_tokens, with the prompt, is too much for the swarm's memory: {error}", "max_tokens")
        if isinstance(error, NbdistError):  # such as `NoRoute` and `CacheFull`; or the swarm is closed
            retry = 0 if isinstance(error, UsageError) else 5
            return cls(503, f"the swarm cannot write this text: {error}", code="unavailable", retry=retry)
        _log.error("a request to an HTTP endpoint failed", exc_info=error)
        return cls(500, f"the server failed with {type(error).__name__}; its own log says more", code="internal_error")
