"""`Transport`: how contexts, passes and watches reach the other workers, and this worker's threads.

It sends the messages of `nbdist.autograd.graph.messages` as casts, each kind under a topic of its own, and hands the
ones that arrive to whoever has registered for their kind: `Recorder` does so for all kinds but `Freeze`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from nbdist.autograd.graph import messages
from nbdist.autograd.graph.forward_nans import NanCheck
from nbdist.autograd.graph.messages import PassMessage
from nbdist.autograd.graph.noting import noted
from nbdist.errors import EncodeError, NbdistError
from nbdist.gpus import side_streams
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc import devices
from nbdist.rpc.agent import Agent
from nbdist.rpc.pool import Job
from nbdist.wire import codec
from nbdist.wire.messages import Cast, Payload


class Transport:
    """Sends and receives the messages of one agent's passes. Workers are named by their incarnations.

    Any thread may call any method.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.me = agent.me.incarnation
        self.name = agent.me.name

    def name_of(self, worker: int) -> str:
        """Return the name of a worker, dead or alive."""
        return self._agent.name_of(worker)

    def is_there(self, worker: int) -> bool:
        """Return whether this agent is still connected to a worker."""
        return self._agent.links.connected(worker) is not None

    def submit(self, job: Job) -> None:
        """Run a job in a thread of the agent's pool; its errors are logged."""
        self._agent.submit(job)

    def noting(self, context: Any) -> AbstractContextManager[None]:
        """Return the block in which a thread notes lines, or raises ForwardNaN, as the `Context` asks."""
        return noted(lines=context.lines, check=NanCheck(self.name, self.name_of) if context.check else None)

    # -- sending ------------------------------------------------------------------------------

    def post(self, to: int, message: PassMessage, body: Any = None) -> None:
        """Send a message to a worker, this one included; raises WorkerLost, or EncodeError for the ``body``."""
        topic, data, agent = _TOPICS[type(message)], messages.encode(message), self._agent
        if body is None:
            agent.post(to, Cast(topic, data, _NO_PAYLOAD))
            return
        if CUDA_IS_BUILT and type(message) is messages.Gradients:  # computed on streams of other threads, perhaps
            side_streams.catch_up(body)
        space = agent.sharing.spaces.get(to)
        connection = agent.links.connections.get(to)
        record = connection.record if connection is not None else None
        mapped = agent.me.device_maps or (record is not None and record.device_maps)
        is_usual = type(message) is messages.Gradients and not mapped
        usual = messages.encode_usual_gradients(body, space) if is_usual else None
        if usual is not None:
            agent.post(to, Cast(topic, data, usual[0]), usual[1])
            return
        where = devices.for_gradients(agent.me, record)
        try:
            encoded = codec.encode(body, by_value=True, devices=where, space=space)
        except EncodeError as error:
            what = "a gradient" if type(message) is messages.Gradients else "the error of a backward pass"
            raise EncodeError(f"{what} {error}") from error.__cause__
        agent.post(to, Cast(topic, data, encoded.payload), encoded.frames, slots=encoded.slots)

    def tell(self, to: int, message: PassMessage, body: Any = None) -> None:
        """Send a message, and do nothing if the worker is gone: `post` raises then."""
        try:
            self.post(to, message, body)
        except NbdistError:
            return  # the worker is gone, and with it all that the message is about

    # -- receiving ----------------------------------------------------------------------------

    def handle(self, kind: type, act: Callable[[Any, int], Job | None]) -> None:
        """Register ``act(message, sender)`` for a kind of message; the reading thread calls it, a pool runs the job."""

        def on_cast(cast: Cast, sender: int, frames: list[bytes]) -> Job | None:
            return act(messages.decode(cast.data), sender)

        self._agent.handle_cast(_TOPICS[kind], on_cast)

    def handle_with_value(self, kind: type, act: Callable[[Any, Any, Payload, list[bytes]], None]) -> None:
        """Register ``act(message, value, payload, frames)`` for a kind of message, in a thread of the pool.

        For a large value, ``act`` gets `codec.NOT_DECODED`, and decodes ``frames`` by their ``payload`` itself.
        """

        def on_cast(cast: Cast, sender: int, frames: list[bytes]) -> Job:
            # Small values are decoded before another thread is woken to read: making tensors releases the GIL, which
            # that thread would take.
            value = codec.decode_early(cast.payload, frames)
            return partial(act, messages.decode(cast.data), value, cast.payload, frames)

        self._agent.handle_cast(_TOPICS[kind], on_cast)


_TOPICS: dict[type, str] = {kind: f"autograd.{kind.__name__.lower()}" for kind in PassMessage.__subclasses__()}
_NO_PAYLOAD = Payload()
