"""`NewCode`: lets a worker run the new code of edited modules by itself, between its cells."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from nbdist.cluster.examination.reloading import reload_changed


class NewCode:
    """The modules of a worker that follow their files. The notebook may call `follow`."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._depth = 0  # of the cells that run: a cell may run another one
        self._due: tuple[Collection[str] | None, Collection[str]] | None = None
        shell.events.register("pre_run_cell", lambda _: self._change_depth(1))
        shell.events.register("post_run_cell", lambda _: self._change_depth(-1))
        reload_changed()  # modules that the zygote has imported, perhaps before an edit

    def follow(self, only: Collection[str] | None, but: Collection[str]) -> None:
        """Reload edited modules, as `reload_changed` does; while a cell runs, do so before the next one.

        Called in a thread of the agent. A module may have to run in the main thread, where cells run.
        """
        self._due = only, but
        if not self._depth:
            asyncio.run_coroutine_threadsafe(self._reload(), self._shell.kernel.io_loop.asyncio_loop).result()

    async def _reload(self) -> None:
        self._change_depth(0)

    def _change_depth(self, change: int) -> None:
        if not self._depth and self._due is not None:
            due, self._due = self._due, None
            reload_changed(*due)
        self._depth = max(0, self._depth + change)
