"""Says what `%dist_compare` has found: what differs first from the notebook's model, on which workers, and how far."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.cluster.inspection.one_piece import Deviation
from nbdist.cluster.output.arranger import grouped, say_names


def say(expression: str, exact: bool, deviations: Sequence[Deviation], count: int, left_out: int) -> str:
    """Return the result of `compare_with_workers` as text. ``exact`` says whether each bit counted."""
    first = deviations[0].part
    if not first:
        where, how = say_names([each.worker for each in deviations]), "to the bit" if exact else "within rounding"
        later = f"; {left_out} later ones, for which the notebook had no room, were not compared" * bool(left_out)
        compared = f"parameters, buffers, {count - left_out} inputs and outputs{later}"
        return f"{expression} is equal in the notebook and on {where} {how}: {compared}"
    lines = [f"{expression} differs from the notebook's first in {first}"]
    for (part, told), group in grouped(deviations, lambda each: (each.part, each.told)).items():
        later = f", in {part}" * (part not in ("", first))
        lines.append(f"  {say_names([each.worker for each in group])}{later}: {told or 'equal'}")
    if first.startswith("the input"):
        lines.append("  nothing after it was compared: give the model the same input in the notebook and on workers")
    return "\n".join(lines)
