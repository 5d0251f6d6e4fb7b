"""Shows the result of `%dist_stacks`, as text."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.amounts import plural
from nbdist.cluster.inspection.thread_stacks import Stacks, ThreadStack
from nbdist.cluster.output.arranger import grouped, say_names


def say(found: Stacks) -> str:
    """Return the threads of all workers as text; equal ones share their lines, which begin with the innermost."""
    said = [f"{parting.text}." for parting in found.partings]
    threads = [(worker, thread) for worker, each in found.threads.items() for thread in each]
    for members in grouped(threads, lambda each: each[1]._replace(thread="")).values():  # equal but for their names
        workers, names = (
            list(dict.fromkeys(each)) for each in zip(*((worker, each.thread) for worker, each in members), strict=True)
        )
        said += _lines_of(workers, ", ".join(names), members[0][1])
    if idle := [worker for worker, each in found.threads.items() if not each]:
        said.append(f"{say_names(idle)} {plural(len(idle), 'runs', 'run')} no code of yours.")
    for worker, thread in found.silent.items():
        if thread is None:
            said += [f"{worker} does not answer: it starts, has been stopped, or computes without releasing the GIL."]
        else:
            title = f"{thread.thread}, while a thread holds the GIL; the others are not seen"
            said += _lines_of([worker], title, thread)
    said += [f"{worker} {why}." for worker, why in found.lost.items()]
    return "\n".join(said)


def _lines_of(workers: Sequence[str], title: str, thread: ThreadStack) -> list[str]:
    serves = f", serves {thread.serves}" if thread.serves else ""
    at = f", waits for {thread.at}" if thread.at.startswith("the lock") else f", in {thread.at}" if thread.at else ""
    return [f"{say_names(workers)}: {title}{serves}{at}", *(f"    {line}" for line in thread.lines)]
