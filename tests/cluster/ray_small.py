"""Ray's command line, for hosts of tests: how busy the machine is does not matter.

Ray's raylet ends itself if its agents have not told it their ports after 15 s, and they need 12 s on two idle cores. It
does not wait for ports that are given. Agents without parts for dashboards start faster, as `_small_agent` says.
"""

from __future__ import annotations

import sys

from ray._private import utils
from ray.scripts.scripts import main

utils.get_dashboard_dependency_error = ImportError
if __name__ == "__main__":
    ports = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    sys.argv += [f"--{name}-port={50001 + number}" for number, name in enumerate(ports)]
    main()
