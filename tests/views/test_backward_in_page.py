"""The view of a backward pass in a real page: buttons that act on the pass itself, while its cell is busy."""

import pytest
from helpers.notebook import older_packages
from helpers.notebook.browser import needs_browser, notebook
from helpers.suite.python_path import python_path

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

START = """
import torch
%load_ext nbdist
%dist_init -n 3 --backend none
"""
WORKERS = """
%%remote
import torch
w = torch.full((4,), 2.0 + rank, dtype=torch.float64, requires_grad=True)
"""
HERE = """
def weigh(x):
    import __main__
    return (x * __main__.w).tanh()

def spoil(x):
    return (x - 1.0).sqrt()

def hook(factor):
    import __main__
    __main__.w.register_hook(lambda gradient: gradient * factor)

def gradient(context_id):
    import __main__
    from nbdist import autograd
    return autograd.get_gradients(context_id)[__main__.w].tolist()
"""
CELL = """%%watch --paused
x = torch.linspace(0.1, 0.4, 4, dtype=torch.float64).requires_grad_()
with dist_autograd.context() as context_id:
    y = rpc.rpc_sync("worker0", weigh, args=(x,))
    z = rpc.rpc_sync("worker1", weigh, args=(y,))
    loss = (z * rpc.rpc_sync("worker2", weigh, args=(y,))).sum()
    dist_autograd.backward(context_id, [loss])
    watched = [dist_autograd.get_gradients(context_id)[x].tolist()]
    watched += [rpc.rpc_sync(f"worker{n}", gradient, args=(context_id,)) for n in range(3)]
"""
BAD = """%%watch --paused
x = torch.ones(4, dtype=torch.float64, requires_grad=True)
with dist_autograd.context() as context_id:
    y = rpc.rpc_sync("worker1", weigh, args=(x,))
    loss = y.sum() + rpc.rpc_sync("worker2", spoil, args=(x,)).sum()
    dist_autograd.backward(context_id, [loss])
"""
HIGH = """%%watch
def widen(x):
    return sum(x.exp() for _ in range(25))

x = torch.ones(4, requires_grad=True)
with dist_autograd.context() as context_id:
    loss = sum(rpc.rpc_sync(f"worker{n}", widen, args=(x,)).sum() for n in range(3))
    dist_autograd.backward(context_id, [loss])
"""
SEEN = """(node) => {
    const [inner, outer] = [node, node.closest(".nbdist-frame")].map((each) => each.getBoundingClientRect());
    return inner.top >= outer.top && inner.bottom <= outer.bottom && outer.height < node.ownerSVGElement.clientHeight;
}"""
"""Whether the page shows a part of the picture, and the node is within it."""
PLAIN = (
    """
plain = None
"""
    + CELL.partition("\n")[2].replace("watched", "plain")
    + "\nprint(watched == plain)"
)


def press(page, index, name):
    page.cell(index).get_by_role("button", name=name, exact=True).click()


def done(page, index):
    return page.cell(index).locator(".node.done").count()


def await_done(page, index, count):
    page.page.wait_for_function(
        """([index, count]) => document.querySelectorAll('.jp-Notebook .jp-Cell')[index]
            .querySelectorAll('.node.done').length === count""",
        arg=[index, count],
    )


@pytest.mark.parametrize("front", ["lab", pytest.param("notebook", marks=pytest.mark.soak)])
def test_pause_step_and_run(front, tmp_path, request):
    with notebook([START, WORKERS, HERE, CELL, PLAIN, BAD, HIGH], front, tmp_path) as page:
        for index in range(3):
            page.finish(index)
        page.run(3)
        page.cell(3).locator(".node.halted").first.wait_for()
        assert done(page, 3) == 0
        for count in range(1, 4):
            press(page, 3, "Step")
            await_done(page, 3, count)
        page.page.wait_for_timeout(500)
        assert done(page, 3) == 3  # exactly those, and it is the cell's own pass that waits
        assert "*" in page.cell(3).locator(".jp-InputPrompt").text_content()
        page.cell(3).locator(".node.done").first.click()
        page.expect(page.cell(3).locator(".nbdist-details")).to_contain_text("1 of 1 have come")
        page.cell(3).locator(".nbdist-histogram rect").first.wait_for()
        if picture := request.config.getoption("--pictures"):
            page.cell(3).locator(".nbdist-view").screenshot(path=f"{picture}/backward-{front}.png")
        press(page, 3, "Run")
        page.ended(3)
        page.finish(4)
        page.tells(4, "True")  # as it is where nobody looks

        page.run(5)
        page.cell(5).locator(".node.halted").first.wait_for()
        press(page, 5, "To NaN")
        bad = page.cell(5).locator(".node.bad")
        bad.wait_for()
        page.expect(bad).to_contain_text("Sqrt")
        assert "*" in page.cell(5).locator(".jp-InputPrompt").text_content()
        bad.click()
        page.expect(page.cell(5).locator(".nbdist-details")).to_contain_text("worker2")
        press(page, 5, "Run")
        page.ended(5)

        page.finish(6)
        last = page.cell(6).locator(".node[aria-label^='Sum on notebook, done']").first
        last.wait_for()
        page.page.wait_for_function(SEEN, arg=last.element_handle())  # a high picture shows first where the pass began
        assert not page.complaints
        assert not page.strangers

        saved = page.save()
        static = saved.cells[3].outputs[1]["data"]["text/html"]
        assert "<img" in static
        assert "critical path" in static
        assert "the first NaN or Inf came up at Sqrt@worker2" in saved.cells[5].outputs[1]["data"]["text/html"]


@pytest.mark.soak  # tests/autograd/test_watch.py has the handle
def test_the_handle_does_what_the_buttons_do(tmp_path):
    cells = [
        START,
        WORKERS,
        HERE,
        CELL.replace("--paused", "--paused -a"),
        "handle = _\nprint(len(handle.step(3)))",
        "rpc.rpc_sync('worker0', hook, args=(10.0,)); handle.run(); handle.wait(30)",
        "hooked = watched[1]\n"
        + CELL.partition("\n")[2].replace("watched", "again")
        + "\nprint(hooked == again[1], watched[0] == again[0])",
    ]
    with notebook(cells, "lab", tmp_path) as page:
        for index in range(4):
            page.finish(index)
        page.cell(3).locator(".node.halted").first.wait_for()
        page.tells(3, "the pass above")
        page.finish(4)
        page.tells(4, "3")
        await_done(page, 3, 3)
        page.finish(5)
        page.cell(3).get_by_text("over").first.wait_for()
        page.finish(6)
        page.tells(6, "True True")  # the hook that was added while it was paused counted, in that pass too
        assert not page.complaints


@pytest.mark.soak
def test_buttons_act_on_the_oldest_ipykernel_7_as_well(tmp_path):
    older_packages.install("ipykernel-7.3", tmp_path / "ipykernel")
    env = python_path(tmp_path / "ipykernel")
    version = "import ipykernel; print(ipykernel.__version__)"
    with notebook([START, WORKERS, HERE, CELL, version], "lab", tmp_path, env=env) as page:
        for index in range(3):
            page.finish(index)
        page.run(3)
        page.cell(3).locator(".node.halted").first.wait_for()
        for count in range(1, 4):
            press(page, 3, "Step")
            await_done(page, 3, count)
        assert "*" in page.cell(3).locator(".jp-InputPrompt").text_content()
        press(page, 3, "Run")
        page.ended(3)
        page.finish(4)
        page.tells(4, "7.3.0")


OLD_KERNEL = "ipykernel-6.29"


@pytest.mark.soak
@pytest.mark.parametrize(("front", "kernel"), [("lab", None), ("notebook", OLD_KERNEL)])
def test_without_subshells_a_line_stands_in_the_place_of_the_buttons(front, kernel, tmp_path):
    """The front end's subshells are switched off, or the kernel has none."""
    env = None
    if kernel is not None:
        older_packages.install(kernel, tmp_path / "older")
        env = python_path(tmp_path / "older")
    held = CELL.replace("--paused", "--paused -a")
    with notebook([START, WORKERS, HERE, CELL, held], front, tmp_path, subshells=kernel is not None, env=env) as page:
        for index in range(3):
            page.finish(index)
        page.run(3)
        page.expect(page.cell(3).locator(".nbdist-notice")).to_contain_text("%%watch -a")
        step = page.cell(3).locator(".nbdist-acts").get_by_text("Step", exact=True)
        page.expect(step).to_be_hidden()
        page.expect(page.cell(3).get_by_role("button", name="Fit")).to_be_visible()  # the page does it alone
        page.page.keyboard.press("Escape")
        page.page.keyboard.press("i")
        page.page.keyboard.press("i")  # interrupts the kernel
        page.ended(3)
        page.expect(page.cell(3).locator(".nbdist-notice")).to_be_hidden()  # the kernel hears the page again
        page.finish(4)
        for count in range(1, 3):
            press(page, 4, "Step")
            await_done(page, 4, count)
        press(page, 4, "Run")
        page.cell(4).get_by_text("over").first.wait_for()
        assert not page.complaints


TRAIN = """%%remote
from nbdist import autograd as dist_autograd
w = torch.full((4,), 2.0 + rank, requires_grad=True)

def weigh(x):
    return (x * w).tanh()

def train(steps):
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh, args=(w,)).sum()])
"""
PIPE = """from nbdist.nn import Pipeline
stages = [torch.nn.Linear(4, 4) for _ in range(3)]
pipe = Pipeline(stages, ["worker0", "worker1", "worker2"], micro_batches=4)

def step():
    with dist_autograd.context():
        pipe.train_step(torch.ones(8, 4), torch.zeros(8, 4), torch.nn.functional.mse_loss)
"""


@pytest.mark.soak  # tests/nn/test_watched_steps.py has the steps
def test_training_on_a_worker_and_a_step_of_a_pipeline(tmp_path, request):
    cells = [START, TRAIN, PIPE, "%%watch --paused\n%%remote 0\ntrain(2)", "%%watch --paused\nstep()"]
    with notebook(cells, "lab", tmp_path) as page:
        for index in range(3):
            page.finish(index)
        page.run(3)
        page.cell(3).locator(".node.halted").first.wait_for()
        page.expect(page.cell(3).locator(".nbdist-status")).to_contain_text("pass of worker0")
        press(page, 3, "Step")
        await_done(page, 3, 1)
        press(page, 3, "Run")
        page.ended(3)

        page.run(4)
        page.cell(4).locator(".node.halted").first.wait_for()
        page.expect(page.cell(4).locator(".nbdist-status")).to_contain_text("pipeline step of notebook")
        for count in range(1, 4):
            press(page, 4, "Step")
            await_done(page, 4, count)
        if picture := request.config.getoption("--pictures"):
            page.cell(4).locator(".nbdist-view").screenshot(path=f"{picture}/step.png")
        press(page, 4, "Run")
        page.ended(4)
        await_done(page, 4, 24)
        assert not page.complaints
