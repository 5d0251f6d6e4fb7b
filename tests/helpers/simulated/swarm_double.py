"""A swarm as a map knows one: for tests of the map alone. A kernel can run this file, too."""


class Swarm:
    """Says what it is told to say, and notes what is asked of it."""

    __module__ = "nbdist.swarm.swarm"  # by which it is known to the shell

    def __init__(self, count=30, servers=(), *, ended=False, **more):
        self.told = {"count": count, "bytes": 18_000_000 * count, "servers": list(servers)}
        self.told |= {"clients": [], "route": [], "session": None, "log": [], **more}
        self.killed = []
        self.listeners = []
        self.looks = 0
        self.ended = ended

    def __repr__(self):
        return f"<Swarm of {self.told['count']} blocks>"

    def snapshot(self):
        self.looks += 1
        return dict(self.told)

    def listen(self, callback):
        self.listeners.append(callback)

        def forget():
            if callback in self.listeners:
                self.listeners.remove(callback)

        return forget

    def kill(self, name):
        self.killed.append(name)

    def tell(self, **more):
        """There is news."""
        self.told = {**self.told, **more}
        for callback in list(self.listeners):
            callback()


def server(name, *blocks, state="online", **more):
    """One worker."""
    nbytes = sum(18_000_000 * (end - begin) for begin, end in blocks)
    known = {"note": "", "nbytes": nbytes, "cache": 1_200_000, "budget": 50_000_000, "sessions": 1, "steps": 57}
    return {"name": name, "state": state, "blocks": [list(run) for run in blocks], **known, **more}


def three():
    """A swarm of three workers, of which one is gone, during a session."""
    return Swarm(
        servers=[
            server("worker0", (0, 10), (20, 22)),
            server("worker1", (22, 30), budget=None, cache=300),
            server("worker2", state="gone", note="WorkerLost: <killed>", cache=0, sessions=0),
        ],
        route=[["worker0", 0, 10], ["worker2", 10, 20], ["worker0", 20, 22], ["worker1", 22, 30]],
        session={"id": "4711.3", "tokens": 57, "rate": 23.44, "state": "recovering"},
        log=[[1763812345.12, "worker2, which had blocks 10-19, is gone: WorkerLost: <killed>"]],
    )


def large():
    """A swarm of many blocks on many workers."""
    servers = [server(f"worker{n}", (5 * n, 5 * n + 5)) for n in range(16)]
    route = [[f"worker{n}", 5 * n, 5 * n + 5] for n in range(16)]
    return Swarm(80, servers, route=route, session={"id": "1.1", "tokens": 1, "rate": None, "state": "idle"})
