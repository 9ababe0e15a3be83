"""Which services the pictures of a run show by name, and in which colours: the same in each."""

from collections import Counter

from shoal.measure.records import RunRecord

MAX_NAMED = 8
"""Services or engines that a panel shows by name, at most."""
OTHERS_COLOUR = 8
"""Of the services that are not shown by name."""
ALL_COLOUR = 9
"""Of what concerns all services."""


def service_colours(run: RunRecord) -> dict[str, int]:
    """The services with most requests, at most ``MAX_NAMED``, by name, and the numbers of their colours."""
    counts = Counter(row.service for row in run.requests)
    counts.update({name: 0 for sample in run.samples for name in sample.services})
    most = sorted(counts, key=lambda name: (-counts[name], name))[:MAX_NAMED]
    return {name: number for number, name in enumerate(sorted(most))}
