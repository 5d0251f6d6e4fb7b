"""torch's own tests of RPC, unmodified, out of the installed wheel, on nbdist."""

from pathlib import Path

import pytest
from torch_suites import Zygote


def names(file):
    path = Path(__file__).parent / file
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    process = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield process
    process.close()


@pytest.mark.parametrize("name", names("torch_rpc.txt"))
def test_suite(zygote, tmp_path, name):
    output = tmp_path / "output"
    answer = zygote.run(name, output)
    if answer["problem"]:
        summary = f"{name} {answer['problem']} after {answer['seconds']} s"
        pytest.fail(f"{summary}\n{output.read_text()}", pytrace=False)
