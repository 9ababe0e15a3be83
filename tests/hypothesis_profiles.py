"""How many examples property tests try: a fifth in everyday runs, the number that each names in full ones.

``make test`` runs with the profile ``quick``, ``make test-slow`` runs every property test again with ``full``
(``pytest --hypothesis-profile=full``). Neither has deadlines: the machines that run them may be busy.
"""

from hypothesis import settings

FULL = 100
FEWEST = 5


def register_profiles() -> None:
    """Make the profiles known and choose ``quick``, which ``--hypothesis-profile`` overrides."""
    # Not from the current profile, which on a CI machine is Hypothesis's own and repeats the same examples.
    parent = settings.get_profile("default")
    settings.register_profile("full", parent, deadline=None, print_blob=True, max_examples=FULL)
    settings.register_profile("quick", parent, deadline=None, print_blob=True, max_examples=FULL // 5)
    settings.load_profile("quick")


def examples(full: int) -> int:
    """The share of ``full`` examples that the chosen profile asks for, and a handful at least."""
    return max(min(FEWEST, full), full * settings().max_examples // FULL)
