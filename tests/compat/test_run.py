"""``python -m nbdist run``: an unmodified program, and the processes that it starts."""

import os
import sys
import textwrap

import pytest
from compat.processes import python
from helpers.suite.python_path import python_path

PROGRAM = '''
import os, subprocess, sys, threading
import torch
import torch.distributed.rpc as rpc

seen = []
lock = threading.Lock()

class Point:
    def __init__(self, x):
        self.x = x

    def get(self):
        return self.x

def add(point):
    """Uses this process's own lock, list and class: none of them must travel."""
    assert type(point) is Point
    with lock:
        seen.append(point.x)
    return os.getpid(), list(seen)

def work(rank, store):
    assert rpc.__name__.startswith("nbdist."), rpc.__name__
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=30)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        first, second = (rpc.rpc_sync("worker1", add, args=(Point(x),)) for x in (1, 2))
        assert first[0] == second[0] != os.getpid()
        assert not seen
        print(first[1], second[1], rpc.remote("worker1", Point, args=(3,)).rpc_sync().get())
    rpc.shutdown()

if __name__ == "__main__":
    method, store = sys.argv[1:3]
    if method == "child":
        work(1, store)
    elif method == "subprocess":
        child = subprocess.Popen([sys.executable, __file__, "child", store])
        work(0, store)
        assert child.wait(60) == 0
    else:
        import torch.multiprocessing as mp
        child = mp.get_context(method).Process(target=work, args=(1, store))
        child.start()
        work(0, store)
        child.join(60)
        assert child.exitcode == 0
'''


def write(path, code):
    path.write_text(textwrap.dedent(code))
    return path


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak), "forkserver", "subprocess"])
def test_processes_that_the_program_starts_take_part(tmp_path, method):
    program = write(tmp_path / "program.py", PROGRAM)
    done = python("-m", "nbdist", "run", program, method, tmp_path / "store")
    assert done.stdout == "[1] [1, 2] 3\n"


def test_mp_spawn(tmp_path):
    code = PROGRAM[: PROGRAM.index("if __name__")] + textwrap.dedent(
        """
        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
        """
    )
    done = python("-m", "nbdist", "run", write(tmp_path / "program.py", code), tmp_path / "store")
    assert done.stdout == "[1] [1, 2] 3\n"


def test_the_program_finds_what_python_would_have_given_it(tmp_path):
    (tmp_path / "beside.py").write_text("")
    program = write(
        tmp_path / "program.py",
        """
        import sys
        print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.modules["__main__"].__dict__ is globals())
        print(sys.flags.dev_mode, "torch" in sys.modules, "nbdist" in sys.modules)
        if not sys.flags.safe_path:
            import beside
        sys.exit(7)
        """,
    )
    arguments = ["-x", "--", "-m", "--help", "a b"]
    done = python("-X", "dev", "-m", "nbdist", "run", program, *arguments, check=False)
    assert done.stdout.splitlines() == [f"__main__ True {arguments} True", "True False False"], done.stderr
    assert done.returncode == 7


def test_a_module_can_be_run(tmp_path):
    write(
        tmp_path / "program.py",
        """
        import sys
        import torch.distributed.rpc
        print(__name__, sys.argv[1:], torch.distributed.rpc.__name__)
        """,
    )
    done = python("-m", "nbdist", "run", "-m", "program", "-v", **python_path(tmp_path))
    assert done.stdout == "__main__ ['-v'] nbdist.compat.rpc\n"


def test_a_program_may_look_for_torch_before_it_imports_it(tmp_path):
    program = write(
        tmp_path / "program.py",
        """
        import importlib.util, sys
        assert importlib.util.find_spec("torch") is not None and "torch" not in sys.modules
        assert importlib.util.find_spec("torch.nn") is not None  # imports torch
        import torch.distributed.rpc
        print(torch.distributed.rpc.__name__, [type(each).__name__ for each in sys.meta_path].count("_AfterTorch"))
        """,
    )
    assert python("-m", "nbdist", "run", program).stdout == "nbdist.compat.rpc 0\n"


def test_another_sitecustomize_is_run_too(tmp_path):
    write(tmp_path / "sitecustomize.py", "import sys; sys.was_here = True")
    program = write(
        tmp_path / "program.py",
        """
        import sys, sitecustomize
        import torch.distributed.rpc
        print(sys.was_here, sitecustomize.__file__, torch.distributed.rpc.__name__)
        """,
    )
    done = python("-m", "nbdist", "run", program, **python_path(tmp_path))
    assert done.stdout == f"True {tmp_path / 'sitecustomize.py'} nbdist.compat.rpc\n"


def test_a_program_without_torch_is_not_slowed_down(tmp_path):
    program = write(tmp_path / "program.py", "import sys; print(sorted({'torch', 'nbdist', 'zmq'} & set(sys.modules)))")
    assert python("-m", "nbdist", "run", program).stdout == "[]\n"


def test_a_broken_torch_fails_as_it_would(tmp_path):
    (tmp_path / "torch").mkdir()
    write(tmp_path / "torch" / "__init__.py", "raise ImportError('broken')")
    program = write(
        tmp_path / "program.py",
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        try:
            import torch
        except ImportError as error:
            print(error)
        """,
    )
    assert python("-m", "nbdist", "run", program).stdout == "broken\n"


def test_flags_under_which_it_cannot_work_are_refused():
    code = "import sys; from nbdist.__main__ import main; sys.exit(main(['run', 'x.py']))"
    path = os.environ.get("PYTHONPATH", "")
    done = python(
        "-S", "-c", f"import sys; sys.path[:0] = {[*path.split(os.pathsep), *sys.path]!r}; {code}", check=False
    )
    assert done.returncode == 2
    assert "-S" in done.stderr


def test_usage():
    done = python("-m", "nbdist", check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert "program" in python("-m", "nbdist", "run", "--help").stdout
    assert python("-m", "nbdist", "--version").stdout.startswith("nbdist ")
