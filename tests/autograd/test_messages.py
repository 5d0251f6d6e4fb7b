"""The messages of errors of autograd, pipelines and saved states that no other test provokes."""

from __future__ import annotations

import pytest
import torch

from nbdist import autograd as dist_autograd
from nbdist.autograd.graph import messages
from nbdist.errors import ProtocolError, UsageError
from nbdist.nn import Pipeline, cutting, pipeline_part
from nbdist.optim import saving


@pytest.mark.parametrize(
    ("roots", "given", "error", "text"),
    [
        ([], {}, UsageError, r"No tensors provided for gradient computation\."),
        ("loss", {}, TypeError, r"roots must be tensors, not str"),
        ("one", {"mode": "slow"}, UsageError, r"mode must be 'smart' or 'fast', not 'slow'"),
        ("one", {"grad_tensors": [None, None]}, UsageError, r"was given 2 grad_tensors for 1 roots: give one for each"),
        ("leaf", {}, UsageError, r"root 0 is a leaf: it does not have a valid gradient function"),
    ],
)
def test_passes_that_cannot_begin(world, roots, given, error, text):
    leaf = torch.ones(1, requires_grad=True)
    chosen = {"one": [(leaf * 2).sum()], "leaf": [leaf]}.get(roots, roots) if isinstance(roots, str) else roots
    with dist_autograd.context() as context_id, pytest.raises(error, match=text):
        dist_autograd.backward(context_id, chosen, **given)


def test_bytes_that_are_no_message_of_a_pass():
    with pytest.raises(ProtocolError, match=r"not a message of the autograd engine: .* another version of nbdist"):
        messages.decode(b"\xc1")


def test_workers_that_differ_cannot_be_saved_as_one():
    with pytest.raises(UsageError, match=r"worker0 and worker1 differ in the learning rate, so one saved state"):
        saving.agreed({"worker0": 0.1, "worker1": 0.2}, "the learning rate")


def test_a_list_of_stages_is_not_cut():
    with pytest.raises(UsageError, match=r"say how to cut a Sequential, but the model is a list of stages"):
        cutting.parts_of([torch.nn.ReLU()], None, 1, [], "size", None)


class Nested(torch.nn.Module):
    """A stage that must not be before another one."""

    def forward(self, x):
        return x, [x]


def test_what_a_stage_must_not_return(world):
    pipe = Pipeline([Nested(), torch.nn.Linear(3, 1)], ["worker0", "worker1"], micro_batches=1)
    with pytest.raises(UsageError, match=r"a stage before the last must return a tensor, or a flat tuple"):
        pipe(torch.ones(2, 3))


def test_a_step_whose_context_has_ended(world):
    with pytest.raises(UsageError, match=r"the distributed autograd context ended during train_step"):
        pipeline_part.PipelinePart.commit(None, None, None, None)
