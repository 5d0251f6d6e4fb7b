"""Modules that workers begin with."""

import os
import subprocess
import sys

import pytest
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.kernels.workers import StartError
from nbdist.cluster.processes.launchers import local
from nbdist.errors import UsageError


def has(cluster, module):
    """Whether workers have imported a module, which asking does not import."""
    return cluster.evaluate(f"{module!r} in __import__('sys').modules")


def test_workers_begin_with_them_also_when_they_are_restarted():
    with nbdist.Cluster(2, backend="none") as cluster:
        assert has(cluster, "colorsys") == [False, False]  # or this test says nothing
    with nbdist.Cluster(2, backend="none", preload=["colorsys", "xml.dom.minidom"]) as cluster:
        assert has(cluster, "colorsys") == has(cluster, "xml.dom.minidom") == [True, True]
        cluster.restart(1)
        assert has(cluster, "colorsys") == [True, True]


@pytest.mark.skipif(os.environ.get("NBDIST_FORK") == "0", reason="workers are not forked")
def test_a_first_training_step_imports_hardly_anything_where_the_start_left_time(tmp_path, monkeypatch):
    (tmp_path / "said_last.py").write_text(f"open({str(tmp_path / 'said')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local, "PRELOAD_IDLE", (*local.PRELOAD_IDLE, "said_last"))
    local.discard()
    local.prepare()
    wait_until((tmp_path / "said").exists)
    imported = "set(__import__('sys').modules)"
    with nbdist.Cluster(1, backend="none") as cluster:
        before = cluster.evaluate(imported, 0)
        cluster.execute("model = torch.nn.Linear(2, 2); model(torch.ones(2)).sum().backward()")
        cluster.execute("torch.optim.Adam(model.parameters()).step()")
        late = cluster.evaluate(imported, 0) - before
    assert len(late) < 5, late  # of the 800 that come otherwise


def test_a_kernel_lists_no_modules_when_it_starts():
    """Else each worker would have a copy of the pages with their names and reference counts."""
    with nbdist.Cluster(1, backend="none") as cluster:
        assert cluster.evaluate("getattr(get_ipython().kernel, '_kernel_modules', [])", 0) == []
        cluster.execute("%reset --aggressive -f")
        cluster.execute("import torch; torch.ones(1)")
        assert has(cluster, "torch") == [True]


def test_one_may_be_named_without_a_list():
    assert nbdist.Cluster(2, preload="xml.dom").spec.preload == ("xml.dom",)


def test_an_import_that_takes_too_long_is_to_blame(tmp_path, monkeypatch):
    (tmp_path / "takes_long.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StartError, match=r"takes_long could not be imported within 3 s"):
        nbdist.Cluster(1, backend="none", preload="takes_long", timeout=3).start()
    assert nbdist.Cluster.current is None


def test_one_that_cannot_be_imported_is_an_error_and_nothing_is_left():
    cluster = nbdist.Cluster(2, backend="none", preload=["json", "no_such_module"])
    with pytest.raises(UsageError, match=r"cannot import no_such_module: ModuleNotFoundError"):
        cluster.start()
    assert cluster.shutdown() == 0
    assert nbdist.Cluster.current is None


@pytest.mark.soak
def test_a_swarm_finds_transformers_there_and_its_model_classes():
    with nbdist.Cluster(1, backend="none", preload=["nbdist.swarm"]) as cluster:
        assert has(cluster, "transformers.modeling_utils") == [True]


def test_the_package_alone_does_not_import_transformers():
    code = "import sys, nbdist; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
