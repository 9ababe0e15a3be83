"""Base class of orders that give every request a priority: the most urgent request picks the service."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core import ConfigError
from shoal.schedule.client_accounts import TokenPrices
from shoal.schedule.policies.orders.protocol import Decision, Turn
from shoal.schedule.policies.view import SchedulerView, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable

Priority = tuple[float, int]
"""Key and number of submission: equal keys are served first come, first served."""

POWERS: IntArray = 1 << np.arange(63)
"""Powers of two in 64 bits."""
LONGEST_NS = 1 << 61
"""Longer times would overflow when doubled."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """One service's requests and their priorities."""

    view: ServiceView
    waiting: Sequence[RequestState]
    """Waiting requests, in the order of their admission."""
    seq_ids: IntArray
    """All running requests, in the order of admission."""
    keys: FloatArray
    """Priorities of ``seq_ids``, smaller first."""
    prompt: Priority | None
    """Of the most urgent request to prefill, including the head of the queue; None: there is none."""
    decode: Priority | None
    """Of the most urgent decode; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPriority(ABC):
    """The most urgent request picks the service that steps.

    If it is waiting, or within its prompt, the step must compute a prompt, otherwise the next most urgent
    request picks. In either case all requests of the service take part: decodes, then unfinished prompts,
    then waiting requests, the most urgent first. Every service with requests has a turn, so there is a step
    even if no request can be admitted.

    Only the head of each waiting queue is examined, since queues are sorted by ``rank``.
    """

    steady: ClassVar[bool] = False
    reads_lengths: ClassVar[bool] = False
    reads_priorities: ClassVar[bool] = False

    @property
    def prices(self) -> TokenPrices | None:
        """Clients' tokens are not counted."""
        return None

    @abstractmethod
    def rank(self, request: RequestState, view: ServiceView) -> float:
        """See ``Order``."""

    @abstractmethod
    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """See ``Order``."""

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Every service's turns, by priority."""
        turns: list[tuple[Priority, Turn]] = []
        for service in view.services.values():
            if len(service.running) or service.waiting:
                turns += self.turns(self.candidates(service))
        turns.sort(key=lambda pair: pair[0])
        return Decision([turn for _, turn in turns])

    def turns(self, candidates: Candidates) -> list[tuple[Priority, Turn]]:
        """One service's turns: for its most urgent prompt, and for its most urgent decode."""
        service, waiting = candidates.view.service, candidates.waiting
        seq_ids, keys = candidates.seq_ids, candidates.keys
        turns = []
        if candidates.prompt is not None:
            turns.append((candidates.prompt, Turn(service, seq_ids, keys, waiting, prefill=True)))
        if candidates.decode is not None:
            turns.append((candidates.decode, Turn(service, seq_ids, keys, waiting)))
        return turns

    def queue(self, view: ServiceView) -> Sequence[RequestState]:
        """The waiting requests, in the order of their admission."""
        return view.waiting

    def candidates(self, view: ServiceView) -> Candidates:
        """The service's requests with their priorities."""
        running, waiting = view.running, self.queue(view)
        count = len(running)
        table = running.joined(RequestTable([waiting[0]])) if waiting else running
        keys = self.keys(view, table)
        prefilling = running.prefilling != 0
        prompts = prefilling.nonzero()[0]
        decodes = (~prefilling).nonzero()[0] if len(prompts) else np.arange(count)

        def priority(row: int) -> Priority:
            return float(keys[row]), int(table.number[row])

        # The first of equal keys is the one admitted first.
        heads = [int(prompts[keys[prompts].argmin()])] if len(prompts) else []
        if waiting:
            heads.append(count)
        return Candidates(
            view,
            waiting,
            running.seq_id.copy(),
            keys[:count],
            min(map(priority, heads), default=None),
            priority(int(decodes[keys[decodes].argmin()])) if len(decodes) else None,
        )


def require(valid: bool, order: str, option: str, rule: str, value: object) -> None:
    """Raises ConfigError if an option is not valid."""
    if not valid:
        raise ConfigError(f"order {order}: {option} {rule}, got {value!r}")


def require_one_of(value: str, order: str, option: str, possible: Iterable[str]) -> None:
    """Raises ConfigError if a value is not one of ``possible``."""
    possible = tuple(possible)
    require(value in possible, order, option, f"must be one of {', '.join(possible)}", value)
