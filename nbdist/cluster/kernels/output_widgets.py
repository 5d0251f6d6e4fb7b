"""Makes ``Output`` widgets of workers capture output in the notebook: gives their messages the notebook's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_request(content: Mapping[str, Any], theirs: str, ours: str) -> Mapping[str, Any]:
    """Return a comm message in which the notebook's request id, ``ours``, replaces the worker's, ``theirs``."""
    # An ``Output`` widget sends this id, ``msg_id``, to the front end, which captures the output of that request.
    data = content.get("data")
    state = data.get("state") if isinstance(data, Mapping) else None
    if not theirs or not isinstance(state, Mapping) or state.get("msg_id") != theirs:
        return content
    return {**content, "data": {**data, "state": {**state, "msg_id": ours}}}  # type: ignore[dict-item]
