"""`%dist_diff --code`, and `%dist_doctor` on the same: workers whose code and settings differ, and healthy ones."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.notebook.frontend import Notebook

from nbdist.cluster.examination import imported_files
from nbdist.cluster.examination.code_facts import describe_code
from nbdist.cluster.examination.code_remarks import code_finding, remarks_on


@pytest.fixture(scope="module")
def three():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 3", timeout=120)
        yield notebook


def diff(notebook, arguments=""):
    head, *lines = notebook.run(f"%dist_diff --code {arguments}").stdout.splitlines()
    return head, [line.strip() for line in lines]


def on(notebook, topic):
    return [line for line in diff(notebook)[1] if line.startswith(f"{topic}: ")]


# --- workers -------------------------------------------------------------------------------------------


TRAINING = """%%remote
import functools, random, numpy, torch.utils.data
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 2))
sharded = fully_shard(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
compiled = torch.compile(torch.nn.Linear(2, 2))
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = self.other
        self.activation = torch.relu
    def forward(self, x): return x
    def other(self, x): return x
own = Own()
loader = torch.utils.data.DataLoader([1, 2], collate_fn=lambda items: items)
model(torch.ones(1, 2)).sum().backward(); optimizer.step(); scheduler.step()
"""


def test_a_healthy_program_is_not_blamed(three):
    three.run(TRAINING, timeout=120)
    assert diff(three) == ("code of notebook, worker0-2: nothing differs", [])
    assert "code: " not in three.run("%dist_doctor -t 5").result
    assert three.run("from nbdist import Cluster\n[each.topic for each in Cluster.current.examine(timeout=5).findings]")


def test_a_file_that_changes_after_its_import(three, tmp_path):
    file = tmp_path / "trained.py"
    file.write_text("RATE = 0.1\n")
    path = f"import sys\nif {str(tmp_path)!r} not in sys.path: sys.path.insert(0, {str(tmp_path)!r})\n"
    three.run(f"%%remote\n{path}import trained")
    assert on(three, "modules") == []
    file.write_text("RATE = 0.1\n")  # saved again, as it was
    assert on(three, "modules") == []
    file.write_text("RATE = 0.25\n")
    told = f"%dist_reload trained takes the new {file}"
    assert on(three, "modules") == [f"modules: trained has changed since its import on worker0-2: {told}"]
    found = three.run("print(Cluster.current.examine(timeout=5))").stdout
    assert f"modules: trained has changed since its import on worker0-2: {told} (1 of 1 difference)" in found
    three.run("%%remote 0,2\nimport importlib\nimportlib.reload(trained)")
    changed, apart = on(three, "modules")
    assert changed == f"modules: trained has changed since its import on worker1: {told}"
    assert apart.startswith("modules: trained: content ")
    assert apart.endswith(" on worker1")
    # The notebook counts too: a call by name runs the worker's module.
    three.run(f"{path}import trained")
    assert on(three, "modules")[1].split("; ")[0].endswith(" on notebook, worker0,2")
    three.run("%%remote 1\nimport importlib\nimportlib.reload(trained)")
    assert on(three, "modules") == []


def test_a_function_of_a_cell_that_a_worker_has_not_run_again(three):
    body = "class Half:\n    def __call__(self, x): return x / 2\ndef weight(x): return Half()(x)"
    three.run(f"%%remote\n{body}")
    three.run(f"%%remote 1\n{body}")  # the same code, of another cell
    assert on(three, "functions") == []
    cell = three.run(f"%%remote 0,2\n# better\n{body.replace('/ 2', '/ 4')}")
    (line,) = on(three, "functions")
    stale = rf"code \w{{8}} of {re.escape(cell.name)}:4 on worker0,2; code \w{{8}} of In\[\d+\]:3 on worker1"
    assert re.fullmatch(f"functions: Half: {stale}", line)
    assert re.search(stale, three.run("%dist_doctor -t 5").result)
    three.run(f"%%remote 1\n{body.replace('/ 2', '/ 4')}")
    assert on(three, "functions") == []


def test_a_module_that_comes_from_another_file(three, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "moved.py").write_text("X = 1\n")
    three.run(
        f"%%remote\nimport sys; sys.path.insert(0, {str(tmp_path)!r} + ('/two' if rank == 1 else '/one'))\nimport moved"
    )
    (line,) = on(three, "files")
    assert line.startswith("files: moved on ")
    assert line.endswith(f": {tmp_path}/one/moved.py on worker0,2; {tmp_path}/two/moved.py on worker1")
    assert on(three, "modules") == []
    three.run("%%remote\nsys.path.pop(0)\ndel sys.modules['moved']")
    assert on(three, "files") == []


def test_functions_of_torch_that_somebody_replaced(three, tmp_path):
    package = tmp_path / "site-packages" / "patcher"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\ndef fast(*args): pass\ntorch.nn.LayerNorm.forward = fast\n")
    three.run(
        "%%remote 1\n"
        + """import functools, types
kept = torch.nn.functional.relu, dist.all_reduce, torch.nn.LayerNorm.forward, torch.nn.Linear
@functools.wraps(torch.nn.functional.relu)
def loud(*args, **kwargs): return torch.zeros(1)
torch.nn.functional.relu = loud
dist.all_reduce = functools.partial(loud, 1)
class Mine(torch.nn.Linear):
    def __init__(self): pass
torch.nn.Linear = Mine
sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)
def step(self): pass
sgd.step = types.MethodType(step, sgd)
"""
        + f"import sys; sys.path.insert(0, {str(tmp_path / 'site-packages')!r})\nimport patcher"
    )
    found = on(three, "torch")
    cell = found[0].rpartition("In[")[2].partition("]")[0]
    assert found == [
        f"torch: sgd.step is replaced: step, In[{cell}]:12 on worker1",
        f"torch: torch.distributed.all_reduce is replaced: loud, In[{cell}]:4 on worker1",
        f"torch: torch.nn.Linear is replaced: Mine.__init__, In[{cell}]:9 on worker1",
        f"torch: torch.nn.functional.relu is replaced: loud, In[{cell}]:4 on worker1",
        "torch: torch.nn.modules.normalization.LayerNorm.forward is replaced: fast, patcher/__init__.py:2 on worker1",
    ]
    assert "code" in three.run("print([each.topic for each in Cluster.current.examine(timeout=5).findings])").stdout
    three.run(
        "%%remote 1\ntorch.nn.functional.relu, dist.all_reduce, torch.nn.LayerNorm.forward, torch.nn.Linear = kept\n"
        "del sgd.step"
    )
    assert on(three, "torch") == []
    # On all workers it may be meant: told here, and no fault.
    three.run("%%remote\nkept = torch.matmul\ntorch.matmul = lambda a, b: a @ b")
    (line,) = on(three, "torch")
    assert line.endswith(":3 on worker0-2")
    assert "torch.matmul" not in three.run("print(Cluster.current.examine(timeout=5))").stdout
    three.run("%%remote\ntorch.matmul = kept")


def test_variables_of_the_environment(three):
    three.run(
        "%%remote 1\nimport os\nos.environ.update(OMP_NUM_THREADS='4', DATA='/data', API_TOKEN='hunter2', JOB_PID='1')"
    )
    found = on(three, "environment")
    assert any(line.startswith("environment: OMP_NUM_THREADS: ") and line.endswith("; 4 on worker1") for line in found)
    assert "environment: DATA: not set on worker0,2; /data on worker1" in found
    assert any("API_TOKEN: not set on worker0,2; a value with digest " in line for line in found)
    assert not any("hunter2" in line or "RANK" in line or "JOB_PID" in line or "PORT" in line for line in found)
    three.run("%%remote 1\nfor name in ('DATA', 'API_TOKEN', 'JOB_PID'): del os.environ[name]")
    three.run("%%remote\nimport os\nos.environ['OMP_NUM_THREADS'] = '1'")
    assert on(three, "environment") == []


def test_equal_random_states(three):
    assert on(three, "random states") == []
    three.run("%%remote 0,2\ntorch.manual_seed(0)")
    three.run("%%remote\nrandom.seed(1); numpy.random.seed(2)")
    everywhere = "is equal on 3 workers (worker0-2): samplers that draw from it take the same data there, unless seeded"
    some = everywhere.replace("3 workers (worker0-2)", "2 workers (worker0,2)")
    assert on(three, "random states") == [
        f"random states: numpy's {everywhere} with the rank",
        f"random states: python's {everywhere} with the rank",
        f"random states: torch's {some} with the rank",
    ]
    assert "random" not in three.run("print(Cluster.current.examine(timeout=5).findings)").stdout
    three.run("%%remote\ntorch.manual_seed(rank); random.seed(rank); numpy.random.seed(rank)")
    assert on(three, "random states") == []


def test_some_workers_and_busy_ones(three):
    handle = three.run("%%remote 2 -a -o slept\nimport time; time.sleep(3)")
    assert handle.error is None
    assert diff(three)[0] == "code of notebook, worker0-2: nothing differs"
    assert diff(three, "-r 0,1")[0] == "code of notebook, worker0,1: nothing differs"
    assert three.run("%dist_diff --code -r 7", check=False).error["ename"] == "UnknownWorker"
    three.run("%sync")


def test_the_odd_one_out_among_three_workers(three):
    three.run("%%remote\nbig = [2**70 + (rank == 0), torch.arange(3) + 2**60 + (rank == 0)]")
    told = three.run("%dist_diff big").result.splitlines()
    assert told == [
        "big differs: 2 of 3 parts; worker0 differs from the others",
        f"  big[0] on worker0: {2**70 + 1} instead of {2**70}, 1 apart",
        f"  big[1] on worker0: first at [0]: {2**60 + 1} instead of {2**60}; 3 of 3 values, at most 1 apart",
    ]


# --- words, and one process ---------------------------------------------------------------------------


def facts(**topics):
    known = ("changed", "modules", "files", "torch", "functions", "versions", "environment", "random states")
    empty = {key: {} for key in known}
    return {**empty, **{topic.replace("_", " "): found for topic, found in topics.items()}}


def told(workers, notebook=None):
    return [line for line, _ in remarks_on(workers, {"notebook": notebook or facts()})]


def test_hosts_may_keep_the_same_files_in_different_folders():
    one = facts(modules={"m": "content 1"}, files={"m on a": "/home/a/m.py"})
    other = facts(modules={"m": "content 1"}, files={"m on b": "/srv/m.py"})
    assert told({"worker0": one, "worker1": other}) == []


def test_a_module_or_package_that_only_some_have_does_not_differ():
    one = facts(modules={"m": "content 1"}, versions={"wandb": "1"})
    assert told({"worker0": one, "worker1": facts()}) == []
    two = facts(versions={"wandb": "2"})
    assert told({"worker0": one, "worker1": two}) == ["versions: wandb: 1 on worker0; 2 on worker1"]
    assert code_finding({"worker0": one, "worker1": two}, {"notebook": facts()}) == []


def test_the_notebooks_environment_and_random_state_are_its_own():
    notebook = facts(environment={"A": "1"}, random_states={"torch": "x"})
    assert told({"worker0": facts(random_states={"torch": "x"})}, notebook) == []


ALL_OF_TORCH = """
import importlib, pkgutil, torch
from nbdist.cluster.examination.replaced import replaced_functions
for module in pkgutil.walk_packages(torch.__path__, "torch."):
    if "._" not in module.name and "testing" not in module.name:
        try:
            importlib.import_module(module.name)
        except (ImportError, RuntimeError):  # it needs a package or a device that is missing
            pass
for package in ("accelerate", "transformers.trainer"):
    try:
        importlib.import_module(package)
    except ImportError:
        pass
print(replaced_functions())
class Mine(torch.nn.Linear):
    def forward(self, x): return x
torch.nn.Linear = Mine
print(replaced_functions())
"""


def test_nothing_of_torch_itself_counts_as_replaced(tmp_path):
    """All public modules of torch, and two packages that wrap its functions."""
    file = tmp_path / "all.py"
    file.write_text(ALL_OF_TORCH)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-2:] == ["{}", "{'torch.nn.Linear': 'Mine.forward, all.py:17'}"], done.stderr


def test_a_search_for_a_module_is_no_import_of_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = Path(tmp_path, "searched_for.py")
    file.write_text("A = 1\n")
    importlib.util.find_spec("searched_for")
    file.write_text("A = 22\n")
    importlib.invalidate_caches()
    module = importlib.import_module("searched_for")
    try:
        assert module.A == 22
        assert imported_files.read_files()["searched_for"][2] is False
        file.write_text("A = 333\n")
        assert describe_code()["changed"]["searched_for"] == str(file)
        file.unlink()
        assert "searched_for" not in describe_code()["changed"]
    finally:
        del sys.modules["searched_for"]
