"""`NewCode`: lets a worker run the new code of edited modules by itself, between its cells."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import Any

from nbdist.cluster.examination.reloading import reload_changed, say_failed


class NewCode:
    """The modules of a worker that follow their files. The notebook may call the methods in `METHODS`."""

    METHODS = ("follow",)

    def __init__(self, shell: Any) -> None:
        self._depth = 0  # of the cells that run: a cell may run another one
        self._due: tuple[Collection[str] | None, Collection[str]] | None = None
        self._lock = threading.Lock()
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def follow(self, only: Collection[str] | None, but: Collection[str]) -> dict[str, str]:
        """Reload edited modules, and return the errors, as `reload_changed` does; while a cell runs, before the next.

        Then the errors are printed there.
        """
        with self._lock:
            self._due = only, but
            return {} if self._depth else self._reload()

    def _before_cell(self, _: object) -> None:
        with self._lock:
            if not self._depth:
                for name, error in self._reload().items():
                    print(f"%autoreload: {say_failed(name, error)}", file=sys.stderr)
            self._depth += 1

    def _after_cell(self, _: object) -> None:
        self._depth = max(0, self._depth - 1)

    def _reload(self) -> dict[str, str]:
        due, self._due = self._due, None
        return reload_changed(*due) if due is not None else {}
