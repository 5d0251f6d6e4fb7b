"""The magics themselves."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from nbdist import autograd, rpc
from nbdist.cluster import labels
from nbdist.cluster.arrange import say_names
from nbdist.cluster.cells import Cell
from nbdist.cluster.comparing import differences
from nbdist.cluster.freeing import free
from nbdist.cluster.holdings import collect as collect_holdings
from nbdist.cluster.page_lines import Page, lines_above, moved_down
from nbdist.cluster.print_log import read_logs
from nbdist.cluster.sinks import current_sink
from nbdist.cluster.status import collect
from nbdist.errors import NbdistError, UsageError
from nbdist.magics.checking import check
from nbdist.magics.lines import (
    CellLine,
    parse_cell,
    parse_diff,
    parse_init,
    parse_log,
    parse_memory,
    parse_value,
    parse_watch,
    reader,
)
from nbdist.magics.overview import overview
from nbdist.magics.session import Session
from nbdist.views.clusters import Cluster
from nbdist.views.difference import DiffTable
from nbdist.views.memory import FreedTable, MemoryTable
from nbdist.views.panel import Panel
from nbdist.views.printed import Span
from nbdist.views.printed import save as save_printed
from nbdist.views.printed import say as say_printed
from nbdist.views.progress import StartProgress
from nbdist.views.status import StatusTable
from nbdist.views.timeline import Timeline
from nbdist.views.watching import Watcher

__all__ = ["DistMagics"]

F = TypeVar("F", bound=Callable[..., Any])

_REMOTE = (
    "%%remote [TARGET] [-a] [-o NAME] [-t SECONDS] [--group-outputs] [--fail-fast] [--progress-after SECONDS] [--local]"
)


def _shortly(magic: F) -> F:
    """Have an error of nbdist shown by its text: the way through the magic tells a user nothing."""

    @functools.wraps(magic)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except NbdistError as error:
            if not hasattr(error, "_render_traceback_") and not getattr(error, "__notes__", []):
                shown = f"{type(error).__name__}: {error}"
                error._render_traceback_ = lambda: [shown]  # type: ignore[attr-defined]
            raise

    return call  # type: ignore[return-value]


@magics_class
class DistMagics(Magics):  # type: ignore[misc, unused-ignore]
    """``%dist_init`` and all that follows."""

    def __init__(self, shell: Any, session: Session) -> None:
        super().__init__(shell)
        self._shell = shell
        self._session = session
        said = {f"%{name}": magic.__doc__ for name, magic in self.magics["line"].items()}
        said |= {f"%%{name}": magic.__doc__ for name, magic in self.magics["cell"].items()}
        self._overview = overview(said)
        type(self).dist.__doc__ = self._overview  # what `%dist?` shows

    @line_magic
    @_shortly
    def dist(self, line: str) -> None:
        """List the magics by question: "it hangs", "it is slow", "memory"."""
        reader("%dist").read(line)
        print(self._overview)

    # -- the cluster ----------------------------------------------------------------------------

    @line_magic
    @_shortly
    def dist_init(self, line: str) -> None:
        """Start workers.

        %dist_init [-n N] [-g 0,1] [--backend gloo|nccl|none] [--driver NAME] [--seed S] [-t SECONDS]
                   [--launcher NAME] [--isolate-gpus] [--preload MODULE,MODULE]

        -n, --num-processes   how many (2; with -g as many as GPUs)
        -g, --gpu-ids         whose GPUs, by number; all without it
        --backend             of the process group; none for no group
        --driver              the notebook's name; it then has id 0, and the workers begin with worker1
        --seed                worker r draws from seed + r
        -t, --timeout         seconds within which all must answer
        --launcher            what starts them
        --isolate-gpus        each worker sees its own GPU alone
        --preload             imported once, before workers start: it takes no time, and no memory, in each of them
                              (where they are forked; what you change in such a module is seen by the next %dist_init)
        """
        spec = parse_init(line)
        running = Cluster.current
        if running is not None and running.running:
            if not running.spec.same_as(spec):
                raise UsageError(f"another cluster runs, of {running.spec.count} workers; end it with %dist_shutdown")
            print(f"The cluster runs: {', '.join(running.names)}.")
            return
        cluster = Cluster.of(spec)
        cluster.progress = StartProgress(cluster.names, current_sink())
        cluster.start()
        given = {
            "rpc": rpc,
            "dist_autograd": autograd,
            "torch": torch,
            "dist": torch.distributed,
        }  # as workers have them
        self._shell.push(given, interactive=False)

    @line_magic
    @_shortly
    def dist_shutdown(self, line: str) -> None:
        """End the workers; nothing of them is left."""
        reader("%dist_shutdown").read(line)
        if Cluster.current is None:
            print("No cluster runs.")
            return
        left = Cluster.current.shutdown()
        print(f"{left} processes left.")

    @line_magic
    @_shortly
    def dist_reset(self, line: str) -> None:
        """Kill the workers without asking them, and switch `%dist_mode` off: a fresh start."""
        options = reader("%dist_reset")
        options.add_argument("-n", "--nuclear", action="store_true")  # what it does anyway; nbdistributed has it
        options.read(line)
        self._session.everywhere = False
        left = Cluster.current.shutdown(ask=False) if Cluster.current is not None else 0
        print(f"{left} processes left.")

    @line_magic
    @_shortly
    def dist_restart(self, line: str) -> None:
        """Start workers anew, under their names and ranks.

        %dist_restart [TARGET] [-p]

        Without a target, those that have died. RRefs to what the old ones owned are dead. The process group of all
        workers is formed anew once all are idle; groups, DDP and FSDP wrappers from before have to be made again.
        -p, --process-group   form it at once, also if no worker is restarted
        """
        options = reader("%dist_restart [TARGET] [-p]")
        options.add_argument("targets", nargs="*")
        options.add_argument("-p", "--process-group", action="store_true")
        found = options.read(line)
        targets = " ".join(found.targets).strip() or None
        cluster = self._session.cluster()
        names = cluster.restart(targets, process_group=found.process_group)
        if names:
            print(f"Restarted {', '.join(names)}.")
        elif not found.process_group:
            print("No worker has died. Name workers to restart, or `all`; `-p` forms only the process group anew.")
        if cluster.awaited:
            print(f"The process group is formed anew once {say_names(cluster.awaited)} can take part.")
        elif found.process_group or len(names) == len(cluster.names):
            print("The process group is formed anew.")

    @line_magic
    @_shortly
    def dist_status(self, line: str) -> StatusTable | None:
        """Show what each worker is and does: its pid, device, state, memory, calls in flight."""
        return self._status(line)

    @staticmethod
    def _status(line: str) -> StatusTable | None:
        reader("%dist_status").read(line)
        if Cluster.current is None:
            print("No cluster runs; start one with %dist_init -n 4.")
            return None
        return StatusTable(collect(Cluster.current))

    @line_magic
    @_shortly
    def dist_panel(self, line: str) -> Panel:
        """A row for each worker, live: what runs and where, CPU and memory, calls; buttons to interrupt and restart."""
        reader("%dist_panel").read(line)
        return Panel(self._session.cluster())

    @line_magic
    @_shortly
    def dist_memory(self, line: str) -> MemoryTable:
        """Show how much memory each worker uses, what takes it, which names hold it, and what has grown.

        %dist_memory [TARGET] [-v]

        For each worker and the notebook: values with RRefs, open contexts (graphs and gradients), the worker's own
        variables, shared memory, and what is not accounted for: the interpreter, torch, what allocators keep. Every
        tensor is counted once, by its storage, whoever holds it. "since last look" compares with the last
        %dist_memory. Nothing of yours is called, and busy workers answer too.

        Small things are put together, and rows that are the same on several workers.
        TARGET       show each thing on these workers: worker1, 0,2, all, notebook
        -v, --all    show each thing on all workers
        """
        targets, unfolded = parse_memory(line)
        workers = self._memory_of(targets) if targets is not None else None
        self._session.cluster()
        last = self._session.memory_look
        table = MemoryTable(collect_holdings(), last, workers, unfolded=unfolded or workers is not None)
        self._session.memory_look = table.look
        return table

    def _memory_of(self, targets: str) -> set[str]:
        """Return the names that a target means, of which the notebook's own may be one."""
        cluster = self._session.cluster()
        parts = [part.strip() for part in targets.split(",")]
        others = ",".join(part for part in parts if part != cluster.driver)
        own = {cluster.driver} if cluster.driver in parts else set()
        return own | ({worker.name for worker in cluster.select(others)} if others else set())

    @line_magic
    @_shortly
    def dist_free(self, line: str) -> FreedTable:
        """Let go of what only `Out`, `_` and tracebacks hold, here and on all workers."""
        reader("%dist_free").read(line)
        self._session.cluster()
        return FreedTable(free())

    @line_magic
    @_shortly
    def dist_log(self, line: str) -> None:
        """Show what workers have printed, also what a cell left out, or printed while no page was open.

        %dist_log [TARGET] [--cell NUMBER] [--lines FIRST:LAST] [--save FILE]

        Without options, the last lines of all cells. At most 4,000 lines are shown at once, and the newest 200 MB of
        each worker are kept, until the cluster is shut down.
        --cell    only what the cell with that number has printed
        --lines   these lines, counted from 1; with one number, so many from the end
        --save    write all lines to a file instead
        """
        asked = parse_log(line)
        printed = read_logs(self._session.cluster(), asked.targets, asked.cell)
        if asked.save is None:
            print(say_printed(printed, Span(*asked.lines) if asked.lines is not None else None))
            return
        try:
            print(f"{save_printed(printed, asked.save):,} lines are in {asked.save}.")
        except OSError as error:
            raise UsageError(f"the lines cannot be written: {error}") from error

    @line_magic
    def dist_debug(self, line: str) -> StatusTable | None:
        """The same as `%dist_status`."""
        return self._status(line)

    @line_magic
    @_shortly
    def sync(self, line: str) -> None:
        """Wait until every worker has done all that it was sent."""
        reader("%sync").read(line)
        print(f"{len(self._session.cluster().sync())} workers are in step.")

    @line_magic
    @_shortly
    def dist_mode(self, line: str) -> None:
        """Say whether plain cells run on all workers: -e/--enable, -d/--disable; nothing to ask."""
        options = reader("%dist_mode [-e | -d]")
        which = options.add_mutually_exclusive_group()
        which.add_argument("-e", "--enable", action="store_true")
        which.add_argument("-d", "--disable", action="store_true")
        found = options.read(line)
        if found.enable:
            self._session.cluster()
            self._session.everywhere = True
        elif found.disable:
            self._session.everywhere = False
        where = "on all workers" if self._session.everywhere else "here"
        print(f"Plain cells run {where}.")

    # -- values ---------------------------------------------------------------------------------

    @line_magic
    @_shortly
    def dist_push(self, line: str) -> None:
        """Set variables of the notebook on workers: %dist_push NAME [NAME ...] [-r TARGET]."""
        names, targets = self._names(line, "%dist_push NAME [NAME ...] [-r TARGET]")
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise UsageError(f"there is no variable {', '.join(missing)} here")
        self._session.cluster().push({name: self._shell.user_ns[name] for name in names}, targets)

    @line_magic
    @_shortly
    def dist_pull(self, line: str) -> None:
        """Set variables of workers here: %dist_pull NAME [NAME ...] [-r TARGET].

        From several workers, each becomes a list of the workers' values.
        """
        names, targets = self._names(line, "%dist_pull NAME [NAME ...] [-r TARGET]")
        values = self._session.cluster().pull(names, targets)
        for name in names:
            value = [each[name] for each in values] if isinstance(values, list) else values[name]
            self._shell.user_ns[name.rpartition(".")[2]] = value

    @staticmethod
    def _names(line: str, usage: str) -> tuple[list[str], str | None]:
        options = reader(usage)
        options.add_argument("names", nargs="+")
        options.add_argument("-r", "--rank", "--targets", dest="targets", nargs="+")
        found = options.read(line)
        names = [name for word in found.names for name in word.split(",") if name]
        return names, " ".join(found.targets) if found.targets else None

    @no_var_expand
    @line_magic
    @_shortly
    def dist_diff(self, line: str) -> DiffTable:
        """Say whether a value is the same on all workers, or where it first differs: %dist_diff EXPRESSION [-r TARGET].

        A tensor, a module, a state_dict, anything: it is compared where it is, part by part.
        """
        expression, targets = parse_diff(line)
        cluster = self._session.cluster()
        cell = cluster.execute(expression, targets, keep=True, quiet=True)
        rrefs = cluster.references(cell)
        by_name = {rref.owner_name(): rref for rref in (rrefs if isinstance(rrefs, list) else [rrefs])}
        return DiffTable(expression, list(by_name), *differences(by_name))

    # -- cells ----------------------------------------------------------------------------------

    @no_var_expand
    @line_cell_magic
    @_shortly
    def remote(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on workers, or have the value of an expression there.

        %%remote [TARGET] [-a] [-o NAME] [-t SECONDS] [--group-outputs] [--fail-fast] [--progress-after SECONDS]
                 [--local]
        %remote TARGET expression

        TARGET is 0, 0,2, [0-2], 0:2, ::2, -1, worker1, or all, which it is if left out.
        -a, --noblock      do not wait; gives a handle: .wait(), await, .cancel(), .outputs
        -o, --out NAME     bind NAME to an RRef to the last expression's value (to a list of them, for several)
        -t, --timeout      seconds after which the cell is interrupted
        --group-outputs    show output at the end, by worker
        --fail-fast        interrupt the other workers when one has failed
        --progress-after   seconds without output after which a line says where workers wait (10; 0 for never)
        --local            run the cell here as well
        """
        if cell is None:
            asked = parse_value(line)
            return self._session.cluster().evaluate(asked.expression, asked.targets, timeout=asked.timeout)
        return self._run(parse_cell(line, _REMOTE), cell)

    @no_var_expand
    @cell_magic
    @_shortly
    def timeline(self, line: str, cell: str) -> Any:
        """Run a cell here, and show what all workers did meanwhile.

        %%timeline [FILE]

        FILE is written for Perfetto (ui.perfetto.dev), if it is named.
        """
        told = Timeline(self._session.cluster().agent)
        try:
            value = self._run_here(cell)
        finally:
            told.stop()
            display(told)
            if line.strip():
                told.save(line.strip())
        return value

    @no_var_expand
    @cell_magic
    @_shortly
    def watch(self, line: str, cell: str) -> Any:
        """Run a cell here, and see the backward passes that run meanwhile, here and on workers, and steps of pipelines.

        %%watch [--paused] [-a] [-o NAME] [--no-norms]

        --paused        hold each pass before its first node: the view has buttons to step and run it
        -a, --noblock   run the cell in the background; gives the handle on the pass: .step(3), .run(until="nan"), …
        -o, --out NAME  bind NAME to the handle
        --no-norms      do not compute the norms of gradients
        """
        options = parse_watch(line)
        self._session.cluster()
        watcher = Watcher(paused=options.paused, norms=not options.no_norms)
        shown = display(watcher, display_id=True)

        def end() -> None:
            watcher.shown = False
            if watcher.view is not None:
                watcher.view.save()
            else:
                shown.update(watcher)
            watcher.shown = True

        watcher.shown = True
        if options.out is not None:
            self._shell.user_ns[options.out] = watcher
        if options.noblock:
            page = self._session.page()  # now: the next cell may run when this one begins
            watcher.begin(lambda: self._run_here(cell, page), end)
            return watcher if options.out is None else None
        try:
            with watcher:
                return self._run_here(cell)
        finally:
            end()

    def _run_here(self, code: str, page: Page | None = None) -> Any:
        """Run code as this cell's; return the value of its last expression."""
        lines = (page or self._session.page()).lines_above(code) or 0
        transformed = moved_down(self._shell.transform_cell(code), lines)
        name = self._shell.compile.cache(transformed, labels.cell_number(), raw_code=moved_down(code, lines))
        body: list[Any] = ast.parse(transformed, name).body
        silent = transformed.rstrip().endswith(";")
        last = body.pop() if body and isinstance(body[-1], ast.Expr) and not silent else None
        exec(compile(ast.Module(body, []), name, "exec"), self._shell.user_global_ns, self._shell.user_ns)
        if last is None:
            return None
        value = compile(ast.Expression(last.value), name, "eval")
        return eval(value, self._shell.user_global_ns, self._shell.user_ns)

    @no_var_expand
    @cell_magic
    @_shortly
    def distributed(self, line: str, cell: str) -> Any:
        """Run a cell on all workers; the options are those of `%%remote`."""
        options = parse_cell(line, _REMOTE.replace("%%remote [TARGET]", "%%distributed"))
        if options.targets is not None:
            raise UsageError("%%distributed runs on all workers; %%remote takes a target")
        return self._run(options, cell)

    @no_var_expand
    @cell_magic
    @_shortly
    def rank(self, line: str, cell: str) -> Any:
        """Run a cell on some workers: %%rank[0,1], %%rank [0-2]; the options are those of `%%remote`."""
        options = parse_cell(line, _REMOTE.replace("%%remote [TARGET]", "%%rank[0,1]"))
        if options.targets is None:
            raise UsageError("which ranks? write %%rank[0,1], or %%distributed for all")
        return self._run(options, cell)

    def _run(self, options: CellLine, code: str) -> Cell | None:
        cluster = self._session.cluster()
        cluster.select(options.targets)
        page = self._session.page()
        check(self._shell, code, {*self.magics["line"], *self.magics["cell"]}, page)
        wait = not (options.noblock or options.local)
        cell = cluster.execute(
            code,
            options.targets,
            block=wait,
            timeout=options.timeout,
            group_outputs=options.group_outputs,
            fail_fast=options.fail_fast,
            progress_after=options.progress_after,
            keep=options.out is not None,
            above=lines_above(page.text, code) or 0,
        )
        if options.noblock:
            self._session.reruns.begin(cell)
        if options.local:
            self._session.run_here(code)
            if not options.noblock:
                cell.wait()
        if options.out is not None:
            self._shell.user_ns[options.out] = cluster.references(cell, options.targets)
        return cell if options.noblock else None
