"""A NaN of the forward pass is told from one of the backward pass, and `check="nan"` finds who made it."""

import pickle
import threading

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.graph.forward_nans import NanCheck, holds_nan
from nbdist.errors import ForwardNaN, UsageError
from nbdist.nn import Pipeline
from nbdist.torch_private import function_modes, torch_version
from nbdist.views.passes import page, report
from nbdist.views.passes.remarks import remarks
from nbdist.views.passes.watching import Watcher

NAN, INF = float("nan"), float("inf")


def leaf(*values):
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float64, requires_grad=True)


def spoil(x):
    return torch.log(x - 5.0)


def linear_with_infinite_weights():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LogSigmoid())
    with torch.no_grad():
        module[0].weight.fill_(INF)
    return module


def by_way_of(name, function, *args):
    return rpc.rpc_sync(name, function, args=args)


class Spoils(torch.nn.Module):
    def forward(self, x):
        return (x - 5.0).log()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2, dtype=torch.float64)
        self.second = torch.nn.Sequential(torch.nn.Hardtanh(), Spoils())

    def forward(self, x):
        return self.second(self.first(x))


class Unseen(torch.autograd.Function):
    """Makes a NaN where nothing of torch's sees it."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * NAN)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class UnseenModule(torch.nn.Module):
    def forward(self, x):
        return Unseen.apply(x)


def run_net(net, x):
    return net(x)


def run_checkpoint(net, x, reentrant):
    return checkpoint(net, x, use_reentrant=reentrant)


def fails(function, *args):
    """The error of a call in a context that is checked."""
    with pytest.raises(ForwardNaN) as caught, dist_autograd.context(check="nan"):
        function(*args)
    assert function_modes() == 0, "a mode is left on this thread"
    return caught.value


def passes(function, *args):
    with dist_autograd.context(check="nan"):
        found = function(*args)
    assert function_modes() == 0
    return found


# --- a watched backward pass says what the forward pass gave it ------------------------------------


def logs(x):
    return torch.log(x - 5.0)


def logs_beyond(x):
    return rpc.rpc_sync("worker2", logs, args=(x,))


def overflows(x):
    return torch.exp(x * weight)


weight = torch.nn.Parameter(torch.tensor([1e4, 1.0], dtype=torch.float64))


@pytest.fixture(autouse=True)
def no_report_is_late(monkeypatch):
    monkeypatch.setattr("nbdist.views.passes.watching._LAST_REPORTS_SECONDS", 10.0)


def reported(make, **options):
    """What the report of a watched cell says of the first NaN, and what is held of it."""
    with Watcher() as watcher, dist_autograd.context(**options) as context_id:
        context_id.backward(make(leaf()))
    found = watcher.backward
    lines = [line for line in report.as_text(found) if "NaN" in line]
    assert len(lines) <= 1
    return (lines or [""])[0].strip(), found


def halted(make):
    """Where a pass halts that is run to the first NaN, and is watched from the end of the forward pass on."""
    with dist_autograd.context() as context_id:
        loss = make(leaf())
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        event = watch.run(until="nan")
        nodes = dist_autograd.trace(context_id).nodes
        watch.run()
        handle.wait()
    return event, nodes


def by_two_messages(x):
    return rpc.rpc_sync("worker1", logs_beyond, args=(x,)).pow(2).sum()


def test_a_nan_that_came_with_messages(world):
    line, found = reported(by_two_messages, lines=True)
    assert line.startswith("Pow@worker0 (node ")
    assert (
        "was given NaN by the forward pass already: it came from worker1, with a call of logs_beyond, and to worker1 "
        in line
    )
    assert "from worker2, with a call of logs; made by Log@worker2 (node " in line
    assert line.endswith("return torch.log(x - 5.0)")
    assert "came up at" not in line
    key = found.blamed()
    links = [part.node for remark in remarks(found) for part in remark if "Log@" in part.text]
    assert set(links) == {key}  # which the page makes of that name
    assert (key[0], found.nodes[key].name) == ("worker2", "LogBackward0")
    index = [(worker, number) for worker, number in found.nodes].index(key)
    assert page.snapshot(found)["bad"] == index  # the page marks that node, too
    edges = {edge.autograd_message_id: edge for edge in found.plan.trace.edges}
    for carried in found.inherited.messages:
        assert edges[carried.message].sender == carried.sender


def test_run_to_a_nan_of_the_forward_pass(world):
    event, nodes = halted(by_two_messages)
    assert (event.worker, nodes["worker0"][event.node].name) == ("worker0", "PowBackward0")
    found = event.inherited
    assert (found.value, found.end, found.worker, found.name) == ("NaN", "operation", "worker2", "LogBackward0")
    assert nodes["worker2"][found.node].name == "LogBackward0"
    assert [(each.sender, each.function) for each in found.messages] == [
        ("worker1", "logs_beyond"),
        ("worker2", "logs"),
    ]
    assert "was given NaN by the forward pass already" in event.told


def test_a_nan_that_came_by_way_of_what_saves_nothing(world):
    """Whether the tensor held it that came is known where the context was watched before."""

    def make(x):
        return (rpc.rpc_sync("worker2", logs, args=(x,)) + 1.0).pow(2).sum()

    line, _ = reported(make)
    assert "from worker2, with a call of logs; made by Log@worker2" in line
    event, _ = halted(make)
    assert (event.inherited.end, event.inherited.worker, event.inherited.name) == ("unknown", "worker0", "AddBackward0")
    assert "it came out of Add@worker0" in event.told
    assert "it may have come from worker" in event.told
    assert 'context(check="nan") names the operation' in event.told


def test_a_nan_of_this_worker(world):
    event, _ = halted(lambda x: logs(rpc.rpc_sync("worker1", torch.exp, args=(x * 0.0,))).pow(2).sum())
    found = event.inherited
    assert (found.end, found.worker, found.name, found.messages) == ("operation", "worker0", "LogBackward0", ())


def test_an_inf_of_the_forward_pass(world):
    event, _ = halted(lambda x: (rpc.rpc_sync("worker1", overflows, args=(x,)) * 0.0).sum())
    assert event.worker == "worker1"  # whose exp multiplies a gradient of zero by its Inf
    found = event.inherited
    assert (found.value, found.worker, found.name) == ("Inf", "worker1", "ExpBackward0")


@pytest.mark.parametrize(
    ("make", "end", "said"),
    [
        (lambda x: (torch.tensor([NAN, 1.0]) * x).sum(), "data", "held by an input, which needs no gradient, of Mul@"),
        (lambda x: (torch.nn.Parameter(torch.tensor([NAN, 1.0])) * x).sum(), "leaf", "held by the leaf Parameter@"),
        (lambda x: Unseen.apply(x).pow(2).sum(), "operation", "made by Unseen@worker0"),
        (lambda x: (x * NAN + 1.0).pow(2).sum(), "unknown", "it came out of Add@worker0"),
    ],
)
def test_a_nan_of_something_else(world, make, end, said):
    event, _ = halted(make)
    assert event.inherited.end == end
    assert said in event.told


class OnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.name = ctx.register_hook = ctx.register_prehook = "the user's, and not the node's method"
        return x * 2.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class OwnExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def test_a_nan_that_a_function_keeps(world):
    event, _ = halted(lambda x: OnCtx.apply(x, torch.tensor([NAN, 1.0])).sum())
    assert (event.inherited.end, event.inherited.name) == ("kept", "OnCtxBackward")
    event, _ = halted(lambda x: OwnExp.apply(x * 1e4).sum() * 0.0)
    assert (event.inherited.value, event.inherited.end, event.inherited.name) == ("Inf", "kept", "OwnExpBackward")
    assert "kept by OwnExp@worker0" in event.told
    event, _ = halted(lambda x: OnCtx.apply(x, rpc.rpc_sync("worker1", logs, args=(x,))).sum())
    assert (event.inherited.end, event.inherited.worker) == ("operation", "worker1")
    event, _ = halted(lambda x: (OnCtx.apply(x, torch.tensor([1.0, 1.0])) * 0.0).sqrt().sum())
    assert event.inherited is None


def test_a_nan_of_the_backward_pass_is_its_nodes(world):
    def make(x):
        return rpc.rpc_sync("worker1", torch.sqrt, args=(x - 1.0,)).sum()

    line, found = reported(make)
    assert line.startswith("the first NaN or Inf came up at Sqrt@worker1")
    assert found.inherited is None
    event, _ = halted(make)
    assert (event.worker, event.inherited) == ("worker1", None)
    assert event.told.startswith("the first NaN or Inf came up at Sqrt@worker1")


def squares(x):
    return x.pow(2)


def checkpointed(function, x, reentrant):
    return checkpoint(function, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["worker0", "worker1"])
def test_a_nan_inside_of_a_checkpoint_is_blamed_on_no_node_backward(world, where, reentrant):
    """What it recomputes is not looked at."""

    def make(x):
        args = log_squared, x, reentrant
        return (checkpointed(*args) if where == "worker0" else rpc.rpc_sync(where, checkpointed, args=args)).sum()

    line, found = reported(make)
    assert f"@{where} (node" in line
    assert "but the forward pass may have made it" in line
    assert 'context(check="nan") names the operation' in line
    assert found.inherited.end == "hidden"


def log_squared(x):
    return logs(x).pow(2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_nan_that_a_checkpoint_was_given(world, reentrant):
    line, _ = reported(
        lambda x: checkpointed(squares, rpc.rpc_sync("worker2", logs, args=(x,)), reentrant).sum(), lines=True
    )
    assert "from worker2, with a call of logs; made by Log@worker2" in line


def test_saved_tensor_hooks_are_not_called(world):
    called = []

    def unpack(packed):
        called.append(packed)
        return packed[0]

    def make(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), unpack):
            return logs(x).pow(2).sum()

    halted(make)
    assert len(called) == 2  # by the two nodes, as they ran


def test_a_pass_that_has_no_nan_says_nothing(world):
    line, found = reported(lambda x: rpc.rpc_sync("worker1", torch.exp, args=(x,)).sum())
    assert (line, found.bad) == ("", None)


def test_looking_changes_no_gradient(world):
    def gradients(watched):
        with dist_autograd.context() as context_id:
            if watched:
                context_id.watch(norms=True)
            x = leaf()
            context_id.backward((rpc.rpc_sync("worker1", overflows, args=(x * 1e-4,)) * x).sum())
            return context_id.gradients()[x]

    assert torch.equal(gradients(True), gradients(False))


def test_a_worker_that_cannot_say_where_it_is_from(world):
    """Here because it has ended the context's record; the pass does not fail for that."""

    def make(x):
        y = rpc.rpc_sync("worker2", logs, args=(x,)).pow(2).sum()
        (context,) = world[2].recorder.contexts.all()
        context.runs["another"] = context.runs["one more"] = None
        forget.append(context.runs.clear)
        return y

    forget = []
    with dist_autograd.context() as context_id:
        loss = make(leaf())
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        event = watch.run(until="nan")
        forget[0]()
        watch.close()
        handle.cancel()
        assert (event.inherited.end, event.inherited.worker, event.inherited.node) == ("unknown", "worker2", -1)
        assert event.told.endswith('with a call of logs; context(check="nan") names the operation that made it')


def test_a_nan_of_a_stage_of_a_pipeline(world):
    """Who made it tells of it before others come to it, and their backward operations are not blamed."""
    spoils = torch.nn.Sequential(torch.nn.Hardtanh(), Spoils())
    pipe = Pipeline([torch.nn.Linear(2, 2), spoils, torch.nn.Identity()], ["worker0", "worker1", "worker2"])
    x = torch.ones(4, 2)

    def step():
        pipe.train_step(x, x, lambda y, _: y.square().mean(), finite=False)

    with Watcher() as watcher, dist_autograd.context():
        step()
    events = [event for event in watcher.last.events if event.what == "nan"]
    assert [(event.worker, event.name) for event in events] == [("worker1", "F0")]
    (line,) = [line for line in report.as_text(watcher.backward) if "NaN" in line]
    assert "the first NaN or Inf came up at F0@worker1" in line
    with Watcher(paused=True) as watcher:

        def cell():
            with world[0].activate(), dist_autograd.context():
                step()

        watcher.begin(cell)
        event = watcher.run(until="nan")
        assert (event.worker, event.name) == ("worker1", "F0")
        watcher.run()
        watcher.wait(30)


# --- check="nan" finds the operation --------------------------------------------------------------


def test_made_here(world):
    error = fails(spoil, leaf())
    assert (error.worker, error.operation, error.module) == ("worker0", "log", None)
    assert error.line.endswith("return torch.log(x - 5.0)")
    assert "log made 2 NaN of 2 values (float64[2]) from argument 0 (float64[2], -4 to -3)" in str(error)


def test_made_on_a_third_worker(world):
    error = fails(rpc.rpc_sync, "worker1", by_way_of, ("worker2", spoil, leaf()))
    assert (error.worker, error.operation) == ("worker2", "log")
    assert "return torch.log(x - 5.0)" in error.line
    assert any("raised on worker2" in note for note in error.__notes__)


def test_made_in_an_averaged_model(world):
    model = AveragedModel(linear_with_infinite_weights())
    with dist_autograd.context(check="nan"), pytest.raises(ForwardNaN, match="linear made 2 NaN"):
        model(torch.zeros(1, 2))
    with dist_autograd.context(check="nan"), pytest.raises(ForwardNaN, match="linear made 2 NaN"):
        rpc.rpc_sync("worker1", model, args=(torch.zeros(1, 2),))


def test_made_by_a_function_that_is_torchs_own(world):
    error = fails(rpc.rpc_sync, "worker1", torch.log, (leaf(-1.0),))
    assert (error.worker, error.operation, error.line) == ("worker1", "log", None)


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_made_in_a_module_and_in_a_checkpoint(world, where, reentrant):
    if reentrant is False and torch_version() < (2, 11):
        pytest.skip("an error in a checkpoint comes again in later passes of the thread: a bug of torch 2.10")
    function, args = (run_net, (Net(), leaf())) if reentrant is None else (run_checkpoint, (Net(), leaf(), reentrant))
    error = fails(function, *args) if where == "here" else fails(rpc.rpc_sync, "worker2", function, args)
    assert (error.worker, error.operation) == ("worker0" if where == "here" else "worker2", "log")
    assert error.module == "Net.second.1"
    assert "return (x - 5.0).log()" in error.line


_on = threading.Event()


class SpoilsWhenRecomputed(torch.nn.Module):
    def forward(self, x):
        return (x - (5.0 if _on.is_set() else 0.0)).log().exp()  # else it would stop within the log


def recompute(x, reentrant):
    return checkpoint(SpoilsWhenRecomputed(), x, use_reentrant=reentrant)


@pytest.mark.parametrize("where", ["worker0", "worker1"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_made_when_a_checkpoint_recomputes(world, where, reentrant):
    _on.clear()
    with dist_autograd.context(check="nan") as context_id:
        x = leaf()
        y = recompute(x, reentrant) if where == "worker0" else rpc.rpc_sync(where, recompute, args=(x, reentrant))
        _on.set()
        with pytest.raises(ForwardNaN) as caught:
            context_id.backward(y.sum())
    assert (caught.value.worker, caught.value.module) == (where, "SpoilsWhenRecomputed")


def test_both_are_noted_at_once(world):
    with dist_autograd.context(lines=True, check="nan") as context_id:
        loss = rpc.rpc_sync("worker1", torch.exp, args=(leaf(),)).sum()
        context_id.backward(loss)
        lines = [node.line for node in dist_autograd.trace(context_id).nodes["worker0"]]
        assert any(line is not None and "torch.exp, args" in line for line in lines)
        with pytest.raises(ForwardNaN):
            spoil(leaf())
    assert function_modes() == 0


def test_in_place_and_out(world):
    assert fails(lambda: leaf(-1.0).detach().log_()).operation == "log_"
    x = leaf(NAN).detach()
    assert "argument 0 of add_ holds NaN already" in str(fails(lambda: x.add_(1.0)))
    made = torch.empty(1, dtype=torch.float64)
    assert "log made 1 NaN" in str(fails(lambda: torch.log(leaf(-1.0).detach(), out=made)))


def test_from_data_parameters_and_messages(world):
    assert "argument 1 of mul holds NaN already: it is data" in str(fails(lambda: leaf() * torch.tensor([NAN, 1.0])))
    weight = torch.nn.Parameter(torch.tensor([[NAN, 1.0]]))
    error = fails(lambda: torch.nn.functional.linear(torch.ones(1, 2), weight))
    assert "argument 1 of linear holds NaN already: it is a leaf, such as a parameter (float32[1, 2])" in str(error)
    assert "it is a number in your code" in str(fails(lambda: leaf() * NAN))
    error = fails(lambda: rpc.rpc_sync("worker2", Unseen.apply, args=(leaf(),)) + 1.0)
    assert "argument 0 of add holds NaN already: it came from worker2, with a call of " in str(error)


def test_made_by_what_torch_does_not_show(world):
    assert "your Function Unseen made it" in str(fails(lambda: Unseen.apply(leaf()) + 1.0))
    error = fails(lambda: torch.nn.Sequential(torch.nn.Identity(), UnseenModule())(leaf()))
    assert (error.operation, error.module) == ("UnseenModule", "Sequential.1")
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.LogSigmoid(), torch.nn.Softplus(beta=NAN)))
    assert fails(scripted, leaf()).operation == "RecursiveScriptModule"


def test_the_error_travels_whole():
    error = ForwardNaN("text")
    error.worker, error.line = "worker1", "a.py:1"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.worker, again.line) == ("text", "worker1", "a.py:1")
    assert isinstance(again, FloatingPointError)
    assert nbdist.ForwardNaN is ForwardNaN


# --- what it lets pass ----------------------------------------------------------------------------


def attention(x):
    masked = x.masked_fill(torch.tensor([True, False]), -INF) + torch.tensor([1.0, 1.0]).log()
    return torch.softmax(masked + torch.tensor([-INF, 0.0]), -1)


@pytest.mark.parametrize(
    "function",
    [
        attention,
        lambda x: x / 0.0,  # an Inf
        lambda x: (x / 0.0).sum() - 1.0 + torch.tensor([INF, -INF]).sort().values[1],  # whose sum is a NaN
        lambda x: torch.full_like(x, NAN),
        lambda x: torch.full((2,), NAN).nan_to_num() + x,
        lambda x: torch.where(torch.tensor([True, False]), x, torch.tensor(NAN)).detach()[:1],
        lambda x: torch.full((2,), NAN).to(torch.float32).clone().reshape(2, 1).T,
        lambda x: torch.tensor([NAN, 1.0]).nanmean(),
        lambda x: torch.empty(3).fill_(0.0),
        lambda x: torch.ones(2, device="meta") * x.to("meta"),
        lambda x: x.to_sparse() * 2.0,
        lambda x: torch.complex(x, x).exp(),
        lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
        lambda x: torch.vmap(lambda each: (each - 5.0).log())(x),
        lambda x: torch.func.grad(lambda each: (each * each).sum())(x),
        lambda x: torch.jit.trace(torch.nn.Hardtanh(), x),
        lambda x: (x - 5.0).round().int().bool(),
        lambda x: torch.nested.nested_tensor([x, x]) * 2.0,
    ],
)
def test_no_error(world, function):
    passes(function, leaf().detach())


def test_a_mode_of_the_users_sees_nothing_of_it(world):
    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def counted():
        with Counts() as counts:
            leaf().exp()
        return counts.seen

    assert passes(counted) == counted()
    with Counts():
        assert fails(spoil, leaf()).operation == "log"


@pytest.mark.parametrize("options", [{"check": "nan"}, {"lines": True}])
def test_compiled_code_stays_in_one_piece(world, options):
    """Nothing of what looks at it is compiled into it."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Hardtanh())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with dist_autograd.context(**options):
        assert torch.equal(compiled(leaf()), model(leaf()))
    torch._dynamo.reset()


def test_a_gradient_that_is_nan_is_no_matter_of_the_forward_pass(world):
    def step():
        x = leaf(0.0, 0.0)
        with torch.no_grad():
            x.grad = torch.zeros(2, dtype=torch.float64)
        (x.sqrt() * 0.0).sum().backward()
        assert x.grad.isnan().all()
        torch.nn.utils.clip_grad_norm_([x], 1.0)
        torch.optim.SGD([x], lr=1.0, momentum=0.5).step()

    passes(step)
    with dist_autograd.context(check="nan") as context_id:
        x = leaf(0.0, 0.0)
        context_id.backward((rpc.rpc_sync("worker1", torch.sqrt, args=(x,)) * 0.0).sum())
        assert context_id.gradients()[x].isnan().all()
        optimizer = nbdist.optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(x)], lr=0.1)
        optimizer.step(context_id)


def test_holds_nan():
    assert holds_nan(torch.tensor([1.0, NAN]))
    assert not holds_nan(torch.tensor([INF, -INF]))
    assert holds_nan(torch.tensor([1.0, NAN]).to_sparse())
    assert holds_nan(torch.tensor([1.0, NAN]).to(torch.float8_e5m2))
    assert holds_nan(torch.tensor([complex(0, NAN)]))
    assert not holds_nan(torch.tensor([], dtype=torch.float32))
    assert not holds_nan(torch.tensor([1, 2]))


# --- the same results, and nothing where it is not asked for ---------------------------------------


def trained(**options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    x = torch.rand(4, 2, requires_grad=True)
    with dist_autograd.context(**options) as context_id:
        loss = checkpoint(net, rpc.rpc_sync("worker1", torch.exp, args=(x,)), use_reentrant=False).sum()
        context_id.backward(loss, retain_graph=True)
        names = [node.name for node in dist_autograd.trace(context_id).nodes["worker0"]]
        return [loss.detach(), *(context_id.gradients()[each] for each in (x, *net.parameters()))], names


def test_results_and_graph_are_the_same(world):
    plain, graph = trained()
    checked, checked_graph = trained(check="nan")
    assert all(torch.equal(one, other) for one, other in zip(plain, checked, strict=True))
    assert sorted(graph) == sorted(checked_graph)  # of leaves, the order is any


def test_no_hook_is_left_on_modules(world):
    found = torch.nn.modules.module
    before = {*found._global_forward_hooks, *found._global_forward_pre_hooks}
    trained(check="nan")
    fails(rpc.rpc_sync, "worker1", run_net, (Net(), leaf()))
    assert {*found._global_forward_hooks, *found._global_forward_pre_hooks} <= before


def test_two_contexts_on_two_threads(world):
    made = []

    def unchecked():
        with world[0].activate(), dist_autograd.context():
            made.append(rpc.rpc_sync("worker1", spoil, args=(leaf(),)))
            made.append(spoil(leaf()))

    with dist_autograd.context(check="nan"):
        thread = threading.Thread(target=unchecked)
        thread.start()
        thread.join()
        with pytest.raises(ForwardNaN):
            rpc.rpc_sync("worker1", spoil, args=(leaf(),))
    assert all(each.isnan().all() for each in made)
    assert spoil(leaf()).isnan().all()


def test_a_context_that_another_thread_ends(world):
    context_id = dist_autograd.open(check="nan")
    with pytest.raises(ForwardNaN):
        spoil(leaf())

    def end():
        with world[0].activate():
            context_id.close()

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert spoil(leaf()).isnan().all()
    with dist_autograd.context(lines=True):
        UnseenModule()(leaf())
    assert function_modes() == 0


def test_what_is_done_when_a_future_is_done(world):
    with dist_autograd.context(check="nan"):
        then = rpc.rpc_async("worker1", torch.exp, args=(leaf(),)).then(lambda done: spoil(done.value() * 0.0))
        with pytest.raises(ForwardNaN):
            then.wait()


@pytest.mark.parametrize("lines", [False, True])
def test_what_is_done_at_once_because_a_future_is_done_already(world, lines):
    """Two contexts of torch functions lie on this thread's stack then: the maker's and the callback's."""
    with dist_autograd.context(check="nan", lines=lines):
        done = rpc.rpc_async("worker1", torch.exp, args=(leaf(),))
        done.wait()
        with pytest.raises(ForwardNaN) as caught:
            done.then(lambda done: spoil(done.value() * 0.0)).wait()
        assert caught.value.operation == "log"
        assert caught.value.line.endswith("return torch.log(x - 5.0)")
        # A function that torch has written in Python: its own frames lie between those of the two contexts.
        for function in (torch.softmax, torch.nn.functional.softmax):
            then = done.then(lambda _, function=function: function(leaf(-INF, -INF), dim=0))
            with pytest.raises(ForwardNaN):
                then.wait()


def test_a_pipeline(world):
    spoils = torch.nn.Sequential(torch.nn.Hardtanh(), Spoils())
    pipe = Pipeline([torch.nn.Linear(2, 2), spoils], ["worker1", "worker2"], micro_batches=2)
    x = torch.ones(4, 2)
    for compute in (lambda: pipe(x), lambda: pipe.train_step(x, x, torch.nn.functional.mse_loss)):
        with pytest.raises(ForwardNaN) as caught, dist_autograd.context(check="nan"):
            compute()
        assert (caught.value.worker, caught.value.operation) == ("worker2", "log")
        assert caught.value.module == "Sequential.1"
        assert "return (x - 5.0).log()" in caught.value.line


def test_the_loss_of_a_pipeline(world):
    pipe = Pipeline([torch.nn.Linear(2, 2), torch.nn.Identity()], ["worker1", "worker2"])
    ignored = torch.full((4,), -100)
    with pytest.raises(ForwardNaN) as caught, dist_autograd.context(check="nan"):
        pipe.train_step(torch.ones(4, 2), ignored, torch.nn.functional.cross_entropy)
    assert (caught.value.worker, caught.value.operation) == ("worker2", "cross_entropy")


def test_the_gradients_of_a_pipeline(world):
    """Which are summed up by what the check sees."""
    pipe = Pipeline([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], ["worker1", "worker2"], micro_batches=2)
    with dist_autograd.context(check="nan"):
        loss = pipe.train_step(torch.ones(4, 2), torch.ones(4, 2), lambda y, _: ((y - y.detach()).sqrt() * 0.0).sum())
    assert loss == 0.0


@pytest.mark.parametrize("given", ["inf", True, "NaN", 1])
def test_nothing_else_can_be_checked(world, given):
    for make in (dist_autograd.context, dist_autograd.open):
        with pytest.raises(UsageError, match='check must be "nan"'):
            make(check=given)


def test_which_functions_work_in_place():
    check, overwritten = NanCheck("worker0", str), (torch.tensor([float("nan")]),)
    for name in ("add_", "__iadd__", "__ior__", "_foreach_add_", "zero_"):
        assert check.before(name, overwritten, {}), name
    for name in ("add", "__invert__", "__index__", "__init__", "_foreach_add", "__add__"):
        assert not check.before(name, overwritten, {}), name
