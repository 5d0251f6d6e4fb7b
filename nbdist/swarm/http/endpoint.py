"""`Endpoint`: the HTTP server of a model, in a thread. `Swarm.http` opens it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from nbdist.swarm.http.app import App
except ImportError as error:  # they come with the extra "serve" of this package
    raise ImportError('an HTTP endpoint needs starlette and uvicorn: pip install "nbdist[serve]"') from error

from nbdist.errors import UsageError
from nbdist.swarm.http.limits import Limits

_CLOSE_SECONDS = 10.0  # that `close` waits for the thread
# Anybody who reaches the address can open connections, each of which has a file descriptor.
_MOST_CONNECTIONS = 128  # that are open at once
_MOST_ACCEPTED = 32  # connections in one turn of the event loop, before the first of them can be closed
_HEAD_SECONDS = 10.0  # within which a client must have sent the headers of its next request


def listen(host: str, port: int, *, key: bool) -> socket.socket:
    """Return the socket at which an endpoint listens.

    Raises UsageError if an argument is not valid, or an endpoint there needs a key; OSError if the port is taken, or
    this host does not have the address.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"host must be an address of this machine, such as 127.0.0.1, not {host!r}") from None
    if not 0 <= port < 2**16:
        raise UsageError(f"port must be a number from 0 to 65535, not {port}")
    if not key and not address.is_loopback:
        raise UsageError(
            f"an endpoint at {host} needs a key, because other machines reach it: "
            "leave out key=False (--no-key), or host"
        )
    return socket.create_server((host, port), family=socket.AF_INET6 if address.version == 6 else socket.AF_INET)


class Endpoint:
    """A model that is served over HTTP, until `close` or the end of this process. `Swarm.http` opens it.

    Its text shows the address, the key, and a command that tries it. Any thread may call its methods. ``hosts`` are
    further names by which clients reach it, such as that of a reverse proxy.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        states: Callable[[], Mapping[str, str]],
        limits: Limits,
        *,
        host: str,
        port: int,
        key: bool,
        hosts: Iterable[str] = (),
    ) -> None:
        self._socket = listen(host, port, key=key)
        self._is_local = ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback
        self.key = f"nb-{secrets.token_urlsafe(24)}" if key else None
        """The key that clients must send; None if they need none."""
        names = {"localhost", host, socket.gethostname(), socket.getfqdn(), *hosts}
        names = {each.lower().removesuffix(".") for each in names}
        self._app = App(model, tokenizer, name, states, limits, self.key, names)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/v1"
        """The address, as clients of OpenAI's API take it for ``base_url``."""
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                backlog=_MOST_ACCEPTED,
                timeout_graceful_shutdown=2,
            )
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="swarm http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve([self._socket]))

    @property
    def texts(self) -> tuple[int, int]:
        """The number of texts that are written now, and of those that wait for their turn."""
        return self._app.limits.running, self._app.limits.queued

    def interrupt(self) -> None:
        """End all texts that are written or wait: their clients get an error. New requests are answered as before."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._app.end_all, "the text was interrupted at the server")

    def wait(self) -> None:
        """Serve in the foreground, until `close`. Ctrl-C, or the notebook's stop button, ends all texts and the wait.

        The texts end as by `interrupt`, and KeyboardInterrupt is raised; the endpoint stays open.
        """
        try:
            while self._thread.is_alive():
                time.sleep(0.1)  # not `join`: Python 3.11 takes a thread for ended if its `join` is interrupted
        except BaseException:
            self.interrupt()
            raise

    def close(self) -> None:
        """End the server; texts end as by `interrupt`. A second call changes nothing. The swarm stays open."""
        self.interrupt()
        self._server.should_exit = True
        self._thread.join(_CLOSE_SECONDS)

    def __repr__(self) -> str:
        if not self._thread.is_alive():
            return f"<Endpoint of {self._app.name}; it is closed>"
        asked = json.dumps({"model": self._app.name, "prompt": "The sea is", "max_tokens": 40})
        lines = [
            f"<Endpoint of {self._app.name} at {self.url}>",
            f"key: {self.key or 'none. Other users of this host reach this address, too'}",
            *([] if self._is_local else ["Key and texts are not encrypted: an ssh tunnel to a loopback address is"]),
            f"curl {self.url}/completions -H 'Content-Type: application/json' \\",
            *([f"  -H 'Authorization: Bearer {self.key}' \\"] if self.key else []),
            f"  -d {shlex.quote(asked)}",
        ]
        return "\n".join(lines)


class _Connection(H11Protocol):
    """Uvicorn's connection, with a limit for what clients without a key can keep open."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection if too many are open; else wait for its first request."""
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.close()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request. Uvicorn's own limit ends with the first byte, even if no more follow."""
        self._expect_request()
        super().on_response_complete()

    def _expect_request(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(_HEAD_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # no request is being answered
            self.transport.close()
