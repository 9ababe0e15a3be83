"""Whether it is worth it to preempt running requests for one that waits."""

from collections.abc import Iterable, Sequence

from shoal.schedule.service_state import ServiceState


def execution_s(state: ServiceState) -> float:
    """L: execution time of a service's mean request, alone where that is known."""
    traits = state.traits
    return max(traits.mean_s if traits.alone_s is None else traits.alone_s, 1e-9)


def is_worth_preempting(
    waiting: ServiceState,
    victims: Sequence[ServiceState],
    services: Iterable[ServiceState],
    cost_s: float,
) -> bool:
    """Whether a request gains more than ``victims`` lose, each in units of its service's execution time.

    Running requests end at a rate of N / L, so that W seconds pass until as many have ended as there are
    victims. So long the request waits, or else every victim, which is the first to come back and meanwhile
    has to be saved or computed again, in ``cost_s``: it is worth it where W / L of the one exceeds the sum of
    (W + cost) / L of the others. Ours, by Smith's rule: memory goes to whom it serves for the shortest time.
    """
    ends_per_s = sum([len(state.running) / execution_s(state) for state in services])
    wait_s = len(victims) / ends_per_s
    lost = sum([(wait_s + cost_s) / execution_s(state) for state in victims])
    return wait_s / execution_s(waiting) > lost
