"""Real worker processes for tests, and the functions that they run for others.

The test's own process is ``worker0``; the others are separate interpreters. Functions that must travel by
reference live here, since test modules cannot be imported by name.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until
from nbdist import rpc
from nbdist.wire import codec


class Workers:
    """The other processes of a world."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, code: str, **environment: str) -> subprocess.Popen[str]:
        """Another interpreter that runs ``code``."""
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **python_path(TESTS), "OMP_NUM_THREADS": "1", **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes[name] = process
        return process

    def kill(self, name: str) -> float:
        """SIGKILL; the moment it happened."""
        process = self.processes[name]
        moment = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        return moment

    def output(self, name: str, timeout: float = 60) -> tuple[str, str]:
        """What a process printed, once it has ended."""
        return self.processes[name].communicate(timeout=timeout)

    def end(self) -> None:
        """Leave no process behind."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


def member(
    name: str, rank: int, world_size: int | None, store: str, options: str = "", then: str = "", first: str = ""
) -> str:
    """Code for a member that does ``first``, joins, does ``then``, and shuts down with the others."""
    return (
        "import torch\n"
        "from helpers.processes import workers\n"
        "from nbdist import rpc\n"
        f"{first}\n"
        f"rpc.init_rpc({name!r}, rank={rank}, world_size={world_size}, rpc_backend_options="
        f"rpc.RpcBackendOptions(init_method='file://{store}'{', ' + options if options else ''}))\n"
        f"{then}\n"
        "rpc.shutdown()\n"
    )


@contextlib.contextmanager
def world(
    size: int, *, options: dict[str, Any] | None = None, graceful: bool = True, then: str = ""
) -> Iterator[Workers]:
    """A fixed world: this process as worker0, and ``size - 1`` others; yields those."""
    store = tempfile.mktemp(prefix="nbdist-test-")
    options = options or {}
    described = ", ".join(f"{key}={value!r}" for key, value in options.items())
    others = Workers()
    try:
        for rank in range(1, size):
            others.start(f"worker{rank}", member(f"worker{rank}", rank, size, store, described, then))
        rpc.init_rpc(
            "worker0",
            rank=0,
            world_size=size,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}", **options),
        )
        ended = False
        try:
            yield others
            ended = True
        finally:
            if is_running():
                rpc.shutdown(graceful=graceful and ended)
        if graceful:
            for name in others.processes:
                _, errors = others.output(name)
                assert others.processes[name].returncode == 0, f"{name}:\n{errors}"
    finally:
        others.end()
        Path(f"{store}.rpc").unlink(missing_ok=True)


def is_running() -> bool:
    """Whether this process has an agent."""
    from nbdist.rpc import api

    return api.is_initialized()


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP; return when all its threads stand still.

    On a busy machine the thread that takes the signal may wait for a core while another thread of the process runs on.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())

    def stands(task: Path) -> bool:
        try:
            return task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return True  # the thread has ended meanwhile

    wait_until(lambda: all(map(stands, tasks)))


# -- what workers run ---------------------------------------------------------------------------

counted: dict[str, list[None]] = {}
kept: list[Any] = []
released = threading.Event()


def identity(value: Any) -> Any:
    return value


def begins(tensors: list[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Where tensors begin, as bytes after a multiple of 64, and the tensors."""
    return [tensor.data_ptr() % 64 for tensor in tensors], tensors


def define(source: str) -> None:
    """Run ``source`` in this worker's ``__main__``."""
    exec(compile(source, "<defined>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)


def count(key: str) -> int:
    """How often this was called with ``key`` on this worker."""
    calls = counted.setdefault(key, [])
    calls.append(None)  # by several threads at a time, of which none may wait for a lock: finalisers call this
    return len(calls)


def name() -> str:
    return rpc.get_worker_info().name


def pid() -> int:
    return os.getpid()


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def hold() -> bool:
    """Block until `release` is called here."""
    return released.wait(60)


def release() -> None:
    released.set()


def keep(value: Any) -> None:
    kept.append(value)


def unkeep() -> None:
    kept.clear()


def statistics() -> dict[str, int]:
    from nbdist.rpc.api import current_agent

    return current_agent().statistics()


def recurse(ring: list[str], depth: int) -> int:
    """Call on round the ring, ``depth`` deep."""
    if depth == 0:
        return 0
    return 1 + rpc.rpc_sync(ring[depth % len(ring)], recurse, args=(ring, depth - 1))


def call_there(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


def fetch(rref: Any) -> Any:
    return rref.to_here()


def call_method(rref: Any) -> Any:
    return rref.rpc_sync().conjugate()


def describe(rref: Any) -> str:
    return repr(rref.local_value())


def pass_on(to: str, rref: Any) -> Any:
    """Hand a reference to somebody else, who fetches it."""
    return rpc.rpc_sync(to, fetch, args=(rref,))


def is_one_object(one: Any, other: Any, *, third: Any) -> bool:
    return one is other is third


def are_one_object(things: list[Any]) -> bool:
    return all(thing is things[0] for thing in things)


def make(value: Any) -> Any:
    return rpc.RRef(value)


def fail(message: str) -> None:
    raise ValueError(message)


class Untold(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise SystemExit


class Uncopied(Untold):
    """Nor can it be pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit


def raise_one(cls: type[BaseException]) -> None:
    raise cls


class Odd(Exception):
    """Its constructor does not take its args."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def fail_oddly() -> None:
    raise Odd(7, detail="seven")


def exit_process() -> None:
    raise SystemExit(3)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("I stay here")


class Explosive:
    """Cannot be rebuilt."""

    def __setstate__(self, state: Any) -> None:
        raise OSError("no room")

    def __getstate__(self) -> Any:
        return {"a": 1}


class FailsToDie:
    def __del__(self) -> None:
        raise RuntimeError("not yet")


def unpicklable() -> Any:
    return Unpicklable()


def explosive() -> Any:
    return Explosive()


def count_graphs(x: torch.Tensor) -> int:
    """Compile a function here, call it, and count the graphs."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda y: y.sin() + y.cos(), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), x.sin() + x.cos())
    return len(graphs)


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.tensor = torch.zeros(3)

    def add(self, by: int) -> int:
        self.value += by
        return self.value

    @rpc.functions.async_execution
    def add_later(self, to: str, by: int) -> Any:
        return rpc.rpc_async(to, identity, args=(by,)).then(lambda done: self.add(done.value()))

    @staticmethod
    @rpc.functions.async_execution
    def static_async(to: str, a: int, b: int) -> Any:
        return rpc.rpc_async(to, torch.add, args=(torch.tensor(a), b)).then(lambda done: int(done.value()))

    @classmethod
    @rpc.functions.async_execution
    def class_async(cls, to: str, a: int, b: int) -> Any:
        return rpc.rpc_async(to, torch.add, args=(torch.tensor(a), b)).then(lambda done: int(done.value()))


class Batch:
    """One future for all who ask, as a batch of a parameter server has."""

    def __init__(self, count: int) -> None:
        self.future: torch.futures.Future[Any] = rpc.Future()
        self.missing = count

    @rpc.functions.async_execution
    def ask(self) -> Any:
        self.missing -= 1
        if not self.missing:
            try:
                self.where_it_goes_wrong()
            except ZeroDivisionError as error:
                self.future.set_exception(error)
        return self.future

    def where_it_goes_wrong(self) -> None:
        raise ZeroDivisionError("in the batch")


def not_a_future() -> int:
    return 3


async_not_a_future = rpc.functions.async_execution(not_a_future)


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 3


with warnings.catch_warnings():  # torch 2.15 says, where all see it, that this will go
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(scripted)


def repr_kept() -> str:
    return repr(kept)


def chain(depth: int) -> None:
    """Start the next call and return; the last one leaves a mark."""
    if depth:
        rpc.rpc_async(f"worker{depth % 3}", chain, args=(depth - 1,))
    else:
        kept.append("end of a chain")


def resident() -> float:
    """This worker's memory, in MB, less what the allocator keeps for reuse in each thread's arena."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


# -- trading tensors ------------------------------------------------------------------------------

_held: list[tuple[float, torch.Tensor]] = []
_holding = threading.Lock()


def trade(others: list[str], rounds: int, seed: int, sizes: tuple[int, ...] = (50_000, 300_000, 1_000_000)) -> int:
    """Exchange tensors with other workers, hold some of them for a while, and look whether they stay what they were."""
    moments = random.Random(seed)
    for number in range(rounds):
        value, size = float(moments.randrange(1000)), moments.choice(sizes)
        got = rpc.rpc_sync(moments.choice(others), traded, args=(torch.full((size,), value), value), timeout=60)
        _hold(got, value + 1)
        if not number % 8:
            check_held()
    return rounds


def traded(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """The other side of `trade`: it writes to what it was given, and answers with another tensor."""
    assert is_all(tensor, value), f"{value} came as {tensor}"
    answer = tensor + 1
    _hold(tensor.mul_(2), value * 2)
    return answer


def _hold(tensor: torch.Tensor, value: float) -> None:
    assert is_all(tensor, value), f"{value} came as {tensor}"
    with _holding:
        _held.append((value, tensor))
        while len(_held) > 12:
            _held.pop(random.randrange(len(_held)))


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def check_held() -> int:
    """All that is held is what it was; how many that is."""
    with _holding:
        held = list(_held)
    for value, tensor in held:
        assert is_all(tensor, value), f"{value} has become {tensor}"
    return len(held)


def drop_held() -> None:
    with _holding:
        _held.clear()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> int:
    """How many pieces of any arena this process has mapped, or open."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("/memfd:nbdist-")


def nothing_out() -> bool:
    """Whether all blocks of this agent's arena are at home, and it holds none of others."""
    now = statistics()
    return not now["arena_bytes_used"] and not now["arena_blocks_held"]


def footprint() -> dict[str, float]:
    """What this process takes up."""
    return {"resident": resident(), "segments": mapped_segments(), "files": open_files()}


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def slow_identity(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value


def fail_with(tensor: torch.Tensor) -> None:
    raise ValueError("no")


class Unreadable:
    """What cannot be rebuilt where it arrives."""

    def __reduce__(self) -> Any:
        return _cannot, ()


def _cannot() -> None:
    raise RuntimeError("never")


CALLS = 1000


def count_short(call: Callable[[int], Any]) -> int:
    """Return how many of CALLS calls this process sends in the short way."""
    encoded: list[Any] = []
    original = codec.encode_usual_call

    def noting(*arguments: Any) -> Any:
        encoded.append(original(*arguments))
        return encoded[-1]

    with patch.object(codec, "encode_usual_call", noting):
        for number in range(CALLS):
            call(number)
    return sum(each is not None for each in encoded)


def count_from_here(to: str) -> int:
    """Run on a worker: calls between workers."""
    return count_short(lambda number: rpc.rpc_sync(to, identity, args=(number,)))
