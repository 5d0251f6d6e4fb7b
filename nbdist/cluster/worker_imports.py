"""What every worker imports: the zygote imports it once for all of them."""

from __future__ import annotations

__all__: list[str] = []
