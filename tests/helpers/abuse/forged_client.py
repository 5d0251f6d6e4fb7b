"""A program that holds a valid invitation of a swarm and nbdist's source, and sends forged messages by it.

``python -m helpers.abuse.forged_client INVITATION SEED COUNT MARKER RECORD VICTIM...``: MARKER is a file that a pickle
would make, RECORD gets all bytes that arrive, each VICTIM is the whole name of a session of somebody else's. Prints, as
JSON, how many messages of each kind were sent, and which values and errors have come back.
"""

from __future__ import annotations

import collections
import json
import pickle
import queue
import random
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from nbdist.channel.door import DoorLink
from nbdist.errors import ProtocolError
from nbdist.ids import GlobalId
from nbdist.swarm.adapter import LayerCall
from nbdist.swarm.doors.client_invitation import ClientInvitation
from nbdist.swarm.doors.doorkeeper import ARGUMENTS, END, NEWS, WELCOME
from nbdist.swarm.history import Operation, Step
from nbdist.wire import codec, messages, plain


class Marks:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


class Forger:
    """One after the other, links with forged messages. Each link begins as that of an honest client."""

    def __init__(self, invitation: ClientInvitation, seed: int, marker: str, record: str, victims: list[str]) -> None:
        self.invitation, self.marker, self.victims = invitation, marker, victims
        self.record = Path(record)
        self.record.touch()
        self.choose = random.Random(seed)
        self.arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.link: DoorLink | None = None
        self.number = 0
        self.kinds: dict[int, str] = {}  # of messages, by their calls' numbers
        self.sent: collections.Counter[str] = collections.Counter()
        self.values: dict[str, list[str]] = collections.defaultdict(list)
        self.errors: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.connect()

    def connect(self) -> None:
        """Begin a link, and learn what the door tells each client."""
        if self.link is not None:
            self.link.close()
        self.arrived = queue.SimpleQueue()
        self.link = DoorLink(self.invitation.address, self.invitation.key, self.arrived.put, lambda: None)
        self.link.send(self.invitation.hello)
        while True:
            data = self.get()
            if not data:
                continue
            number, _, value = plain.decode(data, Any)
            assert number in (WELCOME, NEWS), value
            if number == WELCOME:
                self.placer, self.weights, facts, (_, _, _, entries, *_) = value
                self.blocks = len(facts[0])
                self.servers = [each[2] for each in entries]
                return

    def get(self, timeout: float = 20.0) -> bytes:
        """Return what arrives next, and record it."""
        data = self.arrived.get(timeout=timeout)
        with self.record.open("ab") as file:
            file.write(data)
        return data

    def call(self, at: Any, method: str, arguments: Any, keywords: Any = None, seconds: Any = 5.0) -> bytes:
        """Return a call's message."""
        self.number += 1
        return plain.encode((self.number, *at, method, arguments, keywords or {}, seconds))

    def attack(self, count: int) -> None:
        """Send ``count`` forged messages, drawn by the seed."""
        kinds = [getattr(self, name) for name in sorted(dir(self)) if name.startswith("forge_")]
        for _ in range(count):
            forge = self.choose.choice(kinds)
            parts = forge()
            kind = forge.__name__.removeprefix("forge_")
            self.kinds.setdefault(self.number, kind)  # unless that is an earlier call
            self.sent[kind] += 1
            assert self.link is not None
            self.link.send(*(parts if isinstance(parts, list) else [parts]))
            self.link.send(b"")  # its answer shows that the door has read the message
            self.hear(kind)
        for _ in range(200):  # late ones
            try:
                self.note("late", self.get(0.05))
            except queue.Empty:
                break

    def hear(self, kind: str) -> None:
        while True:
            data = self.get()
            if not data:
                return
            if self.note(kind, data):
                return self.connect()

    def note(self, kind: str, data: bytes) -> bool:
        """Note what has arrived; return True if it ends the link."""
        if not data:
            return False
        number, failure, value = plain.decode(data, Any)
        kind = self.kinds.get(number, "damage") if number > WELCOME else kind  # an answer may be late
        if number == END:
            self.errors[kind]["end"] += 1
            return True
        if failure is not None:
            self.errors[kind][failure] += 1
        elif number not in (NEWS, WELCOME) and value is not None:
            self.values[kind].append(repr(value)[:100])
        return False

    # -- what is forged -----------------------------------------------------------------------

    def pickled(self) -> bytes:
        """A pickle, a function by value, or a call of nbdist's own codec, that makes the marker."""
        marks, marker = Marks(self.marker), self.marker
        whole = codec.encode((Path.touch, (Path(self.marker),), {}))
        return self.choose.choice(
            [
                pickle.dumps(marks),
                pickle.dumps(marks, 0),
                cloudpickle.dumps(lambda: Path(marker).touch()),
                b"".join(bytes(each) for each in whole.frames),
            ]
        )

    def forge_pickle(self) -> Any:
        data = self.pickled()
        head = plain.msgspec.msgpack.encode((data, []))
        ext = plain.msgspec.msgpack.encode((plain.msgspec.msgpack.encode(plain.msgspec.msgpack.Ext(1, data)), []))
        return self.choose.choice([data, len(head).to_bytes(4) + head, len(ext).to_bytes(4) + ext, [data, data]])

    def forge_pickle_as_argument(self) -> bytes:
        data = self.pickled()
        server = self.choose.choice(self.servers)
        step = Step((), torch.zeros(1, 1, 32), (LayerCall((data,), {"hidden": data}),))
        made: list[Any] = [
            ("open", ["a", 0, data, 1, 1, (1, 1, 1, 1.0)]),
            ("step", ["a", 0, 1, step]),
            ("push", ["a", 0, 1, data]),
            ("returns_tuple", [0, torch.zeros(1, 1, 32), LayerCall((data,), {})]),
            ("adopt", ["a", 0, 2, data, 0, 1, 1.0]),
        ]
        return self.call(server, *self.choose.choice(made))

    def forge_message_of_agents(self) -> Any:
        """Frames with which members meet, hold references, run functions and go backward."""
        id = GlobalId(0, self.choose.randrange(100), self.choose.getrandbits(62))
        record = messages.Record("mad", 7, 7, ["tcp://127.0.0.1:1"], "here", 1, 1, None)
        whole = codec.encode((Path.touch, (Path(self.marker),), {}))
        message = self.choose.choice(
            [
                messages.Hello(record),
                messages.Welcome(record),
                messages.Ready(),
                messages.Goodbye("left", True),
                messages.ForkRequest(id, id),
                messages.UserDelete(id, id),
                messages.AskShutdown(1, ("", ""), 1),
                messages.Silence(7, 100.0, 7),
                messages.Call(1, 0, "touch", whole.payload),
                messages.Cast("backward", b"", whole.payload),
            ]
        )
        first = messages.encode_envelope(messages.Envelope(7, 7, 1, 1, 0, [], message))
        frames = [first, *(bytes(each) for each in whole.frames)]
        return self.choose.choice([first, b"".join(frames), frames])

    def forge_other_object(self) -> bytes:
        """Objects of the cluster, of the autograd engine, of other swarms."""
        worker = self.choose.choice([each[0] for each in self.servers])
        name = self.choose.choice(
            ["collectives", "keeper", "output", "mending", "boards", "cells", "server 1.0", "swarm 1.0", "pipeline 1"]
        )
        method = self.choose.choice(["act", "start", "signal", "info", "step", "push", "read", "run", "__call__"])
        return self.call((worker, name), method, [self.choose.choice(["worker0", 9, self.marker])])

    def forge_other_method(self) -> bytes:
        """Methods that exist, and are not for clients."""
        at = self.choose.choice([self.placer, self.weights, *self.servers])
        made = [
            ("load", [0, self.blocks]),
            ("unload", [[]]),
            ("export", [self.choose.choice(self.victims), 0, 0, self.blocks, 1.0]),
            *(("join", ["worker0", 0, 1]), ("relieve", ["worker0"]), ("dismiss", [self.servers[0]])),
            *(("shift", [0, self.blocks, "worker0"]), ("kill", ["worker0"]), ("lacks", [[], [0]])),
            *(("facts", []), ("watch", [self.servers[0]]), ("close", []), ("start", [[], []])),
            *(("__reduce__", []), ("__init__", []), ("__class__", []), ("describe", []), ("tokenizer", [])),
            *(("forward", [0, [torch.zeros(1, 1, 32), []]]), ("look", []), ("find", [self.victims[0], 0])),
        ]
        return self.call(at, *self.choose.choice(made))

    def forge_session_of_another(self) -> bytes:
        """The whole name of a victim's session, and parts of it, at the servers that have it."""
        whole = self.choose.choice(self.victims)
        id = self.choose.choice([whole, whole.rpartition("/")[2], f"../{whole}", f"/{whole}", ""])
        begin = self.choose.randrange(0, self.blocks, 2)
        step = Step((), torch.zeros(1, 1, 32), (LayerCall((), {}),) * self.choose.randint(0, 2))
        made: list[Any] = [
            ("step", [id, begin, self.choose.choice([-1, 0, 1, 5, 1 << 40]), step]),
            ("step", [id, begin, 1, step], {"pushed": True, "patience": 0.01}),
            ("push", [id, begin, self.choose.randrange(40), torch.randn(1, 1, 32)]),
            ("link", [id, begin, self.servers[0], 0]),
            ("close", [id, self.choose.choice([None, begin])]),
            ("adopt", [id, begin, self.blocks, self.choose.choice(self.servers), begin, 1, 0.1]),
        ]
        return self.call(self.choose.choice(self.servers), *self.choose.choice(made))

    def forge_arguments(self) -> bytes:
        """Keywords that would replace an argument, addresses of others, numbers without measure, other types."""
        victim, (worker, name) = self.choose.choice(self.victims), self.choose.choice(self.servers)
        other = self.choose.choice([(worker, "collectives"), ("notebook", name), ("nobody", "server"), (worker, "")])
        huge, far = self.choose.choice([1 << 62, -1, -(1 << 62), 1 << 63]), self.choose.choice([1e300, -1.0, 1 << 62])
        made: list[Any] = [
            ("close", [], {"id": victim}),
            ("close", ["a"], {"id": victim}),
            ("step", ["a", 0, 1], {"step": []}),
            ("link", ["a", 0, other, 0]),
            ("link", ["a", 0], {"to": other, "at": 0}),
            ("adopt", ["a", 0, 2, other, 0, 1, 1.0]),
            ("open", ["a", 0, 1, 1, huge, (1, 1, 1, 1.0)]),
            ("open", ["a", 0, 1, 1, 1, (huge, 1, 1, 1.0)]),
            ("open", ["a", 0, 1, 1, 1, (1, 1, 1, far)]),
            ("open", ["a" * 10_000, 0, 1, 1, 1, (1, 1, 1, 1.0)]),
            ("step", ["a", huge, 1, Step((), torch.zeros(1), ())], {"behind": far, "patience": far}),
            ("step", [7, 0, 1, None], {"points": 1e9}),
            ("returns_tuple", [0, "hidden", [[], {}]]),
        ]
        mend = ("mend", self.choose.choice([[0, huge, []], [huge, 1, []], [0, 1, [7]], [0]]))
        if self.choose.random() < 0.2:
            return self.call(self.placer, *mend)
        return self.call((worker, name), *self.choose.choice(made))

    def forge_own_session(self) -> bytes:
        """A session of the forger's own, with operations and arguments that no model makes."""
        hostile = self.choose.choice(
            ["__init__", "__reduce__", "__class__", "__setstate__", "reset", "crop", "lazy_initialization"]
        )
        before = (Operation(hostile, self.choose.choice([(), (self.marker,), (-5,), ({},)])),)
        shape = self.choose.choice([(1, 1, 32), (1, 1, 7), (0, 1, 32), (1, 0, 32), (3,), ()])
        odd = self.choose.choice(["cache", self.marker, -1, torch.ones(1), {"a": [1]}, None])
        call = LayerCall(self.choose.choice([(), (odd,)]), {self.choose.choice(["past_key_values", "x", "self"]): odd})
        made: list[Any] = [
            ("open", ["own", 0, self.choose.choice([0, 1, 2]), 1, 5, (1, 1, 1, 0.1)]),
            ("step", ["own", 0, self.choose.randint(-1, 5), Step(before, torch.zeros(shape), (call,))]),
            ("step", ["own", 0, self.choose.randint(-1, 5), Step((), torch.zeros(shape), (call,) * 20)]),
            ("push", ["own", 0, 5, torch.zeros(shape)]),
            ("returns_tuple", [self.choose.randrange(9), torch.zeros(shape), call]),
        ]
        return self.call(self.choose.choice(self.servers), *self.choose.choice(made))

    def forge_damage(self) -> bytes:
        """A message that is right but for some bits, or its end."""
        data = bytearray(self.choose.choice([self.forge_own_session, self.forge_session_of_another, self.honest])())
        for _ in range(self.choose.randint(0, 5)):
            data[self.choose.randrange(len(data))] ^= 1 << self.choose.randrange(8)
        return bytes(data[: self.choose.choice([len(data), self.choose.randrange(1, len(data))])])

    def honest(self) -> bytes:
        return self.call(self.choose.choice(self.servers), "info", [])


def main() -> None:
    path, seed, count, marker, record, *victims = sys.argv[1:]
    assert {"open", "step"} <= ARGUMENTS.keys()
    forger = Forger(ClientInvitation.read(Path(path)), int(seed), marker, record, victims)
    try:
        forger.attack(int(count))
    except ProtocolError as error:
        raise AssertionError("the door has sent what it must not") from error
    print(json.dumps([forger.sent, forger.values, forger.errors]))


if __name__ == "__main__":
    main()
