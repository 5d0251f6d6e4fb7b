"""The magics of the notebook. Each reads a line, makes one call of `nbdist.cluster`, and shows one view.

=============  ====================================================================
`dist_magics`  defines the magics; their docstrings are the help for users
`lines`        parses their lines; `reader` is the parser of one line
`overview`     the text of `%dist`
`checking`     checks a cell for workers before it is sent
`session`      the state of one shell, and the functions that run with every cell
`reruns`       a cell that is run again while its earlier run is still running
`place`        finds the code for workers in a cell's text, and asks about it
`completion`   completes code for workers (Tab)
`inspection`   shows help on a name in code for workers (Shift-Tab)
=============  ====================================================================
"""

from __future__ import annotations

import sys

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load", "unload"]


def load(shell: InteractiveShell) -> None:
    """Add the magics, completion, inspection and displays to a shell. ``%load_ext nbdist`` calls this.

    ``notebooks/00_tour.ipynb`` shows it. `unload` undoes it, but leaves the magics.
    """
    from nbdist.cluster.processes.launchers.local import prepare

    prepare()  # first, because it starts a process that imports torch while this one does, too
    from nbdist import __version__, trace
    from nbdist.views.workers.line import line_in_place

    tell = line_in_place()
    if "torch" not in sys.modules:
        tell("nbdist imports torch ...")
    from nbdist.cluster.jupyter.versions import answer_through_stream
    from nbdist.magics.dist_magics import DistMagics
    from nbdist.magics.session import NotebookSession
    from nbdist.views import displays

    answer_through_stream(getattr(shell, "kernel", None))
    session = NotebookSession.of(shell)
    shell.register_magics(DistMagics(shell, session))
    displays.register(shell)
    trace.show_steps(line_in_place)
    tell(f"nbdist {__version__}: %dist_init -n 4 starts four workers, %dist lists all magics.")


def unload(shell: InteractiveShell) -> None:
    """Undo what `load` did to the shell, except that the magics stay registered; end the cluster."""
    from nbdist import trace
    from nbdist.magics.session import NotebookSession
    from nbdist.views import displays

    trace.show_steps(None)
    displays.unregister(shell)
    NotebookSession.of(shell).close()  # makes a session, if the shell has none, and closes it
