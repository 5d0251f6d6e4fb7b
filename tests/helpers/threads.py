"""Runs functions in threads of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread of its own, which may hang without harm; return a future of its result."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
