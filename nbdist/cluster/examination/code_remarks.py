"""Says in words where the code and the settings of members differ, from the facts about each. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from nbdist.amounts import counted
from nbdist.cluster.examination.code_facts import CodeFacts
from nbdist.cluster.examination.findings import Finding
from nbdist.cluster.output.arranger import grouped, say_members

# Variables of the environment that decide results. Others often differ between hosts.
_DECIDES = re.compile(r"TORCH|PYTORCH|NCCL|GLOO|CUDA|CUBLAS|CUDNN|NVIDIA|OMP_|MKL|KMP|PYTHON(HASHSEED|OPTIMIZE)")


def remarks_on(workers: Mapping[str, CodeFacts], notebook: Mapping[str, CodeFacts]) -> Iterator[tuple[str, bool]]:
    """Yield remarks on the facts about the workers and the notebook, each given by name; and whether each is a fault.

    The notebook's environment and random states are its own, and are not compared. A function of torch that is replaced
    on all workers and an equal random state may be meant; `findings` tells versions.
    """
    members = {**notebook, **workers}
    for name, paths in _by_key(members, "changed"):
        told = f"{name} has changed since its import on {say_members(list(paths))}: %dist_reload {name}"
        yield f"modules: {told} takes the new {next(iter(paths.values()))}", True
    for name, places in _by_key(members, "torch"):
        yield f"torch: {name} is replaced: {_say(places)}", len({places.get(worker) for worker in workers}) > 1
    for name, versions in _by_key(members, "functions"):
        # Equal code is the same function, whatever the cell.
        digests = {member: version.partition(" of ")[0] for member, version in versions.items()}
        if len(set(digests.values())) > 1:
            yield f"functions: {name}: {_say(versions)}", len({digests.get(each) for each in workers} - {None}) > 1
    for topic, compared in (("modules", members), ("files", members), ("environment", workers), ("versions", members)):
        for key, values in _by_key(compared, topic):
            found = {name: values.get(name, "not set") for name in compared} if topic == "environment" else values
            if len(set(found.values())) > 1:
                is_fault = topic != "versions" and (topic != "environment" or _DECIDES.match(key) is not None)
                yield f"{topic}: {key}: {_say(found)}", is_fault
    for generator, states in _by_key(workers, "random states"):
        for names in grouped(states, states.__getitem__).values():
            told = f"{generator}'s is equal on {len(names)} workers ({say_members(names)}): samplers that draw from it"
            if len(names) > 1:
                yield f"random states: {told} take the same data there, unless seeded with the rank", False


def code_finding(workers: Mapping[str, CodeFacts], notebook: Mapping[str, CodeFacts]) -> list[Finding]:
    """Return one finding about all faults of the code, or none."""
    faults = [told for told, is_fault in remarks_on(workers, notebook) if is_fault]
    told = "%dist_diff --code shows what differs"
    return [Finding("code", f"{faults[0]} (1 of {counted(len(faults), 'difference')})", told)] if faults else []


def _by_key(held: Mapping[str, CodeFacts], topic: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each key of a topic, in order, with the texts that members have for it, by member."""
    for key in sorted({key for facts in held.values() for key in facts[topic]}):
        yield key, {name: facts[topic][key] for name, facts in held.items() if key in facts[topic]}


def _say(values: Mapping[str, str]) -> str:
    """Return the values with the members that have each; what most have comes first, and the odd ones out last."""
    groups = sorted(grouped(values, values.__getitem__).items(), key=lambda group: -len(group[1]))
    return "; ".join(f"{value} on {say_members(names)}" for value, names in groups)
