"""Ray's command line, whose agents have no parts for dashboards, like those of `_small_agent` of the launcher.

Ray's raylet ends itself if its agents have not told it their ports after 15 s. With all parts they need 12 s on two
idle cores.
"""

from __future__ import annotations

from ray._private import utils
from ray.scripts.scripts import main

utils.get_dashboard_dependency_error = ImportError
if __name__ == "__main__":
    main()
