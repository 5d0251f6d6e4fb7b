"""The member's end of a door: checks what clients send, and calls servers, placer and weights for them.

A client's message is the invitation's hello, an empty sign of life, ``bye``, or a call: (number, worker, name, method,
arguments, keywords, seconds). Anything else ends its link, and nothing more. An answer is (number, None, value) or
(number, name of the error's class, text); `NEWS` and `END` stand in the place of a number.

Three things hold whatever a client sends. It reaches no object but this swarm's servers, placer and weights, and of
these only the methods that were published for clients (`nbdist.rpc.named`). It names its own sessions only: the
doorkeeper puts the link's name in front of each session's name. And all arguments are of the types in `ARGUMENTS`.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import time
import weakref
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, convert

from nbdist.channel.door import NAME_BYTES, Door
from nbdist.errors import EncodeError, NbdistError, ProtocolError
from nbdist.rpc import api
from nbdist.rpc.futures import Future, outcome_of
from nbdist.swarm import model_cache
from nbdist.swarm.adapter import CACHE, LayerCall
from nbdist.swarm.client.crew import Crew
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.directory.directory import USAGE, SwarmNews
from nbdist.swarm.directory.placing import PlacerReplaced
from nbdist.swarm.doors.client_invitation import ClientInvitation
from nbdist.swarm.history import Step
from nbdist.swarm.server.neighbours import Address
from nbdist.wire import plain

NEWS, END, WELCOME = -1, -2, 0
SILENT_SECONDS = 12.0  # after which either end takes the other for dead, as agents do (`nbdist.wire.peer`)
_MOST = 1000  # links; calls of a link without an answer
_LARGEST_CALL = 1 << 18  # bytes of a call without its tensors: hashes of keys that collide take seconds for more
_LONGEST = 3600.0  # seconds that a client's call may take

_Name = Annotated[str, Meta(max_length=100)]
_Block = Annotated[int, Meta(ge=0, le=1 << 20)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Seconds = Annotated[float, Meta(ge=0)]
ARGUMENTS: dict[str, Any] = {
    "info": tuple[()],
    "open": tuple[_Name, _Block, Literal[0, 1, 2], int, _Count, tuple[_Count, _Count, _Count, _Seconds]],
    "link": tuple[_Name, _Block, Address, _Block],
    "close": tuple[_Name, _Block | None],
    "push": tuple[_Name, _Block, int, torch.Tensor],
    "step": tuple[_Name, _Block, int, Step],
    "adopt": tuple[_Name, _Block, _Block, Address, _Block, int, _Seconds],
    "returns_tuple": tuple[_Block, torch.Tensor, LayerCall],
    "news": tuple[()],
    "mend": tuple[_Block, _Block, tuple[str, ...]],
    "texts": tuple[()],
    "read": tuple[list[str]],
    "note_usage": tuple[_Count, _Count, Annotated[float, Meta(ge=0, le=1e9)], tuple[_Count, _Count]],
}
"""The types of the arguments of all methods for clients: of servers, of the placer, and of the weights.

The door itself takes "note_usage": sessions, caches in bytes, tokens a second, and texts over HTTP as in `Usage`.
"""
_KEYWORDS = dict[Literal["pushed", "push", "behind", "patience"], bool | _Seconds]  # of "step"; clients spend no points
_CALL = tuple[int, str, str, str, list[Any], dict[str, Any], float]


@dataclass(eq=False)
class _Link:
    """The link of one client."""

    who: bytes  # by which the door knows it; nobody else must learn it
    name: str  # in front of the names of its sessions
    heard: float
    id: int = field(default_factory=lambda: -1 - secrets.randbits(62))  # among clients' incarnations, which are from 0
    pending: set[int] = field(default_factory=set)  # the numbers of calls without an answer


class Doorkeeper:
    """A door to one swarm. All but `close` and the answers run in the door's thread."""

    def __init__(self, crew: Crew, journal: Journal, config: Any, weights: Address, host: str, port: int) -> None:
        """Open the door at ``host`` and ``port`` (0 for a free one), until `close`, or until ``crew`` is collected.

        ``config`` is that of the model. Raises the errors of `Door`.
        """
        self._agent = api.current_agent()
        self._crew = weakref.ref(crew)  # a swarm ends when only clients use it
        self._config, self._weights = config, weights
        self._links: dict[bytes, _Link] = {}
        self._names = (f"{secrets.token_hex(4)}.{number}" for number in itertools.count())  # of no other door
        self._told: SwarmNews | None = None  # the last news
        self._door = Door(host, (port, port) if port else None, self._take, self._tick)
        self.invitation = ClientInvitation(self._door.address, self._door.key, secrets.token_urlsafe(32))
        self._forget = journal.listen(self._tell)

    def close(self, why: str) -> None:
        """End all links, whose clients are told ``why``, and listen no more."""
        self._forget()
        for who in list(self._links):
            self._end(who, why)
        self._door.close()

    # -- what clients send --------------------------------------------------------------------

    def _take(self, who: bytes, data: bytes) -> None:
        link, crew = self._links.get(who), self._crew()
        try:
            if crew is None or crew.ended or data == b"bye":
                self._end(who, "the swarm was closed")
            elif link is None:
                self._welcome(crew, who, data)
            else:
                link.heard = time.monotonic()
                with crew.working():
                    self._call(crew, link, data) if data else self._door.send(who, b"")
        except Exception as error:  # the client's fault, whatever it is: only its own link ends
            self._end(who, f"this client has sent what no client sends: {error}")

    def _welcome(self, crew: Crew, who: bytes, hello: bytes) -> None:
        if not hmac.compare_digest(hello, self.invitation.hello) or len(who) != NAME_BYTES or len(self._links) >= _MOST:
            raise ProtocolError(
                "it was silent for too long, or its invitation is not of this door, or it has another version of "
                f"nbdist, or there are {_MOST} clients already"
            )
        self._links[who] = _Link(who, next(self._names), time.monotonic())
        policy = {name: value for name, value in asdict(crew.policy).items() if name != "spend"}
        facts = list(crew.sizes), crew.options.cache_bytes, policy
        if (news := crew.news) is not None:
            self._send(who, WELCOME, None, (news.placer, self._weights, facts, news.for_outside()))

    def _call(self, crew: Crew, link: _Link, data: bytes) -> None:
        number, to, name, method, given, keywords, seconds = plain.decode(data, _CALL, _LARGEST_CALL)
        if number in link.pending or len(link.pending) >= _MOST:
            raise ProtocolError(f"a call with the number of another one, or {_MOST} calls at a time")
        seconds = min(_LONGEST, seconds) if seconds > 0 else _LONGEST  # NaN, too
        kind, within = ARGUMENTS.get(method), partial(min, _LONGEST)  # in this order, NaN gives the limit
        args = list(convert(given, kind)) if kind is not None else []  # else `named` refuses the call
        keywords = {key: within(value) for key, value in convert(keywords, _KEYWORDS).items()}
        placers = [crew.news.placer] if crew.news is not None else []
        known = [*placers, self._weights, *(member.address for member in crew.members)]
        for error, each in [("NotOffered", Address(to, name)), *(("NoSession", arg) for arg in args)]:
            if isinstance(each, Address) and each not in known:
                why = f"{each.worker} has no {each.name.partition(' ')[0]} of this swarm (any more)"
                return self._send(link.who, number, error, why)
        if args and isinstance(args[0], str):
            args[0] = f"{link.name}/{args[0]}"
        match method:
            case "note_usage":
                usage = {"name": "an invited client", **dict(zip(USAGE, args, strict=True))}
                crew.note_usage(link.id, usage if args[0] or any(args[3]) else {})
                return self._send(link.who, number, None, None)
            case "open":
                *counts, patience = args[5]
                cache = model_cache.described(args[2], self._config)
                args[2:] = cache, crew.incarnation, args[4], (*counts, min(crew.policy.cache_timeout, patience))
            case "adopt":
                args[5:] = crew.incarnation, min(crew.policy.step_timeout, args[6])
            case "step":
                calls = [_layer_call(each) for each in convert(args[3].calls, list[LayerCall])]
                args[3] = args[3]._replace(calls=tuple(calls))
            case "returns_tuple":
                args[2] = _layer_call(args[2])
        link.pending.add(number)
        # No variable holds the future: an error of a lost worker keeps this frame, and the future keeps the error.
        self._agent.at(to, name).for_client(method, tuple(args), keywords, seconds).add_done_callback(
            partial(self._answer, link, number)
        )

    # -- what clients get ---------------------------------------------------------------------

    def _answer(self, link: _Link, number: int, done: Future[Any]) -> None:
        value, error = outcome_of(done)
        link.pending.discard(number)
        if self._links.get(link.who) is not link:
            return self._drop_sessions(link)  # again: this call may have opened one after the first time
        try:
            if error is None:
                return self._send(
                    link.who, number, None, value.for_outside() if isinstance(value, SwarmNews) else value
                )
        except EncodeError as unplain:
            error = unplain
        # A client hears of the next placer by the news.
        name = "NotOffered" if isinstance(error, PlacerReplaced) else type(error).__name__
        self._send(link.who, number, name, str(error))

    def _send(self, who: bytes, *message: Any) -> None:
        self._door.send(who, plain.encode(message))

    def _tell(self) -> None:
        """Tell all clients which servers there are now, if that is new. The threads that change this call it."""
        crew = self._crew()
        if crew is not None and (news := crew.news) is not None and news.is_newer(self._told):
            self._told = news
            for who in list(self._links):
                self._send(who, NEWS, None, news.for_outside())

    def _tick(self) -> None:
        if self._crew() is None:
            self._door.close()
        for link in list(self._links.values()):
            if time.monotonic() - link.heard > SILENT_SECONDS:
                self._end(link.who, f"this client was silent for {SILENT_SECONDS:g} s")

    def _end(self, who: bytes, why: str) -> None:
        self._send(who, END, None, why)
        if (link := self._links.pop(who, None)) is not None:
            self._drop_sessions(link)

    def _drop_sessions(self, link: _Link) -> None:
        if (crew := self._crew()) is None:
            return  # its servers are gone
        with contextlib.suppress(NbdistError):  # RPC may have ended
            crew.note_usage(link.id, {})
            for member in crew.there:
                crew.send(member, "close", link.name)


def _layer_call(call: LayerCall) -> LayerCall:
    """Return a call as the client's layer got it: tuples have become lists on the way, and `CACHE` its value."""

    def restored(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return CACHE if isinstance(value, str) and value == CACHE.value else value

    return LayerCall(tuple(map(restored, call.args)), {name: restored(each) for name, each in call.kwargs.items()})
