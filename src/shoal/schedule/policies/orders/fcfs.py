"""Orders ``fcfs`` and ``fcfs-strict``: first come, first served over all services."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.schedule.client_accounts import TokenPrices
from shoal.schedule.policies.orders.protocol import Decision, Turn
from shoal.schedule.policies.view import SchedulerView, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable

MAX_DELAY_STEPS = 64
"""Limit on consecutive steps of other services while a service has running requests (``fcfs``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BySubmission:
    """Base of orders whose only priority is the order of submission."""

    steady: ClassVar[bool] = True
    reads_lengths: ClassVar[bool] = False
    reads_priorities: ClassVar[bool] = False

    @property
    def prices(self) -> TokenPrices | None:
        """Clients' tokens are not counted."""
        return None

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Equal for all requests, so that the arrival decides."""
        return 0.0

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """Numbers of submission."""
        return table.number.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fcfs(BySubmission):
    """First come, first served, if the request fits.

    The service of the oldest request that can be prefilled now (waiting and admissible, or running with an
    unfinished prompt) steps, together with its decodes; otherwise the decoding service with the longest time
    since its last step. A head of a queue that does not fit blocks only its own service.

    Prompts of one service delay the decodes of another for at most ``MAX_DELAY_STEPS`` steps at a time.
    """

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Overdue services, then prompts by age, then decodes by the time since the last step."""
        services = unfinished_services(view)
        decoding = [service for service in services if len(service.running)]
        decoding.sort(key=lambda service: service.last_step)
        overdue = [service for service in decoding if view.step - service.last_step > MAX_DELAY_STEPS]
        prompts = [
            (oldest, service) for service in services if (oldest := _oldest_prompt(service)) is not None
        ]
        prompts.sort(key=lambda pair: pair[0])
        turns = [Turn(service.service) for service in overdue]
        turns += [Turn(service.service, waiting=service.waiting, prefill=True) for _, service in prompts]
        turns += [Turn(service.service) for service in decoding]
        return Decision(turns)


def unfinished_services(view: SchedulerView) -> list[ServiceView]:
    """Services with requests."""
    return [service for service in view.services.values() if len(service.running) or service.waiting]


def _oldest_prompt(service: ServiceView) -> int | None:
    running = service.running
    numbers = running.number[running.prefilling.nonzero()[0]].tolist()
    if service.waiting:
        numbers.append(service.waiting[0].number)
    return min(numbers, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FcfsStrict(BySubmission):
    """The service of the oldest unfinished request steps, and only it admits requests.

    If it has nothing to compute (the head of its queue does not fit), the service of the next oldest request
    steps with its running requests, so that memory is freed. No younger request of another service is
    admitted before the oldest one, which is thus admitted once the running requests have ended.
    """

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Services by the age of their oldest unfinished request."""
        services = unfinished_services(view)
        if len(services) > 1:
            services.sort(key=_oldest)
        turns = [Turn(service.service) for service in services[1:] if len(service.running)]
        if services:
            turns.insert(0, Turn(services[0].service, waiting=services[0].waiting))
        return Decision(turns)


def _oldest(service: ServiceView) -> int:
    numbers = [int(service.running.number.min())] if len(service.running) else []
    if service.waiting:
        numbers.append(service.waiting[0].number)
    return min(numbers)
