"""Where nbdist cannot work, its import says so in one sentence, before it imports what would fail there."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sys.platform = 'darwin'", "nbdist runs on Linux, and this is darwin: WSL2 and Docker work"),
        ("sys.platform = 'win32'", "nbdist runs on Linux, and this is win32: WSL2 and Docker work"),
        ("sys.abiflags = 't'", "nbdist needs a Python with a GIL, and this one is free-threaded: use python3.13"),
    ],
)
def test_an_import_elsewhere_says_what_works(change, said):
    code = (
        f"import sys\n{change}\ntry:\n    import nbdist.rpc\nexcept ImportError as error:\n"
        "    print(error)\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    sentence, has_torch = done.stdout.splitlines()
    assert sentence.startswith(said)
    assert has_torch == "False"
