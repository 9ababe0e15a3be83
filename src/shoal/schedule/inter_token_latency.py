"""No stream stands still for long because others are served: a bound on the time between two tokens.

An order that prefers some services may leave the streams of others without a step for long, though they hold
memory. The bound holds while one step of every service takes less, and while nobody is preempted or waits for
a slice. Where steps are longer, two rounds of them take its place, so that the order still says something.
Steps are long mostly for prompts: while anybody streams, their part of a step is kept to half of the bound.
"""

import sys
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from shoal.schedule.policies.orders import Turn
from shoal.schedule.service_state import ServiceState

_LONGEST_NS = 1 << 61
_LEAST_PROMPT_TOKENS = 64
_UNKNOWN_TOKEN_NS = 10_000_000
"""Taken as the time of a token of a prompt before it was measured: longer than on slow CPUs, with logits."""


class InterTokenLatencyGuard:
    """Puts a service first whose oldest stream would else exceed ``most_ns`` between two tokens."""

    def __init__(self, most_ns: int) -> None:
        self._most_ns = min(most_ns, _LONGEST_NS)

    def turns(self, turns: Iterable[Turn], services: Collection[ServiceState], now_ns: int) -> Iterator[Turn]:
        """An order's turns, before each one that of a service that must step sooner, if there is one.

        A turn may come to nothing, so the bound is looked at before each turn and not only before the first.
        """
        checked = None
        for turn in turns:
            if turn.service != checked and self._most_ns < _LONGEST_NS:
                checked = turn.service
                urgent = self._urgent(turn.service, services, now_ns)
                if urgent is not None:
                    yield Turn(urgent)
            yield turn

    def most_prompt_tokens(self, state: ServiceState, services: Iterable[ServiceState]) -> int:
        """Most tokens of prompts in a step of a service, which others and its own streams wait for.

        By how long they took in its latest steps of the same kind. The first of a kind is small, and says it.
        """
        token_ns = state.prompt_token_ns(scored=state.scores_prompts) or _UNKNOWN_TOKEN_NS
        half_ns = self._most_ns // 2
        if token_ns * state.limit.tokens <= half_ns or not any(map(_streams, services)):
            return sys.maxsize
        return max(_LEAST_PROMPT_TOKENS, half_ns // token_ns)

    def _urgent(self, first: str, services: Iterable[ServiceState], now_ns: int) -> str | None:
        """Who must step before service ``first`` does.

        Services with streams step in the order of their deadlines. If one of them would miss its own after a
        step of ``first``, the first of them steps instead. A step is taken to last as long as the longest of
        the service's latest.
        """
        active = {state.service: state for state in services if len(state.running) or state.service == first}
        if len(active) < 2:
            return None
        steps_ns = {name: max(state.recent_steps_ns, default=0) for name, state in active.items()}
        most_ns = max(self._most_ns, 2 * sum(steps_ns.values()))
        deadlines = sorted(
            [
                (oldest_ns + most_ns, name)
                for name, state in active.items()
                if name != first and (oldest_ns := _oldest_token_ns(state)) is not None
            ]
        )
        end_ns = now_ns + steps_ns[first]
        for deadline_ns, name in deadlines:
            end_ns += steps_ns[name]
            if end_ns > deadline_ns:
                return deadlines[0][1]
        return None


def _streams(state: ServiceState) -> bool:
    """Whether somebody who runs has begun to answer."""
    return bool(np.count_nonzero(state.running.num_generated))


def _oldest_token_ns(state: ServiceState) -> int | None:
    """When the stream got its newest token that has waited longest for its next, of those that can step."""
    batch = state.running
    streams = (batch.num_generated > 0) & (batch.in_flight == 0) & (batch.is_ending == 0)
    streams &= (batch.num_tokens_with_in_flight <= batch.slice_end) & (batch.postponed == 0)
    if not np.count_nonzero(streams):
        return None
    return int(batch.last_token_ns[streams].min())
