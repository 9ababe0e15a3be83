"""How many examples property tests try, and which.

``make test`` runs with the profile ``quick``, a tenth of the examples that each test names, and
``make test-slow`` runs every property test again with ``more``, a fifth of them. Both try the same examples
every time, so that only a change can fail a check. ``make explore`` searches: with ``explore`` it tries all,
and others at each call; what it finds becomes an example of the test. None has deadlines: the machines that
run them may be busy.
"""

from hypothesis import settings

FULL = 100
FEWEST = 5


def register_profiles() -> None:
    """Make the profiles known and choose ``quick``, which ``--hypothesis-profile`` overrides."""
    # From the same parent everywhere: on a CI machine the current profile is Hypothesis's own for CI.
    parent = settings.get_profile("default")
    settings.register_profile(
        "explore", parent, deadline=None, print_blob=True, max_examples=FULL, derandomize=False, database=None
    )
    explore = settings.get_profile("explore")
    settings.register_profile("more", explore, max_examples=FULL // 5, derandomize=True)
    settings.register_profile("quick", explore, max_examples=FULL // 10, derandomize=True)
    settings.load_profile("quick")


def examples(full: int) -> int:
    """The share of ``full`` examples that the chosen profile asks for, and a handful at least."""
    return max(min(FEWEST, full), full * settings().max_examples // FULL)
