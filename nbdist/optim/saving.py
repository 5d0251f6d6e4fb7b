"""Joins the states of the workers' optimizers into one state keyed by parameters, and splits one again; pure functions.

A *part* is the local optimizer of one worker. All parts have all groups, in the user's order; in each part, a group has
the parameters that the worker owns, perhaps none::

    groups     group 0: a b c       group 1: d e
    worker0    group 0: a c         group 1: -
    worker1    group 0: b           group 1: d e

The joint state looks like the state of one optimizer of torch, with keys (`nbdist.optim.parameters`) for positions::

    {"state": {key: …}, "param_groups": [{"params": [key, …], "lr": …}, …], "shapes": {key: [size, …]}}

It does not name the workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from nbdist.amounts import counted
from nbdist.errors import UsageError
from nbdist.optim.parameters import Key

Groups = Sequence[Sequence[Key]]  # the keys of the parameters of each group

_OWN = ("params", "param_names")  # the entries of a group that are not options, in an optimizer's state


def gather(groups: Groups, parts: Mapping[str, tuple[Groups, Any]]) -> dict[str, Any]:
    """Return one state, in the form of a torch optimizer's, made of the states of all workers' local optimizers.

    ``groups`` has the keys of each parameter group; the result has them where torch has positions. ``parts`` has, by
    worker, the keys of each group that the worker owns, and the state of its optimizer. The caller adds ``"shapes"``.

    Raises UsageError if the workers differ in a part of the state that belongs to no parameter.
    """
    state: dict[Any, Any] = {}
    shared: dict[Any, dict[str, Any]] = {}  # what belongs to no parameter, by worker
    # An optimizer may adapt a group's options to its gradients. If they differ between workers, the joint state has
    # several groups in its place, one for each value (test_options_in_which_workers_differ_stay_with_their_parameters).
    options: list[list[tuple[dict[str, Any], set[Key]]]] = [[] for _ in groups]
    for worker, (keys, local) in parts.items():
        flat = [key for group in keys for key in group]
        for index, value in local["state"].items():
            if isinstance(index, int) and 0 <= index < len(flat):
                state[flat[index]] = value
            else:
                shared.setdefault(index, {})[worker] = value
        for own, group, found in zip(keys, local["param_groups"], options, strict=True):
            if own:  # else the options are of no parameter here
                chosen = {name: value for name, value in group.items() if name not in _OWN}
                known = next((members for other, members in found if same(other, chosen)), None)
                if known is None:
                    found.append((chosen, set(own)))
                else:
                    known.update(own)
    state.update((name, agreed(values, f"{name!r} in the state of the optimizer")) for name, values in shared.items())
    return {
        "state": state,
        "param_groups": [
            {**chosen, "params": [key for key in group if key in members]}
            for group, found in zip(groups, options, strict=True)
            for chosen, members in found
        ],
    }


def scatter(
    saved: Mapping[str, Any], groups: Groups, shapes: Mapping[Key, Sequence[int]], parts: Mapping[str, Groups]
) -> dict[str, dict[str, Any]]:
    """Return, by worker, the state that the worker's optimizer loads, cut out of a state that `gather` made.

    ``groups`` has the keys of each parameter group of the optimizer that loads, ``parts``, by worker, the keys of each
    group that the worker owns, and ``shapes`` the shapes of its parameters.

    Raises UsageError if the saved state has other parameters, shapes or groups, has different options for parameters
    that are now in one group of one worker, or is not the state of an optimizer.
    """
    refuse_old_form(saved, "optimizer", isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys())
    options: dict[Key, dict[str, Any]] = {}
    for group in saved["param_groups"]:
        chosen = {name: value for name, value in group.items() if name not in _OWN}
        options.update(dict.fromkeys(group["params"], chosen))
    group_of = {key: number for number, group in enumerate(groups) for key in group}
    missing, unexpected = group_of.keys() - options.keys(), options.keys() - group_of.keys()
    if missing or unexpected:
        raise UsageError(
            f"the saved state is that of other parameters: {differing(missing, unexpected)}. Load it into an "
            "optimizer with the parameters of the one that was saved"
        )
    for group in saved["param_groups"]:
        if len(into := {group_of[key] for key in group["params"]}) > 1:
            raise UsageError(
                f"the saved state has {some(group['params'])} in one group; this optimizer has them in the groups "
                f"{', '.join(map(str, sorted(into)))}. Make it with the groups of the one that was saved"
            )
    for key, shape in saved.get("shapes", {}).items():
        if key in shapes and list(shape) != list(shapes[key]):
            raise UsageError(
                f"the saved state has a parameter {key!r} of shape {tuple(shape)}; here {key!r} has the shape "
                f"{tuple(shapes[key])}: load a state of the same parameters"
            )
    shared = {name: value for name, value in saved["state"].items() if name not in options}
    found = {}
    for worker, keys in parts.items():
        start = 0
        state, local = dict(shared), []
        for own, group in zip(keys, groups, strict=True):
            # Without parameters of its own here, a group gets the options of its first parameter: the local optimizers
            # have all groups, and torch refuses a state with fewer.
            chosen = options[(own or group)[0]]
            if not all(same(options[key], chosen) for key in own):
                raise UsageError(
                    f"{some(own)} are in one group on {worker}; when they were saved they were on several workers, "
                    "whose optimizers had different options for them. Put them on several workers again"
                )
            places = range(start, start := start + len(own))  # torch's keys: positions over all groups of the optimizer
            state.update(
                (place, saved["state"][key]) for place, key in zip(places, own, strict=True) if key in saved["state"]
            )
            local.append({**chosen, "params": list(places)})
        found[worker] = {"state": state, "param_groups": local}
    return found


def agreed(values: Mapping[str, Any], what: str) -> Any:
    """Return the value that all workers have; ``what`` names the value in the error.

    Raises UsageError if two workers have different values.
    """
    (first, value), *others = values.items()
    for worker, other in others:
        if not same(value, other):
            raise UsageError(
                f"{first} and {worker} differ in {what}, so one saved state cannot hold both values: change it on all "
                "workers, or on none"
            )
    return value


def refuse_old_form(saved: Any, of: str, is_new: bool) -> None:
    """Raise a UsageError unless ``is_new``, which says that the state has today's form.

    ``of`` is "optimizer" or "scheduler".
    """
    if is_new:
        return
    # The older form was keyed by the names of workers.
    if isinstance(saved, Mapping) and saved and all(isinstance(value, Mapping) for value in saved.values()):
        raise UsageError(
            f"this state of the {of} is of an older form, keyed by workers ({some(saved)}): it does not say to which "
            "parameters its values belong, and the parameters may be on other workers now. Save it again with this "
            "version"
        )
    raise UsageError(f"this is not what the state_dict() of the {of} returns: load a state that it returned")


def same(one: Any, other: Any) -> bool:
    """Return whether two values, which may be tensors or dicts and lists of them, are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        # Not by ``==``, which compares element by element. A tensor that holds a NaN equals no other tensor.
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)  # NaN: a scheduler's best loss may be one


def differing(missing: Collection[Any], unexpected: Collection[Any]) -> str:
    """Return a phrase for an error message that says which names are missing and which are unknown."""
    return ", ".join(
        f"{counted(len(names), 'name is', 'names are')} {what} ({some(names)})"
        for names, what in ((missing, "missing"), (unexpected, "unknown"))
        if names
    )


def some(names: Iterable[Any]) -> str:
    """Return the first three of these names, sorted, as text, with an ellipsis if there are more."""
    shown = sorted(map(str, names))
    return ", ".join(shown[:3]) + (", …" if len(shown) > 3 else "")
