"""Workers of other hosts can import the Python files of the notebook's folder, if they are copied there."""

import os
import threading
from pathlib import Path

import pytest
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.waiting import wait_for_file

import nbdist
from nbdist.cluster.hosts import code_copy
from nbdist.cluster.hosts.code_copy import pack, unpack
from nbdist.cluster.inspection.reloads import reload_on
from nbdist.errors import UsageError

FILES = {
    "helpers.py": "VALUE = 1\n",
    "package/__init__.py": "",
    "package/deep/inner.py": "X = 'inner'\n",
    "package/data.csv": "1,2\n",
    "no-package/other.py": "",
    ".hidden/other.py": "",
    "package/__pycache__/inner.py": "",
    "venv/pyvenv.cfg": "",
    "venv/lib/other.py": "",
    "my-script.py": "",
    "caf\udce9.py": "",
    "statistics.py": "",
    "json/__init__.py": "",
    "package/json.py": "",
}
COPIED = ["helpers.py", "package/__init__.py", "package/deep/inner.py", "package/json.py"]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_can_be_imported_is_copied_and_nothing_else(tmp_path):
    here, there = write(tmp_path / "here", FILES), tmp_path / "there"
    os.mkfifo(here / "pipe.py")
    unpack(pack(here), there)
    assert names(there) == COPIED
    assert (there / "helpers.py").read_text() == "VALUE = 1\n"
    assert pack(there) == pack(here)


def test_the_second_copy_replaces_the_first(tmp_path):
    here, there = write(tmp_path / "here", FILES), tmp_path / "there"
    unpack(pack(here), there)
    write(there, {"__pycache__/helpers.cpython-311.pyc": "compiled"})
    (here / "helpers.py").rename(here / "others.py")
    unpack(pack(here), there)
    assert names(there) == ["others.py", *COPIED[1:]]


def test_too_much_code_is_refused(tmp_path, monkeypatch):
    write(tmp_path, FILES)
    monkeypatch.setattr(code_copy, "_MOST_BYTES", 20)
    with pytest.raises(UsageError, match=r"--sync-code copies at most 20 B, and the Python files in .* are larger: st"):
        pack(tmp_path)
    monkeypatch.setattr(code_copy, "_MOST_FOLDERS", 2)
    monkeypatch.setattr(code_copy, "_MOST_BYTES", 1000)
    with pytest.raises(UsageError, match=r"--sync-code looks into at most 2 folders, and .* has more: start"):
        pack(tmp_path)


def test_it_is_for_workers_of_other_hosts():
    with pytest.raises(UsageError, match=r"sync_code is for the launcher join or ray, not for local"):
        nbdist.Cluster(1, sync_code=True)


@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
def test_workers_import_it_where_the_folder_is_not_seen(tmp_path, monkeypatch):
    """They import the copied files, also with --preload; after a restart, the files as they are then."""
    folder = write(tmp_path / "project", FILES)
    monkeypatch.chdir(folder)
    file = tmp_path / "invitation.json"
    with hosts(1) as (address, (other,)):

        def start():
            other.start("-m", "nbdist", "worker", "--connect", "-", "-n", "2", stdin=wait_for_file(file))

        threading.Thread(target=start, daemon=True).start()
        options = {"launcher": "join", "host": address, "invitation": str(file)}
        with nbdist.Cluster(2, **options, sync_code=True, preload="package.deep.inner") as cluster:
            cluster.execute("import helpers, package.deep.inner, os")
            assert (
                cluster.evaluate(
                    "helpers.VALUE, package.deep.inner.X, os.path.exists(FOLDER)".replace("FOLDER", repr(str(folder)))
                )
                == [(1, "inner", False)] * 2
            )
            write(folder, {"helpers.py": "VALUE = 2\n", "package/deep/inner.py": "X = 'preloaded'\n"})
            cluster.restart(["worker1"])
            cluster.execute("import helpers")
            cluster.execute("import package.deep.inner", "worker1")
            assert cluster.evaluate("helpers.VALUE, package.deep.inner.X") == [(1, "inner"), (2, "preloaded")]
            write(folder, {"helpers.py": "VALUE = 3  # edited\n"})
            assert reload_on(cluster, "helpers", cluster.names, here=False) == "helpers reloaded on worker0,1"
            assert cluster.evaluate("helpers.VALUE") == [3, 3]
