"""Makes Shift-Tab in a cell for workers describe the name at the cursor as the worker has it."""

from __future__ import annotations

from typing import Any

from nbdist.magics.place import find_remote_code


def inspect_on_workers(kernel: Any) -> None:
    """Let a kernel answer inspect requests for code that runs on workers from there, and all others as before.

    To undo it, delete the kernel's attribute ``do_inspect``, which hides the class's own method.
    """
    plain = kernel.do_inspect

    def inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Return the reply to an inspect request, from the first target worker if the code is for workers."""
        place = find_remote_code(code, cursor_pos)
        worker = place.first_target() if place is not None else None
        if place is None or worker is None:
            return plain(code, cursor_pos, detail_level, omit_sections)
        if (found := place.ask(worker, "inspect_request", detail_level=detail_level)) is not None:
            return found
        text = f"{worker.name} is busy and cannot say what this is; ask again when its cell has ended."
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    kernel.do_inspect = inspect
