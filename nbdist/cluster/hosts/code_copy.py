"""Copies the Python files of the notebook's folder to workers of other hosts: ``--sync-code``."""

from __future__ import annotations

import io
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from nbdist.amounts import size
from nbdist.errors import UsageError

_MOST_BYTES = 20_000_000
_MOST_FOLDERS = 10_000
_REMEDY = "start the notebook in a folder of its own, or leave --sync-code out and copy the code yourself"


def pack(folder: Path) -> bytes:
    """Return an archive of the Python files that a process in ``folder`` can import from there.

    These are the ``.py`` files in it, and in folders below it, whose names are valid names of modules and packages.
    This leaves out virtual environments, links to folders, and files and folders with the name of one of Python's own
    modules, which the notebook finds first. Two archives of the same files are equal.

    Raises:
        UsageError: there are more than 20 MB of these files, or 10,000 folders.
    """
    packed = io.BytesIO()
    whole = 0
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _python_files(folder):
            try:
                whole += path.stat().st_size
                text = path.read_bytes() if whole <= _MOST_BYTES else b""
            except OSError:
                continue  # removed just now, or not for this user: whoever imports it gets to know
            if whole > _MOST_BYTES:
                raise UsageError(
                    f"--sync-code copies at most {size(_MOST_BYTES)}, and the Python files in {folder} and below are "
                    f"larger: {_REMEDY}"
                )
            # Not `write`, which adds the time of each file: a copy with another time is the same code.
            archive.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), text)
    return packed.getvalue()


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files that can be imported from a folder, in an order that depends on their names only."""
    for looked_at, (here, below, names) in enumerate(os.walk(folder), 1):
        if looked_at > _MOST_FOLDERS:
            raise UsageError(
                f"--sync-code looks into at most {_MOST_FOLDERS:,} folders, and {folder} has more: {_REMEDY}"
            )
        # Only in the folder itself: below it, Python's own modules have other names.
        shadows = {"__pycache__", *(sys.stdlib_module_names if looked_at == 1 else ())}
        below[:] = sorted(
            name
            for name in below
            if name.isidentifier() and name not in shadows and not Path(here, name, "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            stem, path = name.removesuffix(".py"), Path(here, name)
            if name != stem and stem.isidentifier() and stem not in shadows and path.is_file():
                yield path


def unpack(packed: bytes, folder: Path) -> None:
    """Make ``folder`` have the files of an archive and no others. No file is ever seen half written."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        names = archive.namelist()
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.draft")
            # A worker may import the file meanwhile.
            draft.write_bytes(archive.read(name))
            draft.replace(path)
    kept = {folder / name for name in names}
    for path in set(folder.rglob("*.py")) - kept:
        path.unlink()
    # A file that has changed within a second, to the same size, would be taken for the one that was compiled.
    for path in list(folder.rglob("__pycache__")):
        shutil.rmtree(path, ignore_errors=True)
