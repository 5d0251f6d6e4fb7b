"""The magics: each reads a line, makes one call of `nbdist.cluster`, and shows one view."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load", "unload"]


def load(shell: InteractiveShell) -> None:
    """Add the magics to a shell."""
    from nbdist.cluster.launchers.local import prepare

    prepare()  # first: it imports torch beside us
    from nbdist.cluster.shell_channel import answer_through_stream
    from nbdist.magics.commands import DistMagics
    from nbdist.magics.session import Session
    from nbdist.views import displays

    answer_through_stream(getattr(shell, "kernel", None))
    session = Session.of(shell)
    shell.register_magics(DistMagics(shell, session))
    displays.register(shell)


def unload(shell: InteractiveShell) -> None:
    """End the cluster, and take away what `load` added to every cell."""
    from nbdist.magics.session import Session
    from nbdist.views import displays

    displays.unregister(shell)
    Session.of(shell).close()
