"""Defines all magics.

The docstring of a magic is the help that users read, with `%dist_init?` for instance. `%dist` shows its first line.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from nbdist import autograd, rpc
from nbdist.amounts import counted, plural
from nbdist.cluster.cell_sender import forget_values
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.examination.examination import Examination, read_code
from nbdist.cluster.hosts.launchers.join import how_to_join
from nbdist.cluster.inspection import comparing, freeing, holdings, one_piece, reloads, status, thread_stacks
from nbdist.cluster.inspection.print_logs import read_logs
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.page_lines import Page, lines_before, moved_down
from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.output.arranger import say_names
from nbdist.cluster.output.sinks import current_sink
from nbdist.cluster.spec import DEFAULT_INVITATION, describe_options
from nbdist.cluster.undoing import undone_by
from nbdist.errors import NbdistError, UsageError
from nbdist.magics.checking import check
from nbdist.magics.lines import READERS, parse_break, parse_compare, parse_diff, parse_init, parse_value, read
from nbdist.magics.overview import overview
from nbdist.magics.session import NotebookSession
from nbdist.views.passes.watching import Watcher
from nbdist.views.workers import comparison, printed, stacks
from nbdist.views.workers.difference import DiffTable, say_code
from nbdist.views.workers.line import line_in_place, lines_below
from nbdist.views.workers.memory import FreedTable, MemoryTable
from nbdist.views.workers.panel import Panel
from nbdist.views.workers.progress import StartProgress
from nbdist.views.workers.remarks import remarks_on_start
from nbdist.views.workers.status import StatusTable

_MANY_PAIRS = 20  # from so many pairs of members on, `%dist_doctor` says that it takes a while


def _living(cluster: Cluster, targets: str | None) -> str | None:
    """Return the targets of a question; for all workers, without lost ones, which a line names."""
    lost = [worker.name for worker in cluster.workers if worker.lost is not None]
    living = [name for name in cluster.names if name not in lost]
    if targets not in (None, "all") or not lost or not living:
        return targets
    print(f"{say_names(lost)} {plural(len(lost), 'is', 'are')} lost, and left out.")
    return ",".join(living)


def _status(line: str) -> StatusTable | None:
    read("%dist_status", line)
    if Cluster.current is None:
        print("No cluster runs; start one with %dist_init -n 4.")
        return None
    return StatusTable(*status.collect(Cluster.current))


def _names(magic: str, line: str) -> tuple[list[str], str | None]:
    found = read(magic, line)
    return [name for word in found.names for name in word.split(",") if name], found.targets


def _memory_of(cluster: Cluster, targets: str) -> set[str]:
    """Return the names of the workers in a target. The notebook's own name may be among them.

    Raises UnknownWorker or UsageError for a target that is wrong.
    """
    parts = [part.strip() for part in targets.split(",")]
    others = ",".join(part for part in parts if part != cluster.driver)
    own = {cluster.driver} if cluster.driver in parts else set()
    return own | ({worker.name for worker in cluster.select(others)} if others else set())


def _shortly(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Return the magic, changed so that nbdist's errors show no traceback: it would have only nbdist's own code."""

    @functools.wraps(magic)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except NbdistError as error:
            # An error with a rendering of its own, or with notes, such as an error of a worker, is shown as usual.
            if not hasattr(error, "_render_traceback_") and not getattr(error, "__notes__", []):
                shown = f"{type(error).__name__}: {error}"
                error._render_traceback_ = lambda: [shown]  # type: ignore[attr-defined]
            raise

    return call


def _describing_options(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Return the magic, with the options of a cluster in its help, in place of the words in parentheses."""
    whole = re.sub(r" (?!\[)", "\0", READERS["%dist_init"].usage or "")  # no line ends inside of brackets
    usage = textwrap.fill(whole, 108, subsequent_indent=" " * 11).replace("\0", " ")
    for words, text in {"(usage)": usage, "(options)": describe_options()}.items():
        magic.__doc__ = (magic.__doc__ or "").replace(words, textwrap.indent(text, " " * 8).strip())
    return magic


@magics_class
class DistMagics(Magics):  # type: ignore[misc, unused-ignore]
    """The magics of one shell.

    ``notebooks/00_tour.ipynb`` shows them; ``docs/howto`` has a page for each task.
    """

    def __init__(self, shell: Any, session: NotebookSession) -> None:
        super().__init__(shell)
        self._shell = shell
        self._session = session
        said = {f"%{name}": magic.__doc__ for name, magic in self.magics["line"].items()}
        said |= {f"%%{name}": magic.__doc__ for name, magic in self.magics["cell"].items()}
        self._overview = overview(said)
        type(self).dist.__doc__ = self._overview  # what `%dist?` shows
        for kind, magics in self.magics.items():
            self.magics[kind] = {name: _shortly(magic) for name, magic in magics.items()}

    @line_magic
    def dist(self, line: str) -> None:
        """List all magics by the question that they answer, such as "it hangs" or "it is slow".

        Example:
            %dist
        """
        read("%dist", line)
        print(self._overview)

    # -- the cluster ----------------------------------------------------------------------------

    @line_magic
    @_describing_options
    def dist_init(self, line: str) -> None:
        """Start workers, and form a process group of them.

        (usage)

        (options)
        --device-map          Where a worker gets the arguments that others send it: with worker1:0=1, those on the
                              sender's cuda:0 arrive on cuda:1 of worker1. Once for each worker. Without it, they
                              arrive on its own GPU.

        If a cluster with the same options runs already, this keeps it, also if it has grown (%dist_invite) and -n is
        its present number of workers. If one with other options runs, this is an error; end that cluster with
        %dist_shutdown first.

        Example:
            %dist_init -n 4 --seed 1
        """
        spec = parse_init(line)
        if (running := Cluster.current) is not None and running.running:
            if not running.is_as(spec):
                raise UsageError(f"another cluster runs, of {len(running.names)} workers; end it with %dist_shutdown")
            print(f"The cluster runs: {', '.join(running.names)}.")
            self._give_names()
            return
        cluster = Cluster.of(spec)
        # Before `start`, which reports each step.
        cluster.progress = StartProgress(cluster.names, current_sink())
        if spec.launcher == "join":
            invitation = Path(spec.invitation or DEFAULT_INVITATION)
            print(f"Waiting for {counted(spec.count, 'worker')}: {how_to_join(invitation)}.", flush=True)
            cluster.on_joined = lines_below()
        cluster.start()
        self._give_names()
        if "cluster" not in self._shell.user_ns:
            self._session.named = cluster
            self._shell.push({"cluster": cluster}, interactive=False)
        for remark in remarks_on_start(cluster):
            print(remark)

    def _give_names(self) -> None:
        # The notebook gets the names that workers have. A value of the user's own stays, and one line says so.
        given = {"rpc": rpc, "dist_autograd": autograd, "torch": torch, "dist": torch.distributed}
        # A module of torch's, as after `import torch.distributed.rpc as rpc`, is replaced: it knows no worker.
        packages = {name: str(getattr(self._shell.user_ns.get(name, torch), "__package__", "")) for name in given}
        own = [name for name, package in packages.items() if not package.startswith(("torch", "nbdist"))]
        self._shell.push({name: module for name, module in given.items() if name not in own}, interactive=False)
        if own:
            names, modules = ", ".join(own), ", ".join(given[name].__name__ for name in own)
            print(f"Kept your own {names}: `del {names}` and %dist_init again give {modules}.")

    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """End the workers, and remove all their files.

        Idle workers get 1 s to run their exit handlers; busy ones are killed.

        Example:
            %dist_shutdown
        """
        read("%dist_shutdown", line)
        if Cluster.current is None:
            print("No cluster runs.")
            return
        left = Cluster.current.shutdown()
        print(f"{counted(left, 'process', 'processes')} left.")

    @line_magic
    def dist_reset(self, line: str) -> None:
        """Kill all workers at once, and switch `%dist_mode` off. %dist_init then starts afresh.

        Example:
            %dist_reset
        """
        read("%dist_reset", line)
        self._session.everywhere = False
        left = Cluster.current.shutdown(ask=False) if Cluster.current is not None else 0
        print(f"{counted(left, 'process', 'processes')} left.")

    @line_magic
    def dist_restart(self, line: str) -> None:
        """Restart workers, under their names and ranks.

        %dist_restart [TARGET] [-p]

        Without a target, this restarts the workers that have died. RRefs to values of the old workers are lost. The
        workers form a new process group once all are idle. Make your groups, DDP and FSDP wrappers again afterwards.
        -p, --process-group   form the process group now, even if no worker is restarted, and wait for busy workers

        Example:
            %dist_restart worker1
        """
        found = read("%dist_restart", line)
        cluster = self._session.cluster()
        cluster.on_joined = lines_below()
        names = cluster.restart(found.targets, process_group=found.process_group)
        if names:
            print(f"Restarted {', '.join(names)}.")
        elif not found.process_group:
            print("No worker has died. Name workers to restart, or `all`; `-p` forms only the process group anew.")
        if cluster.awaited:
            print(f"The process group is formed anew once {say_names(cluster.awaited)} can take part.")
        elif cluster.spec.backend == "none":
            if found.process_group:
                print("The cluster has no process group: it was started with --backend none.")
        elif found.process_group or names:
            print("The process group is formed anew.")

    @line_magic
    def dist_invite(self, line: str) -> None:
        """Invite more workers, on any host, into a cluster of `%dist_init --host ADDRESS`; or revoke all invitations.

        %dist_invite [FILE] [--uses N] [--expires SECONDS] | --revoke

        Writes an invitation to FILE (nbdist-invitation.json), which only you may read. Copy it to another host and run
        `python -m nbdist worker --connect FILE` there. The cluster grows by a worker, and a line below this cell says
        so. But if a worker has lost its host, the newcomer takes its place, with the next %dist_restart. Running cells
        keep their workers. Once all workers are idle, a new process group forms, with the new worker: make groups, DDP
        and FSDP wrappers again. Keep the file secret: anyone who has it can run code in the cluster.
        --uses                how many workers may join with it (1)
        --expires             for how many seconds it is valid (3600)
        --revoke              make all invitations invalid; workers that have joined stay

        Example:
            %dist_invite invitation.json --uses 2
        """
        found = read("%dist_invite", line)
        cluster = self._session.cluster()
        if found.revoke:
            print(f"Revoked {counted(cluster.revoke_invitations(), 'invitation')}.")
            return
        cluster.invite(found.file, uses=found.uses, expires=found.expires)
        cluster.on_joined = lines_below()
        print(f"Invited {counted(found.uses, 'worker')}: {how_to_join(Path(found.file))}.")

    @line_magic
    def dist_status(self, line: str) -> StatusTable | None:
        """Show each worker's pid, device, state, memory and calls in flight.

        A busy worker may not answer. Then its row appears within about a second, with what the notebook knows of it.

        Example:
            %dist_status
        """
        return _status(line)

    @line_magic
    def dist_stacks(self, line: str) -> None:
        """Show the lines of your code in which each thread is, the call it serves, and what it waits for.

        %dist_stacks [TARGET]

        The innermost line comes first. Threads without code of yours are left out, and equal ones share their lines. A
        thread that waits for a lock is shown with the thread that holds it, if Python knows that. Busy workers answer,
        too; of one that computes without releasing the GIL, the main thread is shown.

        Example:
            %dist_stacks worker1
        """
        print(stacks.say(thread_stacks.read_stacks(self._session.cluster(), read("%dist_stacks", line).targets)))

    @line_magic
    def dist_panel(self, line: str) -> Panel:
        """Show a live row for each worker: running code, CPU, memory, calls; with buttons to interrupt and restart.

        An error if no cluster runs.

        Example:
            %dist_panel
        """
        read("%dist_panel", line)
        return Panel(self._session.cluster())

    @line_magic
    def dist_memory(self, line: str) -> MemoryTable:
        """Show how much memory each worker uses, which values take it, which names hold them, and what has grown.

        %dist_memory [TARGET] [-v]

        For each worker and the notebook, the table shows values with RRefs, open contexts (graphs and gradients), the
        variables of your code, shared memory, and the rest: the interpreter, torch, and memory that allocators keep. A
        tensor counts once, by its storage, even if several names hold it. "since last look" compares with the last
        %dist_memory. "mostly" says where in a variable more than half of its bytes are. This calls none of your
        functions, and busy workers answer, too.

        Small values share a row, and so do equal rows of several workers; small values that differ stay apart.
        TARGET       show each value on these workers: worker1, 0,2, all, notebook
        -v, --all    show each value on all workers

        Example:
            %dist_memory worker1 -v
        """
        asked = read("%dist_memory", line)
        cluster = self._session.cluster()
        workers = _memory_of(cluster, asked.targets) if asked.targets is not None else None
        last = self._session.memory_look
        table = MemoryTable(holdings.collect(), last, workers, unfolded=asked.all or workers is not None)
        self._session.memory_look = table.look
        return table

    @line_magic
    def dist_free(self, line: str) -> FreedTable:
        """Free the values that only `Out`, `_` and tracebacks hold, in the notebook and on all workers.

        Shows which values were freed. Entries of Out that held these values are removed. So is the last error, which
        %debug would show, if its traceback held one of them. Your variables keep their values.

        Example:
            %dist_free
        """
        read("%dist_free", line)
        self._session.cluster()
        return FreedTable(freeing.free())

    @line_magic
    def dist_log(self, line: str) -> None:
        """Show all lines that workers have printed, even those that a cell left out or printed while no page was open.

        %dist_log [TARGET] [--cell NUMBER] [--lines FIRST:LAST] [--save FILE]

        Without options, the last lines of all cells. At most 4,000 lines are shown at once. The newest 200 MB of each
        worker are kept until the cluster is shut down.
        --cell    show only the lines of the cell with this number
        --lines   show the lines from FIRST to LAST, counted from 1; with one number N, the last N lines
        --save    write all lines to a file instead

        Example:
            %dist_log worker1 --lines 20
        """
        asked = read("%dist_log", line)
        logs = read_logs(self._session.cluster(), asked.targets, asked.cell)
        if asked.save is None:
            print(printed.say(logs, asked.lines))
            return
        try:
            print(f"{counted(printed.save(logs, asked.save), 'line is', 'lines are')} in {asked.save}.")
        except OSError as error:
            raise UsageError(f"what the workers printed cannot be saved: {error}") from error

    @line_magic
    def dist_debug(self, line: str) -> StatusTable | None:
        """Open the debugger on workers: where a worker stands in one, else at its last error.

        %dist_debug [TARGET] | --lab WORKER | --lab off

        The input box below the cell takes the commands of pdb. If several workers stand or keep an error, it first asks
        which one. A worker stands at a `breakpoint()`, whose question waits until a cell waits for workers, or for this
        magic. A worker keeps its last error, of a cell or of a call by RPC, until the next one and until %dist_free.
        Without a target, this shows what %dist_status shows, as in nbdistributed.
        --lab     let JupyterLab's own debugger debug this worker, with breakpoints beside the lines of %%remote cells

        Example:
            %dist_debug worker1
        """
        asked = read("%dist_debug", line)
        if asked.lab is not None:
            print(self._session.debug_in_page(asked.lab))
        elif asked.targets is None:
            return _status("")
        else:
            cluster = self._session.cluster()
            cluster.stops.open([worker.name for worker in cluster.select(asked.targets)])
        return None

    @line_magic
    def dist_doctor(self, line: str) -> Examination:
        """Show versions, clocks, memory and GPUs, how fast each worker reaches every other one, and what to do.

        %dist_doctor [-t SECONDS]

        This measures one pair of workers after another, with a few small calls and a tensor of up to 8 MB. That takes
        about 0.7 s for each pair. Busy workers take part; dead and silent ones are named. For each fault, a line says
        what to do. A line says where the code differs, as %dist_diff --code does at length.
        -t, --timeout    seconds for all pairs together (60); pairs for which there is no time are left out

        `python -m nbdist doctor` in a terminal examines one machine, also before a cluster starts.

        Example:
            %dist_doctor
        """
        timeout = read("%dist_doctor", line).timeout
        cluster = self._session.cluster()
        pairs = len(cluster.workers) * (len(cluster.workers) + 1)
        if pairs >= _MANY_PAIRS:
            line_in_place()(f"nbdist measures {pairs} pairs of workers, one after another, for up to {timeout:g} s.")
        return cluster.examine(timeout=timeout)

    @line_magic
    def sync(self, line: str) -> None:
        """Wait until every worker has run all cells that it was sent.

        Example:
            %sync
        """
        read("%sync", line)
        print(f"{counted(len(self._session.cluster().sync()), 'worker is', 'workers are')} in step.")

    @line_magic
    def dist_mode(self, line: str) -> None:
        """Run cells without a magic on all workers (-e, --enable) or here (-d, --disable); else say where they run.

        Example:
            %dist_mode -e
        """
        found = read("%dist_mode", line)
        if found.enable:
            self._session.cluster()  # raises if there is no cluster to run them on
            self._session.everywhere = True
        elif found.disable:
            self._session.everywhere = False
        where = "on all workers" if self._session.everywhere else "here"
        print(f"Plain cells run {where}.")

    # -- values ---------------------------------------------------------------------------------

    @line_magic
    def dist_push(self, line: str) -> None:
        """Copy variables of the notebook to workers: %dist_push NAME [NAME ...] [-r TARGET].

        Without -r, copies to all workers. A worker first ends the cells that it was sent before; this returns when all
        have the values. If the notebook lacks one of the variables, that is an error, and nothing is copied.

        Example:
            %dist_push model rate -r 0,2
        """
        names, targets = _names("%dist_push", line)
        if missing := [name for name in names if name not in self._shell.user_ns]:
            raise UsageError(f"the notebook has no variable {', '.join(missing)}; define it here before %dist_push")
        self._session.cluster().push({name: self._shell.user_ns[name] for name in names}, targets)

    @line_magic
    def dist_pull(self, line: str) -> None:
        """Copy variables of workers to the notebook: %dist_pull NAME [NAME ...] [-r TARGET].

        Without -r, copies from all workers. From several workers, you get a list of their values. The copy replaces the
        notebook's variable of the same name; for model.weight, this name is weight. If a worker lacks one of the
        variables, that is an error, and nothing is copied.

        Example:
            %dist_pull losses -r worker1
        """
        names, targets = _names("%dist_pull", line)
        values = self._session.cluster().pull(names, targets)
        for name in names:
            value = [each[name] for each in values] if isinstance(values, list) else values[name]
            self._shell.user_ns[name.rpartition(".")[2]] = value

    @no_var_expand
    @line_magic
    def dist_diff(self, line: str) -> DiffTable | None:
        """Show whether a value is equal on all workers, or where it first differs: %dist_diff EXPRESSION [-r TARGET].

        %dist_diff --code [-r TARGET]

        The expression runs on each worker. Its value may be a tensor, a module, a state_dict or any other object. The
        values stay on their workers, and are compared part by part. Where most workers agree, the others are named.
        --code    compare the code instead, also with the notebook's: modules whose files have changed since they were
                  imported or differ, functions of torch that somebody has replaced, versions, variables of the
                  environment, states of random generators. Busy workers answer, too

        Example:
            %dist_diff model.state_dict() -r 0,1
            %dist_diff --code
        """
        expression, targets = parse_diff(line)
        cluster = self._session.cluster()
        if expression == "--code":
            names = [worker.name for worker in cluster.select(_living(cluster, targets))]
            print(say_code(names, *read_code(cluster.agent, names)))
            return None
        cell = cluster.execute(expression, _living(cluster, targets), keep=True, quiet=True)
        rrefs = cluster.references(cell)
        by_name = {rref.owner_name(): rref for rref in (rrefs if isinstance(rrefs, list) else [rrefs])}
        return DiffTable(expression, list(by_name), *comparing.differences(by_name))

    @no_var_expand
    @line_magic
    def dist_compare(self, line: str) -> None:
        """Show where a model on workers begins to differ from the notebook's: %dist_compare EXPRESSION [-r TARGET].

        The notebook holds the model in one piece, and workers the same under the same name: in DDP, in FSDP2, tensor
        parallel or as a copy. The expression runs the model, here and then on all these workers at once. First come the
        parameters and buffers, gathered one by one, then the input, then the output of each module, in the order of the
        forward pass. What differs first is shown with the workers, the line that calls the module, and the collective
        before it. Both sides need the same input.

        The expression runs twice; the first run ends at the input. Draws of random numbers begin with one seed on both
        sides. Afterwards, random states, gradients and buffers are as before, but an optimizer's step is not undone.
        --exact    each bit counts; without it, what rounding can explain is equal, by the dtype and the sizes

        Example:
            %dist_compare model(x)
        """
        expression, targets, exact = parse_compare(line)
        cluster, names = self._session.cluster(), self._shell.user_ns
        living, run = _living(cluster, targets), functools.partial(self._run_here, expression)
        found = one_piece.compare_with_workers(cluster, expression, living, exact, names, run)
        print(comparison.say(expression, exact, *found))

    # -- code -----------------------------------------------------------------------------------

    @line_magic
    def dist_reload(self, line: str) -> None:
        """Run an edited module again on workers, and here: %dist_reload MODULE [-r TARGET].

        Without -r, on all workers that have imported the module, and in the notebook if it has. Each worker first ends
        the cells that it was sent before. As with IPython's %autoreload, functions that were imported from the module
        get their new code, and objects of its classes the new class. Where that is impossible, a line says so. The
        module's own variables begin anew. If the new code raises an error, the old code stays.

        With %autoreload 2 in the notebook, workers reload edited modules by themselves, before each cell of yours.

        Example:
            %dist_reload losses
        """
        asked = read("%dist_reload", line)
        cluster = self._session.cluster()
        names = [worker.name for worker in cluster.select(_living(cluster, asked.targets))]
        print(reloads.reload_on(cluster, asked.module, names, here=asked.targets is None))

    @no_var_expand
    @line_magic
    def dist_break(self, line: str) -> None:
        """Set a breakpoint on workers without changing the code: %dist_break FILE:LINE or FUNCTION [-r TARGET].

        %dist_break [FILE:LINE | FUNCTION] [-r TARGET] [--if EXPRESSION] | -d [NUMBER]

        Without a place, this lists the breakpoints. FILE is the end of a path, a module, or a cell such as In[7].
        FUNCTION is the end of a name, such as step or losses.Focal.forward. A worker stops there as at a breakpoint(),
        in cells and in functions that run for calls. A function that is defined anew keeps its breakpoints; a line of a
        file stays that line. On Python 3.11, all Python code of these workers runs more slowly meanwhile, and cells and
        calls that run already do not stop.
        -r            only on these workers; later workers have only breakpoints without -r
        --if          stop only if this is true there; it stands last on the line
        -d, --delete  delete the breakpoint with this number, or all

        Example:
            %dist_break losses.py:12 -r 1 --if loss > 3
        """
        asked = parse_break(line)
        breakpoints = self._session.breakpoints()
        if asked.place is not None:
            names = [each.name for each in self._session.cluster().select(asked.targets)] if asked.targets else []
            print(breakpoints.add(asked.place, asked.condition, names))
        else:
            print(breakpoints.delete(asked.delete) if asked.delete is not None else breakpoints.say())

    # -- cells ----------------------------------------------------------------------------------

    @no_var_expand
    @line_cell_magic
    def remote(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on workers, or return the value that an expression has there.

        %%remote [TARGET] [-a] [-o NAME] [-t SECONDS] [--group-outputs] [--fail-fast] [--progress-after SECONDS]
                 [--local]
        %remote TARGET expression

        TARGET is 0, 0,2, [0-2], 0:2, ::2, -1, worker1, or all; a cell without TARGET runs on all workers.
        -a, --noblock      do not wait; return a handle: .wait(), await, .cancel(), .outputs
        -o, --out NAME     set NAME to an RRef to the last expression's value; for several workers, to a list of RRefs
        -t, --timeout      interrupt the cell after this many seconds
        --group-outputs    show the output at the end, by worker
        --fail-fast        interrupt the other workers when one has failed
        --progress-after   seconds without output after which a line says where workers wait; 0 for never (10)
        --local            run the cell in the notebook, too

        Example:
            %%remote 0,2 -o losses
            step(batch)

            %remote worker1 losses[-1]
        """
        if cell is None:
            targets, expression, timeout = parse_value(line)
            cluster = self._session.cluster()
            living = _living(cluster, targets)
            found = cluster.evaluate(expression, living, timeout=timeout)
            # If all other workers are lost, `all` names one worker, and the answer stays a list.
            return [found] if living != targets and living in cluster.names else found
        return self._run(read("%%remote", line), cell)

    @no_var_expand
    @cell_magic
    def timeline(self, line: str, cell: str) -> Any:
        """Run a cell in the notebook, and show what all workers did meanwhile, as a timeline.

        %%timeline [FILE]

        It shows cells on workers, calls, backward passes, optimizer steps, batches of a DataLoader and collectives,
        with the worker that came last to each collective.

        With FILE, this also writes the timeline to a file for the viewer Perfetto (ui.perfetto.dev). If the cell fails,
        the timeline shows what was done until then.

        Example:
            %%timeline step.json
            train(batch)
        """
        file = read("%%timeline", line).file
        told = self._session.cluster().timeline()
        try:
            value = self._run_here(cell)
        finally:
            told.stop()
            display(told)
            if file is not None:
                told.save(file)
        return value

    @no_var_expand
    @cell_magic
    def watch(self, line: str, cell: str) -> Any:
        """Run a cell in the notebook, and show its backward passes and pipeline steps live, here and on workers.

        %%watch [--paused] [-a] [-o NAME] [--no-norms]

        --paused        pause each pass before its first node; the view has buttons to step and to run it
        -a, --noblock   run the cell in the background; return a handle of the pass: .step(3), .run(until="nan"), …
        -o, --out NAME  set NAME to the handle
        --no-norms      do not compute the norms of gradients

        Example:
            %%watch --paused -a -o seen
            %%remote
            loss = model(x).sum()
            loss.backward()
        """
        options = read("%%watch", line)
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
            page = self._session.page()  # read now: when the code begins, another cell may be running
            watcher.begin(lambda: self._run_here(cell, page), end)
            return watcher if options.out is None else None
        try:
            with watcher:
                return self._run_here(cell)
        finally:
            end()

    def _run_here(self, code: str, page: Page | None = None) -> Any:
        """Run code of this cell in the notebook; return the value of its last expression (None after a ``;``)."""
        # Tracebacks count lines from the top of the whole cell, also for code below a magic.
        lines = (page or self._session.page()).lines_above(code) or 0
        transformed = moved_down(self._shell.transform_cell(code), lines)
        name = self._shell.compile.cache(transformed, labels.cell_number(), raw_code=moved_down(code, lines))
        # Not by `run_cell`, which shows an error of the code: the magic has to raise it.
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
    def distributed(self, line: str, cell: str) -> Any:
        """Run a cell on all workers, with the options of `%%remote`.

        Example:
            %%distributed -o losses
            step(batch)
        """
        options = read("%%distributed", line)
        if options.targets is not None:
            raise UsageError("%%distributed takes no target, because it runs on all workers: write %%remote TARGET")
        return self._run(options, cell)

    @no_var_expand
    @cell_magic
    def rank(self, line: str, cell: str) -> Any:
        """Run a cell on some workers: %%rank[0,1], %%rank [0-2], with the options of `%%remote`.

        Example:
            %%rank[0,1] -t 60
            step(batch)
        """
        options = read("%%rank", line)
        if options.targets is None:
            raise UsageError("%%rank needs ranks: write %%rank[0,1], or %%distributed for all workers")
        return self._run(options, cell)

    def _run(self, options: argparse.Namespace, code: str) -> Cell | None:
        """Run code on workers with the ``options`` of `%%remote`; return the handle with ``-a``, else None."""
        cluster = self._session.cluster()
        cluster.select(options.targets)  # a wrong target is an error before a wrong cell is
        page = self._session.page()
        check(self._shell, code, {*self.magics["line"], *self.magics["cell"]}, page)
        wait = not (options.noblock or options.local)
        # The magic and `execute` have the same names for these options.
        same = {name: getattr(options, name) for name in ("timeout", "group_outputs", "fail_fast", "progress_after")}
        keep, above = options.out is not None, lines_before(page.text, code) or 0
        cell = cluster.execute(code, options.targets, block=wait, keep=keep, above=above, **same)
        if options.noblock:
            self._session.reruns.begin(cell)
        if options.local and options.noblock:
            self._session.run_and_show(code)
        elif options.local:

            def here() -> None:
                if self._session.run_and_show(code):
                    raise KeyboardInterrupt  # Stop is meant for the cell on the workers, too

            with undone_by(forget_values, cell):  # the user gets no handle, so nobody can fetch the values
                cell.wait(begin=here)
        if options.out is not None:
            self._shell.user_ns[options.out] = cluster.references(cell, options.targets)
        return cell if options.noblock else None
