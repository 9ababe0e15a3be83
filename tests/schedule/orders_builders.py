"""Fakes for orders: services as plain values, and a machine that runs turns with unlimited memory."""

from collections.abc import Sequence

import numpy as np
from schedule_builders import SECOND, make_state

from shoal.forecast import LengthDistribution, LengthHistory
from shoal.schedule import Decision, Order, RequestState, SchedulerView, ServiceTraits, Turn
from shoal.schedule.running_batch import RequestTable

__all__ = ["SECOND", "FakeService", "Machine", "decide", "make_state", "taking_part", "view_of"]


class FakeService:
    """An order's view of a service.

    running: in the order of admission; some of them are ``prefilling``. finished: past output lengths.
    """

    def __init__(
        self,
        service: str = "a",
        *,
        waiting: Sequence[RequestState] = (),
        running: Sequence[RequestState] = (),
        prefilling: Sequence[RequestState] = (),
        last_step: int = -1,
        last_turn: int | None = None,
        last_prefill: int = -1,
        consecutive_steps: int = 0,
        mean_s: float = 1.0,
        alone_s: float | None = None,
        deviation_s: float = 0.0,
        quota: int = 8,
        finished: Sequence[int] = (),
        companions: Sequence[str] = (),
    ) -> None:
        self.service = service
        self.weight_bytes = 0
        self.waiting = waiting
        self.requests = list(running)
        self.prefilling = list(prefilling)
        self.last_step = last_step
        self.last_turn = last_step if last_turn is None else last_turn
        self.last_prefill = last_prefill
        self.consecutive_steps = consecutive_steps
        self.finished = finished
        self.companions = companions
        self._times = mean_s, deviation_s, quota, alone_s

    @property
    def running(self) -> RequestTable:
        for row, request in enumerate(self.requests):
            request.seq_id = row
        table = RequestTable(self.requests)
        table.prefilling[:] = [request in self.prefilling for request in self.requests]
        return table

    @property
    def traits(self) -> ServiceTraits:
        mean_s, deviation_s, quota, alone_s = self._times
        mean_tokens = float(np.mean(self.finished)) if self.finished else None
        return ServiceTraits(mean_s, deviation_s, mean_tokens, quota, alone_s)

    def lengths(self) -> LengthDistribution:
        history = LengthHistory(1_000, window=max(1, len(self.finished)))
        for length in self.finished:
            history.record(length)
        return history.distribution(np.array([], dtype=np.int64))


def view_of(*services: FakeService, step: int = 0) -> SchedulerView:
    return SchedulerView({service.service: service for service in services}, step)


def decide(order: Order, *services: FakeService, step: int = 0) -> list[Turn]:
    decision: Decision = order.decide(view_of(*services, step=step), 0)
    return list(decision.turns)


def taking_part(turn: Turn, service: FakeService) -> list[RequestState]:
    """Running requests of a turn, the most urgent first; equal ones by admission."""
    rows = np.arange(len(service.requests)) if turn.seq_ids is None else turn.seq_ids
    if turn.keys is not None:
        assert turn.seq_ids is not None
        rows = rows[turn.keys.argsort(kind="stable")]
    return [service.requests[row] for row in rows]


class Machine:
    """Runs an order's first turn that has anything to compute; a prompt takes one step, memory is unlimited.

    ``admits``: waiting requests are admitted, at most ``joining`` in one step.
    """

    def __init__(self, order: Order, *services: FakeService, joining: int = 1) -> None:
        self.order = order
        self.services = {service.service: service for service in services}
        self.joining = joining
        self.admits = True
        self.steps = 0
        for service in services:
            service.waiting = list(service.waiting)

    def step(self) -> str:
        """One step: the service's name, in capitals if it computed a prompt."""
        for turn in self.order.decide(SchedulerView(self.services, self.steps), 0).turns:
            service = self.services[turn.service]
            joined = list(turn.waiting)[: self.joining] if self.admits else []
            if not joined and (turn.prefill or not taking_part(turn, service)):
                continue
            for request in joined:
                service.waiting.remove(request)
                service.requests.append(request)
            for other in self.services.values():
                if other is not service:
                    other.consecutive_steps = 0
            service.consecutive_steps = 0 if joined else service.consecutive_steps + 1
            service.last_step = service.last_turn = self.steps
            if joined:
                service.last_prefill = self.steps
            self.steps += 1
            return turn.service.upper() if joined else turn.service
        raise AssertionError("no turn came to anything")

    def run(self, steps: int) -> str:
        """``steps`` steps as one word."""
        return "".join(self.step() for _ in range(steps))
