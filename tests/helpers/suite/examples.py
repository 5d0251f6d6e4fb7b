"""How many examples hypothesis tries where a whole program is the example: few by `make test`, many by `make soak`."""

import os

from hypothesis import HealthCheck, Phase, settings


def quick(max_examples, **options):
    """The same examples every time: a commit either passes or does not; new ones are the soak's business.

    With ``NBDIST_NO_SHRINKING`` or ``CI`` set, a failing example is shown as it was found: who only wants to know
    whether a test fails does not wait for a smaller one. That may take an hour: hypothesis takes the error by which
    pytest ends a test after its time limit for one more failure of the example, and goes on.
    """
    if os.environ.get("NBDIST_NO_SHRINKING") or os.environ.get("CI"):
        options["phases"] = [Phase.explicit, Phase.generate]
    return settings(
        max_examples=max_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), **options
    )


def long(like, **options):
    """Very many new ones, with all else as in ``like``."""
    return settings(
        like,
        derandomize=False,
        database=None,
        max_examples=int(os.environ.get("NBDIST_SOAK_EXAMPLES", "1000")),
        **options,
    )
