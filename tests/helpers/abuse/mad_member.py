"""A member that has gone mad: it sends frames like those of calls, gradients and references, but mutated.

`attack` runs in a process of its own, which is a member of the world and so past the handshake.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from helpers.processes import workers
from nbdist import rpc
from nbdist.autograd.graph import messages as passes
from nbdist.autograd.graph import transport
from nbdist.ids import GlobalId
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.wire import codec
from nbdist.wire.messages import (
    Call,
    Cast,
    ChildAccept,
    Fork,
    ForkConfirm,
    ForkRequest,
    GiveBack,
    Message,
    Mode,
    Pong,
    Ready,
    Recording,
    Reply,
    RRefState,
    ShutdownState,
    Silence,
    State,
    Stop,
    UserDelete,
    Welcome,
)

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 2, 1 - (1 << 63), (1 << 64) - 2)
LARGEST = (1 << 64) - 1
"""The largest number that msgpack has room for."""


def attack(store: str, to: str, seed: int, lives: int, count: int) -> None:
    """Join the world at ``store`` again and again, and send ``count`` mutated messages to worker ``to`` each time.

    Prints the number of messages sent after each life. A life ends early where the worker has given this member up,
    which one mutated goodbye, rightly, brings about.
    """
    for life in range(lives):
        options = rpc.RpcBackendOptions(init_method=f"file://{store}")
        rpc.init_rpc(f"mad{life}", rank=10 + life, world_size=None, rpc_backend_options=options)
        agent = api.current_agent()
        victim = agent.find(to)
        link = agent.channel.connect(victim.addresses)
        sent = 0
        for frames in mutations(agent, victim.incarnation, random.Random(f"{seed} {life}"), count):
            if agent.links.connected(victim.incarnation) is None:
                break
            link.send(frames, "mad")
            sent += 1
        print(sent, flush=True)
        rpc.shutdown(graceful=False)


def mutations(agent: Agent, victim: int, chance: random.Random, count: int) -> Iterator[list[bytes]]:
    """Yield ``count`` messages to the agent with incarnation ``victim``, each with one to four mutations."""
    for number in range(count):
        message, frames = chance.choice(KINDS)(agent, victim, chance)
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        envelope: list[Any] = [agent.me.incarnation, victim, 10**6 + number, 1, 0, [], plain, []]
        level = chance.random()
        if level < 0.6:
            # The place of a number or a list inside of the message, and sometimes of the envelope.
            for _ in range(chance.randint(1, 3)):
                mutate(envelope if chance.random() < 0.05 else envelope[6], chance)
            first = msgspec.msgpack.encode(envelope)
        else:
            first = msgspec.msgpack.encode(envelope)
            if level < 0.8:
                first = scramble(first, chance)
        whole = [first, *frames]
        if level >= 0.8 or chance.random() < 0.1:
            at = chance.randrange(len(whole))
            act = chance.random()
            if act < 0.7:
                whole[at] = scramble(whole[at], chance)
            elif act < 0.8 and at:
                del whole[at]
            elif act < 0.9:
                whole.insert(at, whole[chance.randrange(len(whole))])
            else:
                chance.shuffle(whole)
        yield whole


def scramble(data: bytes, chance: random.Random) -> bytes:
    """Flip, cut, double or insert a few bytes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed)) if changed else 0
        act = chance.randrange(4)
        if act == 0 and changed:
            changed[at] = chance.randrange(256)
        elif act == 1:
            del changed[at : at + chance.randint(1, 8)]
        elif act == 2:
            changed[at:at] = changed[at : at + chance.randint(1, 16)]
        else:
            changed[at:at] = chance.randbytes(chance.randint(1, 4))
    return bytes(changed)


def mutate(fields: list[Any], chance: random.Random) -> None:
    """Replace one number, text or list somewhere in ``fields``."""
    places = list(_places(fields))
    if not places:
        return
    holder, at = chance.choice(places)
    old = holder[at]
    if isinstance(old, bool):
        holder[at] = not old
    elif isinstance(old, int):
        holder[at] = chance.choice(
            [*NUMBERS, min(old + 1, LARGEST), max(old - 1, -(1 << 63)), old // 2, chance.getrandbits(63)]
        )
    elif isinstance(old, str):
        holder[at] = chance.choice(["", "os:getpid", "no_such:thing", "é" * 300, old + "x", "\0"])
    elif isinstance(old, bytes):
        holder[at] = scramble(old, chance)
    elif isinstance(old, list):
        act = chance.randrange(3)
        holder[at] = [] if act == 0 else old * 3 if act == 1 else old[:-1]
    else:
        holder[at] = chance.choice([0, 1, "x", [], None, [1, 2, 3]])


def _places(fields: list[Any]) -> Iterator[tuple[list[Any], int]]:
    for at, value in enumerate(fields):
        yield fields, at
        if isinstance(value, list):
            yield from _places(value)


# -- what is mutated ------------------------------------------------------------------------------


def _id(agent: Agent, victim: int, chance: random.Random) -> GlobalId:
    """An id that may be one which the victim knows: of its own values, of this agent's, or of nobody's."""
    maker = chance.choice([agent.me.incarnation, victim, chance.getrandbits(60)])
    return GlobalId(chance.randrange(4), chance.randrange(40), maker)


def _fork(agent: Agent, victim: int, chance: random.Random) -> Fork:
    owner, parent = (chance.choice([agent.me.incarnation, victim]) for _ in range(2))
    state = State("torch", "Tensor", [2, 3], "torch.float32")
    return Fork(_id(agent, victim, chance), _id(agent, victim, chance), owner, parent, state)


def _call(agent: Agent, victim: int, chance: random.Random) -> tuple[Message, list[bytes]]:
    arguments: Any = chance.choice(
        [
            (1, "two", [3.0]),
            (torch.arange(24.0).reshape(4, 6)[:, 1:3],),
            (torch.arange(3.0, requires_grad=True), {"a": torch.ones(2, dtype=torch.bfloat16)}),
            (torch.nn.Linear(2, 3),),
            (workers.Counter(3),),
        ]
    )
    encoded = codec.encode(("workers:identity", arguments, {}), record=chance.random() < 0.5)
    recording = None
    if chance.random() < 0.5:
        edge = chance.choice([-1, 1, chance.getrandbits(40)])
        recording = Recording(chance.getrandbits(20), agent.me.incarnation, edge, chance.random() < 0.5)
    mode = chance.choice(list(Mode))
    result = _fork(agent, victim, chance) if mode in (Mode.REMOTE, Mode.METHOD_REMOTE) else None
    target = _id(agent, victim, chance) if mode in (Mode.FETCH, Mode.METHOD, Mode.METHOD_REMOTE) else None
    payload = encoded.payload
    if chance.random() < 0.3:
        payload = msgspec.structs.replace(payload, forks=[_fork(agent, victim, chance)])
    call = Call(
        chance.getrandbits(30), int(mode), "identity", payload, result=result, target=target, recording=recording
    )
    return call, [bytes(frame) for frame in encoded.frames]


def _shared(agent: Agent, victim: int, chance: random.Random) -> tuple[Message, list[bytes]]:
    """A call whose tensor lies in this agent's arena."""
    encoded = codec.encode(("workers:identity", (torch.ones(300_000),), {}), space=agent.sharing.spaces.get(victim))
    for slot in encoded.slots:
        slot.send()
    return Call(chance.getrandbits(30), 0, "identity", encoded.payload), [bytes(frame) for frame in encoded.frames]


def _reply(agent: Agent, victim: int, chance: random.Random) -> tuple[Message, list[bytes]]:
    encoded = codec.encode(torch.ones(3))
    return Reply(chance.randrange(200), chance.random() < 0.7, encoded.payload), [bytes(f) for f in encoded.frames]


def _reference(agent: Agent, victim: int, chance: random.Random) -> tuple[Message, list[bytes]]:
    one, other = _id(agent, victim, chance), _id(agent, victim, chance)
    state = State("torch", "Tensor", [2, 3], "torch.float32")
    made: list[Message] = [
        ForkRequest(one, other),
        ForkConfirm(one, other, state),
        ChildAccept(other),
        UserDelete(one, other),
        RRefState(one, state),
    ]
    return chance.choice(made), []


def _control(agent: Agent, victim: int, chance: random.Random) -> tuple[Message, list[bytes]]:
    made: list[Message] = [
        Stop(chance.randrange(200)),
        Ready(),
        Welcome(agent.me),
        Pong(chance.randrange(100), "x"),
        ShutdownState(chance.randrange(5), 1, 2),
        Silence(victim, chance.random() * 20),
        GiveBack([(chance.randrange(4), chance.choice([0, 1 << 20, chance.getrandbits(30)]))]),
    ]
    return chance.choice(made), []


def _gradients(agent: Agent, victim: int, chance: random.Random) -> tuple[Message, list[bytes]]:
    me, context = agent.me.incarnation, chance.getrandbits(20)
    pass_id = passes.PassId(me, chance.randrange(5))
    head = passes.Head(pass_id, context, chance.random() < 0.5, False, False, 0)
    token = passes.Token(me, chance.randrange(5), chance.random() < 0.5)
    made = [
        passes.Mark(head, token, [(chance.randrange(9), [0])]),
        passes.Gradients(head, token, chance.randrange(9), [0]),
        passes.Report(pass_id, 1, [token], [token], [(token, me)], False, []),
        passes.Marked(pass_id),
        passes.Cancel(pass_id, context),
        passes.Entered(context),
        passes.Release(context, chance.choice([me, victim])),
        passes.Turn(pass_id, False),
        passes.Granted(pass_id),
    ]
    encoded = codec.encode([torch.ones(2)])
    message = chance.choice(made)
    data = passes.encode(message)
    if chance.random() < 0.5:
        data = scramble(data, chance)
    return Cast(transport._TOPICS[type(message)], data, encoded.payload), [bytes(frame) for frame in encoded.frames]


KINDS = (_call, _call, _shared, _reply, _reference, _control, _gradients)
