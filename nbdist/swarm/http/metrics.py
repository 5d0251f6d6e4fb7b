"""`Metrics`: what an endpoint has done, in the text form of Prometheus. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nbdist.swarm.http.limits import Limits


class Metrics:
    """Counts since the endpoint was made."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by labels
        self._tokens: Counter[str] = Counter()

    def count(self, usage: Mapping[str, int]) -> None:
        """Add the tokens of an answer."""
        self._tokens.update({f'{{kind="{kind}"}}': usage[f"{kind}_tokens"] for kind in ("prompt", "completion")})

    def text(self, limits: Limits, states: Iterable[str]) -> str:
        """Return all metrics; ``states`` has the state of each server."""
        metrics = {
            "requests_total counter": self.requests,
            "tokens_total counter": self._tokens,
            "texts_running gauge": {"": limits.running},
            "texts_queued gauge": {"": limits.queued},
            "servers gauge": Counter(f'{{state="{state}"}}' for state in states),
        }
        lines = []
        for name, values in metrics.items():
            lines += [f"# TYPE nbdist_{name}", *(f"nbdist_{name.split()[0]}{each} {values[each]}" for each in values)]
        return "\n".join([*lines, ""])
