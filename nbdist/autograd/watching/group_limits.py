"""`GroupLimits`: keeps the process groups' time limits from running out while somebody holds a backward pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from datetime import timedelta

from nbdist.torch_private import groups_by_name

_LIFTED = timedelta(days=30)


class GroupLimits:
    """The time limits of this process's groups. A wait takes the limit of the moment at which it begins."""

    def __init__(self) -> None:
        self._holders = set[Hashable]()
        self._before: dict[tuple[str, str], timedelta] = {}  # by group and device
        self._lock = threading.Lock()

    def hold(self, holder: Hashable, held: bool) -> None:
        """Lift the limits, also of groups that have formed meanwhile; the last holder that ends sets them back."""
        with self._lock:
            (self._holders.add if held else self._holders.discard)(holder)
            for name, group in groups_by_name().items():
                for device in group._device_types:
                    with contextlib.suppress(Exception):  # a backend of somebody else's without limits
                        backend = group._get_backend(device)
                        backend = getattr(backend, "wrapped_pg", backend)  # by TORCH_DISTRIBUTED_DEBUG=DETAIL
                        own, key = getattr(backend.options, "_timeout", _LIFTED), (name, str(device))
                        if self._holders and own != _LIFTED:
                            self._before[key] = own
                            backend._set_default_timeout(_LIFTED)
                        elif not self._holders and own == _LIFTED:
                            backend._set_default_timeout(self._before.pop(key))


GROUP_LIMITS = GroupLimits()
