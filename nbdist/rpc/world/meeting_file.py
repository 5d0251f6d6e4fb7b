"""Keeps one text in a file that many processes change by compare-and-set. Members of ``file://`` meet there.

A process that is killed at any moment leaves the old text or the new text (`nbdist.channel.locked_file`). The file lies
beside the path in the URL (``PATH.rpc``): a program may give the same URL to torch's ``init_process_group``, whose
FileStore uses the path itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from nbdist.channel.locked_file import locked, write_whole
from nbdist.errors import RendezvousError

# Seconds to wait for the lock. Its holder needs less than a millisecond, unless it is stopped or the disk hangs.
_LOCK_TIMEOUT = 2.0

# Bytes. A roster takes about 300 bytes for each member; a larger file belongs to another program.
_LARGEST_ROSTER = 64 << 20


class MeetingFile:
    """One text, shared by the processes that name the same path. Any thread may use it."""

    def __init__(self, path: str) -> None:
        """Check that the file can be used; raise RendezvousError at once if not. Leaves no empty file behind."""
        self._path = Path(f"{path}.rpc")
        self._draft = Path(f"{self._path}.new")
        try:
            self.compare_set("", "", "")
        except TimeoutError:  # another process is slow; if it stays so, the next `compare_set` raises the error
            pass
        except OSError as error:
            raise RendezvousError(
                f"members cannot meet at file://{path}: {error.strerror} ({self._path}). Name a file in a folder that "
                "exists and that all members may write to"
            ) from error

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the text is ``expected``; return the text that the file has then. ``key`` is ignored."""
        # TimeoutError if another process holds the lock for 2 s; OSError if the disk is full or the folder is gone.
        with locked(self._path, _LOCK_TIMEOUT) as file:
            text = self._text(file)
            if text == expected.encode() and expected != desired:
                text = desired.encode()
                if text:
                    write_whole(self._path, text, self._draft)
            if not text:  # `locked` has made the file, or its text has been removed
                self._draft.unlink(missing_ok=True)  # a killed or interrupted process may have left it
                self._path.unlink()
            return text

    def _text(self, file: int) -> bytes:
        size = os.fstat(file).st_size
        if size > _LARGEST_ROSTER:
            raise RendezvousError(
                f"{self._path} has {size} bytes, too many for a list of members: another program's file. Meet at "
                "another path, or remove the file"
            )
        return os.pread(file, size, 0)
