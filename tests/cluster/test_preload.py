"""Modules that workers begin with."""

import subprocess
import sys

import pytest

import nbdist
from nbdist.cluster.workers import StartError
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
