"""Goodput runs of Past-Future, as in its authors' artefact: clients that send again what failed, one engine.

The artefact is github.com/WuSiYu/lightllm-ae.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.past_future.setup import options_of, requests_of
from experiments.result import Value
from shoal.core import SLO, Request
from shoal.forecast import DEVICE_SPECS, MODEL_SPECS, RooflineTimes
from shoal.measure import RequestRow
from shoal.schedule import Admission
from shoal.simulate import EngineSpec, ServiceSpec, Simulation, Watch, token_layout

BLOCK_TOKENS = 16
BATCHED_TOKENS = 18_000
LONGEST_RUN_S = 4 * 3600.0
"""A run in which hardly any request succeeds ends then, in virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model on A100-80s with NVLink, its SLA, and when its server drops requests."""

    model: str
    tp: int
    capacity: int
    """Tokens of KV."""
    ttft_s: float
    """Limit of the SLA."""
    gap_s: float
    """Limit of the SLA for the largest inter-token latency (MTPOT)."""
    drop_wait_s: float
    """A request that has waited longer is dropped."""
    drop_gap_s: float
    """A running request is dropped after a larger inter-token latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a server schedules."""

    admission: Admission
    batched_tokens: int = BATCHED_TOKENS
    """Token budget of a step."""
    victim: str = "newest"
    drops_running: bool = True
    """Whether running requests are dropped, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopRun:
    served: ServedModel
    lengths: Sequence[tuple[int, int]]
    """Prompt and output tokens of each request."""
    longest: int
    """Limit of output tokens."""
    system: System
    clients: int


class RetryingClients:
    """Clients, each of whom sends the next request as soon as its last one has ended.

    A request that failed (``meets_sla``) is put behind those that were not sent yet. A client that finds none
    left is done.
    """

    def __init__(self, requests: Sequence[Request], clients: int, served: ServedModel) -> None:
        self._queue = deque(requests)
        self._arrivals = deque([0] * min(clients, len(requests)))
        self._served = served
        self._sent: dict[str, Request] = {}
        self.total = 0
        """Requests sent, each time counted."""
        self.succeeded: list[RequestRow] = []
        self.now_ns = 0
        """When the last request ended."""

    @property
    def next_ns(self) -> int | None:
        return self._arrivals[0] if self._arrivals else None

    def take(self) -> Request:
        request = self._queue.popleft()
        self.total += 1
        sent = replace(request, id=f"{request.id}/{self.total}", arrival_ns=self._arrivals.popleft())
        self._sent[sent.id] = request
        return sent

    def ended(self, row: RequestRow) -> None:
        request = self._sent.pop(row.request_id)
        self.now_ns = row.finish_ns
        if meets_sla(row, self._served):
            self.succeeded.append(row)
        else:
            self._queue.append(request)
        if len(self._queue) > len(self._arrivals):
            self._arrivals.append(row.finish_ns)


def meets_sla(row: RequestRow, served: ServedModel) -> bool:
    """Whether a request was answered, with TTFT and largest inter-token latency (MTPOT) within the SLA."""
    return row.answered and row.ttft_s < served.ttft_s and row.mtpot_s < served.gap_s


def requests_that_fit(served: ServedModel, lengths: Sequence[tuple[int, int]]) -> float:
    """How many requests fill the memory at a random moment of a long run without a queue.

    A request is found running with a probability proportional to its output length.
    """
    prompts, outputs = np.array(lengths).T
    held = (outputs * (prompts + outputs / 2)).sum() / outputs.sum()
    return served.capacity / float(held)


def run_closed_loop(run: ClosedLoopRun) -> dict[str, Value]:
    """Simulate one run until every request has succeeded; goodput counts prompt and output tokens."""
    served, system = run.served, run.system
    model, device = MODEL_SPECS[served.model], DEVICE_SPECS["a100-80"]
    options = options_of(system.admission, system.victim)
    engine = EngineSpec(
        services={
            model.name: ServiceSpec(
                times=RooflineTimes(model, device, served.tp), slo=SLO(ttft_s=served.drop_wait_s)
            )
        },
        layout=token_layout(served.capacity // BLOCK_TOKENS, BLOCK_TOKENS, model.name),
        scheduler=replace(options, max_batched_tokens=system.batched_tokens, on_hopeless="refuse"),
        prefix_caching=False,
        abort_gap_s=served.drop_gap_s if system.drops_running else None,
    )
    requests = requests_of(run.lengths, run.longest, model.name)
    clients = RetryingClients(requests, run.clients, served)
    simulation = Simulation([engine], clients, watch=Watch(sample_s=60.0))
    rows = simulation.run(stop=lambda: clients.now_ns > LONGEST_RUN_S * 1e9).requests
    tokens = sum(row.prompt_tokens + row.output_tokens for row in clients.succeeded)
    dropped = [row for row in rows if not row.answered]
    count = len(requests)
    return {
        "goodput_tokens_per_s": tokens / (clients.now_ns / 1e9),
        "succeeded": len(clients.succeeded) / count,
        "sent_per_request": clients.total / count,
        "dropped_waiting_per_request": sum(row.finish == "refused" for row in dropped) / count,
        "dropped_running_per_request": sum(row.finish == "cancelled" for row in dropped) / count,
        "preemptions_per_request": sum(row.preemptions for row in rows) / count,
    }
