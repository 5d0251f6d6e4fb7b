"""Opens torch's TCPStore at the one address that ``tcp://`` or ``env://`` names.

A TCPStore trusts everybody who can connect to it, and by itself it listens on every interface of the machine. So this
module makes the listening socket, bound to the address, and passes it to torch (``master_listen_fd``).

One process may open a store twice at one port, if its program calls `init_rpc` and `init_process_group` with the same
``MASTER_PORT``. torch keeps the servers of its process by port, and the second opener uses the first opener's server
(``multi_tenant``), so both orders work. The first opener decides where the server listens: if `init_process_group` is
first, torch's own server listens on every interface.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
import threading
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed

from nbdist.errors import RendezvousError

dist: Any = torch.distributed  # typed as Any: torch does not declare what this module exports

# Stands for no file descriptor. torch then uses this process's own server at the port, and fails without one.
_SERVER_OF_THIS_PROCESS = -1

# Seconds to wait for the store's answer after the time for connecting, so that torch's own error comes first.
_ANSWER_TIMEOUT = 2.0

# Seconds to wait for a connection to the store. It takes no time, unless the other machine is gone.
_PROBE_TIMEOUT = 1.0


# The address and the store that this process served last. The server lives as long as the store.
_served: tuple[str, int, Any] | None = None


def open_store(host: str, port: int, timeout: float, *, serve: bool) -> Any:
    """Open a client of the store at an address; with ``serve``, serve the store there first."""
    # The server runs until this process opens another store, calls `end_server`, or ends.
    global _served
    limit = datetime.timedelta(seconds=timeout)
    if _served is not None and (not serve or _served[:2] != (host, port)):
        end_server()
    if not serve:
        return _client(host, port, timeout)
    listener = _listen(host, port)
    try:
        store = dist.TCPStore(
            host, port, None, True, limit, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener
        )
    except dist.DistNetworkError as error:
        if listener != _SERVER_OF_THIS_PROCESS:
            raise
        raise RendezvousError(
            f"rank 0 cannot serve the store at {host}:{port}, where another program listens: choose another port"
        ) from error
    _served = (host, port, store)
    return store


def _client(host: str, port: int, timeout: float) -> Any:
    opened: Future[Any] = Future()

    def connect() -> None:
        try:
            limit = datetime.timedelta(seconds=timeout)
            opened.set_result(dist.TCPStore(host, port, None, False, limit, wait_for_workers=False))
        except Exception as error:  # torch's errors, of any kind: the waiting thread raises them
            opened.set_exception(error)

    # Once connected, torch's client waits for the store's answer without a limit, and Python handles no Ctrl-C
    # meanwhile. This thread stays behind if no answer comes (test_a_listener_that_never_answers_is_no_store).
    threading.Thread(target=connect, name="nbdist-store", daemon=True).start()
    if not wait([opened], timeout + _ANSWER_TIMEOUT).done:
        raise RendezvousError(
            f"{host}:{port} has not answered as a store within {timeout:g} s: another program listens there, or rank 0 "
            f"hangs. Start rank 0 first, or choose another port"
        )
    return opened.result()


def end_server() -> None:
    """Close the server that `open_store` started, as soon as nothing else in this process uses its store."""
    global _served
    _served = None


def _listen(host: str, port: int) -> int:
    """Return the file descriptor of a listening socket; `_SERVER_OF_THIS_PROCESS` if the port is in use."""
    # torch closes the socket with its server.
    failed = f"{host} has no address"
    for family, address in _addresses(host, port):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier world's connections may linger
            listener.bind(address)
            listener.listen()
            return listener.detach()
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return _SERVER_OF_THIS_PROCESS
            failed = str(error)  # the error itself would keep the frames of all callers, and so the store, alive
    raise RendezvousError(
        f"rank 0 cannot serve the store at {host}:{port}: {failed}. Name an address of its machine, and a port that it "
        "may use (MASTER_ADDR and MASTER_PORT, or init_method)"
    )


def _addresses(host: str, port: int = 0) -> list[tuple[int, Any]]:
    """Return the address families and addresses of a host name, IPv4 first; an empty list if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    # A store's client tries all addresses, so one listener is enough. IPv4 first, so that a program that names
    # 127.0.0.1 and one that names localhost meet.
    return sorted(((int(family), address) for family, _, _, _, address in found), key=lambda each: each[0])


def is_own(host: str) -> bool:
    """Return whether a host name belongs to this machine: only then can a socket be bound to its address."""
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def is_loopback(host: str) -> bool:
    """Return whether a host name means only this machine, so that no other machine reaches a server there."""
    found = [address[0].partition("%")[0] for _, address in _addresses(host)]
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def says_loopback(host: str) -> bool:
    """Return whether a host name means loopback on every machine, unlike a machine's own name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_torchruns(host: str, port: int) -> bool:
    """Return whether torchrun's own process serves the store at an address, so that no rank has to serve it."""
    settings = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return all(os.environ.get(name) == value for name, value in settings.items())


def is_served(host: str, port: int) -> bool:
    """Return whether anything listens at an address."""
    # torch's client prints a C++ backtrace when it writes to a store that is gone, so a member that leaves asks this
    # first (test_a_member_that_outlives_the_store_prints_no_backtrace).
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
        return True
    return False
