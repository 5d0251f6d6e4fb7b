"""Where nbdist cannot work, its import says so in one sentence."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sys.platform = 'darwin'", "nbdist runs on Linux, and this is darwin: in WSL2 or Docker it works here, too"),
        ("sys.platform = 'win32'", "nbdist runs on Linux, and this is win32"),
        ("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1", "this one is free-threaded: take the build without a t"),
    ],
)
def test_an_import_elsewhere_says_what_works(change, said):
    # As after the first lines of an interpreter there: torch is not imported yet.
    code = f"import sys, sysconfig\n{change}\nimport nbdist.rpc"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: nbdist ")
    assert said in done.stderr


def test_it_is_said_before_anything_is_imported_that_would_fail_there():
    code = (
        "import sys; sys.platform = 'win32'\ntry:\n    import nbdist\nexcept ImportError: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
