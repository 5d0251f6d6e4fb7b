"""The modules that pages run: what of them is pure, under node; and that they ask nobody for anything."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nbdist.views import widgets
from nbdist.views.widgets.backward import BackwardView
from nbdist.views.widgets.card import RRefCard
from nbdist.views.widgets.map import MapView
from nbdist.views.widgets.panel import PanelView

HERE = Path(__file__).parent
STATIC = Path(widgets.__file__).parent.parent / "static"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="there is no node here")
@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_drawing_is_right(name, tmp_path):
    # A copy, with the checkout's or the installed package's modules: node wants to be told that they are modules.
    shutil.copytree(STATIC, tmp_path / "static")
    text = (HERE / name).read_text().replace("../../nbdist/views/static", "./static")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", name], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(*re.findall(r"1,000 nodes.*", done.stdout))


def test_what_is_bundled_has_its_licence():
    licence = (STATIC / "dagre.LICENSE").read_text()
    assert "Permission is hereby granted" in licence


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.*s*")), ids=lambda path: path.name)
def test_nothing_is_fetched_from_outside(path):
    text = path.read_text()
    strangers = [found for found in re.findall(r"https?://[^\s\"')]+", text) if "www.w3.org" not in found]
    assert not strangers
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts)\s*\(|@import", text)


@pytest.mark.parametrize("view", [BackwardView, RRefCard, MapView, PanelView])
def test_modules_become_one(view, tmp_path):
    text = view._esm.default_value
    assert not re.search(r"^import ", text, re.MULTILINE)
    assert text.count("export default") == 1
    assert ("await import(URL.createObjectURL" in text) == (view is BackwardView)
    names = re.findall(r"^(?:export )?(?:const|let|function) (\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    if NODE is not None:
        (tmp_path / "view.mjs").write_text(text)
        checked = subprocess.run(
            [NODE, "--check", "view.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert checked.returncode == 0, checked.stderr
