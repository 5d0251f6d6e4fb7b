"""Makes Shift-Tab in a cell for workers describe the name at the cursor as the worker has it."""

from __future__ import annotations

from typing import Any

from nbdist.cluster import asking
from nbdist.cluster.cluster import Cluster
from nbdist.magics import completion
from nbdist.magics.place import find_remote_code


class RemoteInspector:
    """Answers a kernel's inspect requests for code that runs on workers, and passes on all others to the kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._plain = kernel.do_inspect
        kernel.do_inspect = self._inspect

    def remove(self) -> None:
        """Restore the kernel's own ``do_inspect``. Call this once."""
        del self._kernel.do_inspect  # the attribute hides the class's own method

    def _inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Return the reply to an inspect request, from the first target worker if the code is for workers."""
        place = find_remote_code(code, cursor_pos)
        worker = place.first_target() if place is not None else None
        if place is None or worker is None or Cluster.current is None:
            return self._plain(code, cursor_pos, detail_level, omit_sections)
        patience = completion.ANSWER_TIMEOUT  # the notebook's kernel answers nothing else meanwhile
        found = asking.inspect(Cluster.current, worker, place.code, place.cursor, detail_level, patience)
        if found is not None:
            return found
        text = f"{worker.name} is busy and cannot say what this is; ask again when its cell has ended."
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
