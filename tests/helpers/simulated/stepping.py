"""A world whose agents run in one thread, one message after the other, with a clock that stands still.

The agents are the ones that ship, over the in-process channel. What their threads do otherwise is done here by whoever
waits: before a thread sleeps, all messages under way are read and all jobs run, until nothing is left to do. So each
run of the same program takes the same steps, and counts of them can be compared between commits.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections import Counter, deque

from nbdist.rpc.here import here
from nbdist.rpc.waits import set_blocking_hook
from nbdist.testing import World


class Jobs:
    """What stands in for an agent's pool: jobs wait here until the world takes its next step."""

    threads = 0

    def __init__(self):
        self.waiting = deque()

    def start(self):
        pass

    def submit(self, job):
        self.waiting.append(job)

    @property
    def active(self):
        return len(self.waiting)

    def close(self, timeout):
        return True


class Blocked:
    """The time in which a thread waits for others: they do all their work at its beginning."""

    def __init__(self, world):
        self.world = world

    def __enter__(self):
        self.world.settle()

    def __exit__(self, *error):
        pass


class SteppedWorld(World):
    """Two or more agents, of which the calling thread does all the work."""

    def __init__(self, size=2, **options):
        super().__init__(size, **options)
        for agent in self.agents:
            agent.pool.close(10.0)
            agent.pool = Jobs()
        self.on = 0
        """The index of the agent for which something runs."""
        self.sent = Counter()
        """How many messages each agent has sent."""
        self._busy = False

    def __enter__(self):
        self._clock = time.monotonic
        time.monotonic = itertools.repeat(self._clock()).__next__  # in C: calling it is no call of a Python function
        set_blocking_hook(self._while_blocked)
        self._active = self.agents[0].activate()
        self._active.__enter__()
        return self

    def __exit__(self, *error):
        self._active.__exit__(*error)
        set_blocking_hook(None)
        time.monotonic = self._clock
        super().__exit__(*error)

    def _while_blocked(self):
        return Blocked(self)

    def settle(self):
        """Read all messages and run all jobs, until there are none."""
        before = self.on
        while sum(self._step(index) for index in range(len(self.agents))):
            pass
        self.on = before

    def _step(self, index):
        """Let one agent do one thing; return whether there was anything to do."""
        agent = self.agents[index]
        self.on = index
        if agent.pool.waiting:
            job = agent.pool.waiting.popleft()
        elif agent.channel.arrived.empty():
            if not agent.references.holds.ended:
                return False
            agent.references.release_ended()
            return True
        else:
            job = agent.read(0)
        if job is not None:
            before, here.agent = here.agent, agent
            try:
                job()
            finally:
                here.agent = before
        return True

    def count_calls(self, operation):
        """Return how many Python functions each agent calls during an operation and what follows from it.

        Counted are calls of functions, and of generators each time they go on; not those of this file.
        """
        counts = Counter()

        def profile(frame, event, _):
            if event == "call" and frame.f_code.co_filename != __file__:
                counts[self.on] += 1

        gc.collect()
        gc.disable()  # a collection calls finalisers, now of this operation and now of the one before
        sys.setprofile(profile)
        try:
            operation()
            self.settle()
        finally:
            sys.setprofile(None)
            gc.enable()
        return [counts[index] for index in range(len(self.agents))]

    def count_messages(self, operation):
        """Return the kinds of the messages that are sent during an operation and what follows from it, in order."""
        from nbdist.channel.inprocess import InProcessLink

        kinds = []
        plain = InProcessLink.send

        def send(link, frames, kind):
            kinds.append(kind)
            plain(link, frames, kind)

        InProcessLink.send = send
        try:
            operation()
            self.settle()
        finally:
            InProcessLink.send = plain
        return kinds
