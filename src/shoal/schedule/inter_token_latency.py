"""Bound on inter-token latency: a service with overdue streams steps first; prompt chunks are limited.

An order that prefers some services may leave the streams of other services without a step for long, although
they hold memory. The bound (``max_token_gap``) holds if one round of steps, one of each service, takes less,
and while no request is preempted or waits for a slice. If steps are longer, two rounds are the bound, so that
the order still has an effect. Long steps are mostly due to prompts: while any request streams, the prompt
part of a step is limited to half of the bound.
"""

import sys
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from shoal.schedule.policies.orders import Turn
from shoal.schedule.service_state import ServiceState

_LONGEST_NS = 1 << 61
_MIN_PROMPT_TOKENS = 64
_UNKNOWN_TOKEN_NS = 10_000_000
"""Assumed time of a prompt token before it is measured; more than on slow CPUs, including logits."""


class InterTokenLatencyGuard:
    """Inserts turns for services whose streams would otherwise exceed ``max_ns`` between two tokens."""

    def __init__(self, max_ns: int) -> None:
        self._max_ns = min(max_ns, _LONGEST_NS)

    def turns(self, turns: Iterable[Turn], services: Collection[ServiceState], now_ns: int) -> Iterator[Turn]:
        """An order's turns, each preceded by a turn of the service that must step before it, if there is one.

        A turn may result in no plan, so the bound is checked before each turn and not only before the first.
        """
        checked = None
        for turn in turns:
            if turn.service != checked and self._max_ns < _LONGEST_NS:
                checked = turn.service
                due = self._due_before(turn.service, services, now_ns)
                if due is not None:
                    yield Turn(due)
            yield turn

    def max_prompt_tokens(self, state: ServiceState, services: Iterable[ServiceState]) -> int:
        """Limit on the prompt tokens in a step of a service, so that no stream waits too long for the step.

        Based on the time per token of the service's latest steps of the same kind. The first step of a kind
        is small, and measures it.
        """
        token_ns = state.prompt_token_ns(scored=state.scores_prompts) or _UNKNOWN_TOKEN_NS
        half_ns = self._max_ns // 2
        if token_ns * state.limit.tokens <= half_ns or not any(map(_is_streaming, services)):
            return sys.maxsize
        return max(_MIN_PROMPT_TOKENS, half_ns // token_ns)

    def _due_before(self, first: str, services: Iterable[ServiceState], now_ns: int) -> str | None:
        """The service that must step before ``first`` does; None if there is none.

        Services with streams step in the order of their deadlines. If one of them would miss its deadline
        after a step of ``first``, the one with the earliest deadline steps instead. The longest of a
        service's latest steps is the estimate for its next one.
        """
        active = {state.service: state for state in services if len(state.running) or state.service == first}
        if len(active) < 2:
            return None
        steps_ns = {name: max(state.recent_steps_ns, default=0) for name, state in active.items()}
        max_ns = max(self._max_ns, 2 * sum(steps_ns.values()))
        deadlines = sorted(
            [
                (oldest_ns + max_ns, name)
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


def _is_streaming(state: ServiceState) -> bool:
    """Whether a running request has output."""
    return bool(np.count_nonzero(state.running.num_generated))


def _oldest_token_ns(state: ServiceState) -> int | None:
    """Earliest time of a newest token, over the streams that can step; None without such streams."""
    batch = state.running
    streams = (batch.num_generated > 0) & (batch.in_flight == 0) & (batch.is_ending == 0)
    streams &= (batch.num_tokens_with_in_flight <= batch.slice_end) & (batch.postponed == 0)
    if not np.count_nonzero(streams):
        return None
    return int(batch.last_token_ns[streams].min())
