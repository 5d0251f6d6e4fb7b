"""The keeper: the process that starts and ends the workers of one host for a notebook on another host.

``python -m nbdist worker`` runs it, and so does an actor of Ray's. Its life::

    knock at the entrance ── Denied ──> an error
            │ Admitted
            v
    an agent, with the hub as the only other member of its world <── calls of the hub: start, signal, probe, deliver
            │
            v the hub ends the cluster, or is lost (12 s of silence)
    all workers and their files are gone, the process ends

The *hub* is the notebook's side: it admits keepers at the *entrance*, an address of the notebook's host. A
`LocalLauncher` starts the workers. Its zygote, the process that forks them, ends them even if the keeper is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from nbdist.channel.contract import ChannelError
from nbdist.channel.entrance import knock
from nbdist.cluster.hosts import code_copy
from nbdist.cluster.hosts.admission import NEWCOMER, Admitted, accepted, describe_myself
from nbdist.cluster.hosts.interfaces import interface_of, own_address_towards
from nbdist.cluster.hosts.invitations import Invitation
from nbdist.cluster.jupyter.relay import Relay
from nbdist.cluster.jupyter.waiting_output import Parcel
from nbdist.cluster.processes.launchers.contract import StartedWorker
from nbdist.cluster.processes.launchers.local import LocalLauncher
from nbdist.cluster.processes.probe import Probe
from nbdist.cluster.processes.setup import WorkerSetup, free_port
from nbdist.cluster.spec import Spec
from nbdist.cluster.undoing import undone_by
from nbdist.errors import RendezvousError, UsageError
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.start import start_agent
from nbdist.wire.messages import Record

_ANSWERS_WITHIN = 20.0  # seconds for each answer of the notebook while the keeper joins
# Seconds after a worker's end in which its last output may arrive here, and seconds to bring it to the notebook.
_LAST_OUTPUT_WITHIN, _OUTPUT_PASSES_WITHIN = 0.03, 5.0

_log = logging.getLogger("nbdist.cluster")


class Keeper:
    """The keeper of this process. The constructor joins the cluster; `run` serves the notebook until the cluster ends.

    Args:
        invitation: Where the cluster is, and the proof that this process may join.
        workers: The number of workers that it may start.
        host: The address at which the other hosts reach this one; None for the one on the route to the notebook.
        gpus: The GPUs for the workers, in turn, by torch's numbers on this host; None for all.

    Raises:
        SecurityError: The notebook does not accept the invitation.
        VersionMismatch: The versions of Python, torch or nbdist do not fit.
        RendezvousError: The notebook does not answer.
        UsageError: This host has no route to the notebook, or ``host`` is not one of this host's addresses.
    """

    METHODS = (
        "take_code",
        "preload",
        "start",
        "free_port",
        "free_places",
        "signal",
        "probe",
        "deliver",
        "finish",
        "end",
    )

    def __init__(self, invitation: Invitation, workers: int = 1, host: str | None = None) -> None:
        self._room = workers
        self._gpus = range(torch.cuda.device_count())
        # The place of its first worker on this host, and the number of places on this host.
        self._first, self._places = _places_of_host(os.environ, workers)
        self._given: dict[str, int] = {}  # each worker's place here, from 0 to ``workers - 1``, by its name
        self._relays: dict[str, Relay] = {}
        self._lock = threading.Lock()  # guards `_given` and `_relays`: workers start and end in several threads
        # Held by the thread that ends the workers: the thread of the hub's call, or the one that ends this process.
        self._closing = threading.Lock()
        self._ended = threading.Event()
        self.why = ""
        """The reason for which `run` has returned; empty if the cluster has ended in order."""
        # Find an unusable address now, before the notebook admits this keeper.
        self.host = host or own_address_towards(invitation.address)
        _require_own_address(self.host)
        # For the workers' process groups; empty to let gloo and NCCL choose.
        self._interface = interface_of(self.host) or ""
        if not self._interface:
            _log.warning(
                "no network interface of this host has the address %s: gloo and NCCL choose one by themselves. If they "
                "choose a wrong one, name this host's IP address with --host",
                self.host,
            )
        try:
            request = NEWCOMER + msgspec.msgpack.encode(describe_myself(invitation.token, workers))
            answer = knock(invitation.address, invitation.key.encode(), request, _ANSWERS_WITHIN)
        except ChannelError as error:
            raise RendezvousError(str(error)) from error
        admitted = accepted(answer, Admitted)
        self._secret = admitted.secret
        options = RpcBackendOptions(
            secret=self._secret, host=self.host, channel="zeromq", rpc_timeout=_ANSWERS_WITHIN, arena_bytes=0
        )
        # The notebook's log shows this name.
        name = f"keeper{admitted.id}-of-{re.sub('[^A-Za-z0-9_-]', '-', platform.node())}"[:100]
        self._launcher = LocalLauncher(Spec(count=workers), self._on_end)
        folder = self._launcher.folder
        with undone_by(self._launcher.close):  # the zygote would stay
            self._agent = start_agent(name, admitted.id, None, options, present=[admitted.hub], directory=folder)
        self._agent.named.publish("keeper", self, *self.METHODS)
        self._hub = self._agent.at(admitted.hub.name, "hub")
        self._agent.on_lost(self._on_lost)
        with undone_by(self.close):  # the agent and the zygote would stay
            self._hub.ask("arrive", admitted.id, self._agent.me.incarnation, self.host, platform.node())

    def run(self) -> None:
        """Serve the notebook until the cluster ends or the notebook is lost; then end all workers. Sets `why`."""
        try:
            self._ended.wait()
        finally:
            self.close()

    def close(self) -> None:
        """End all workers, remove their files, and leave the cluster."""
        self._ended.set()
        with self._closing, contextlib.ExitStack() as steps:  # every step runs, also after Ctrl-C
            steps.callback(self._agent.close, "has ended")
            steps.callback(self._launcher.close)
            with self._lock:
                relays, self._relays = list(self._relays.values()), {}
            for relay in relays:
                steps.callback(relay.close)

    def end(self) -> int:
        """End the workers of this host, then this keeper; return this process's id, once the workers are gone."""
        with self._closing:
            self._launcher.close()
        self.finish("")
        return os.getpid()

    def finish(self, why: str) -> None:
        """Make `run` return; ``why`` is the reason, empty if the cluster has ended in order."""
        self.why = self.why or why
        self._ended.set()

    def _on_lost(self, record: Record, why: str) -> None:
        self.finish(f"the notebook {why}")

    # -- the workers --------------------------------------------------------------------------

    def take_code(self, packed: bytes) -> None:
        """Let the workers that start from now on import the Python files of an archive of `code_copy.pack`."""
        folder = self._launcher.folder / "code"
        with self._lock:
            code_copy.unpack(packed, folder)
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))  # the launcher passes `sys.path` on to its workers

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules before the workers start. Raises UsageError if one cannot be imported."""
        self._launcher.preload(modules).result()

    def start(self, encoded: str, connection: Mapping[str, Any], environment: Mapping[str, str]) -> StartedWorker:
        """Start a worker here, and the relay that passes messages between its kernel and the notebook."""
        # ``connection`` is the content of the kernel's connection file on the notebook's host.
        setup, folder = WorkerSetup.decode(encoded), self._launcher.folder
        with self._lock:
            if setup.name not in self._given:
                free = set(range(self._room)) - set(self._given.values())
                # The place of its ``local_rank`` if that is free, else the first free one.
                self._given[setup.name] = setup.local_rank if setup.local_rank in free else min(free)
            place = self._first + self._given[setup.name]
        ip = str(folder / Path(connection["ip"]).name)
        file = folder / f"{Path(connection['ip']).name}.json"
        file.touch(mode=0o600)  # before the key is in it
        here = {**connection, "ip": ip}  # other sockets, the same key
        file.write_bytes(msgspec.json.encode(here))
        gpu = self._gpus[place % len(self._gpus)] if self._gpus else None
        local = msgspec.structs.replace(
            setup,
            connection_file=str(file),
            folder=str(folder),
            host=self.host,
            secret=self._secret,
            interface=self._interface,
            local_rank=place,
            local_world_size=self._places,
            device="cpu" if gpu is None else f"cuda:{gpu}",
            gpu=gpu,
        )
        name = setup.name

        def carry(batch: list[Parcel]) -> None:
            self._hub.ask("deliver", name, batch, timeout=0)

        # Make the relay before the process, which may end at once: `_on_end` needs the relay for the last output.
        relay = Relay.before_kernel(here, carry)
        with self._lock:
            earlier, self._relays[name] = self._relays.get(name), relay
        if earlier is not None:
            earlier.close()
        try:
            started = self._launcher.start(local, environment).result()
        except BaseException:  # Ctrl-C, too: nobody else would close the relay
            with self._lock:
                self._relays.pop(name, None)
            relay.close()
            raise
        return StartedWorker(started.pid, platform.node(), local.device)

    def free_places(self, names: Sequence[str]) -> None:
        """Free the places of workers that will not start again; else they keep them, also when they have ended."""
        with self._lock:
            for name in names:
                self._given.pop(name, None)

    def _on_end(self, name: str, how: int | str) -> None:
        """Tell the notebook that a worker has ended, and its last words, after its last output."""
        with self._lock:
            relay = self._relays.pop(name, None)

        def tell() -> None:
            if relay is not None and not self._ended.is_set():
                relay.drain(_LAST_OUTPUT_WITHIN, _OUTPUT_PASSES_WITHIN)
            self._hub.cast("end", name, how, self._launcher.last_words(name))
            if relay is not None:
                relay.close()

        # The launcher calls this in its own thread, so another one waits until the last output has passed.
        threading.Thread(target=tell, name="nbdist-ending", daemon=True).start()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended."""
        self._launcher.signal(name, number)

    def probe(self, name: str) -> Probe:
        """Return this host's report about a worker's process."""
        return self._launcher.probe(name).result()

    def free_port(self) -> int:
        """Return a port of this host on which nothing listens now."""
        return free_port(self.host)

    def deliver(self, name: str, batch: Sequence[Parcel]) -> None:
        """Pass messages of the notebook on to a worker's kernel; drop them if the worker has ended."""
        if (relay := self._relays.get(name)) is not None:
            relay.deliver(batch)


def _places_of_host(environment: Mapping[str, str], workers: int) -> tuple[int, int]:
    """Return the place on this host of the first of a keeper's ``workers``, and the number of places of all keepers."""
    # torchrun and Slurm start several keepers on one host, and number them. One without a number counts as the only
    # one.
    for local, size in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")):
        if (number := environment.get(local, "")).isdecimal():
            first = int(number) * workers
            keepers = re.match(r"\d+", environment.get(size, ""))  # Slurm writes 4(x2) for four on each of two hosts
            return first, max(int(keepers[0]) * workers if keepers else 0, first + workers)
    return 0, workers


def _require_own_address(host: str) -> None:
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        raise UsageError(
            f"{host} is no address of this host: {error}. Name one with --host, at which the other hosts reach it"
        ) from error
