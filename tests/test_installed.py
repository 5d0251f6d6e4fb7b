"""What is tested is the built wheel, installed, and it is the wheel of this checkout."""

from pathlib import Path

import nbdist

CHECKOUT = Path(__file__).resolve().parents[1]
INSTALLED = Path(nbdist.__file__).resolve().parent


def files(root: Path) -> dict[str, bytes]:
    """The files below `root` by relative path, without what Python caches there."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_package_comes_from_site_packages():
    assert "site-packages" in INSTALLED.parts, f"nbdist was imported from {INSTALLED}: run `make test`"
    assert not INSTALLED.is_relative_to(CHECKOUT / "nbdist")


def test_the_wheel_holds_every_file_of_the_checkout():
    built, source = files(INSTALLED), files(CHECKOUT / "nbdist")
    assert sorted(built) == sorted(source), "the wheel's files are not the checkout's"
    changed = sorted(name for name in source if built[name] != source[name])
    assert not changed, f"the installed wheel is older than the checkout: run `make test` ({changed})"


def test_the_package_says_that_it_is_typed():
    assert (INSTALLED / "py.typed").is_file()
