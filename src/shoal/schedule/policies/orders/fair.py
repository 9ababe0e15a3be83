"""Order ``fair``: equal shares for clients, as VTC has them, over all services of an engine."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from shoal.schedule.client_accounts import TokenPrices, prompt_price
from shoal.schedule.policies.orders.by_priority import ByPriority, require
from shoal.schedule.policies.orders.protocol import Decision, Turn
from shoal.schedule.policies.view import SchedulerView, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fair(ByPriority):
    """The client that has used least goes first: its requests are admitted first, and its service steps.

    Used are priced tokens over the client's share, counted by ``ClientAccounts``. The waiting requests of a
    service are admitted as if each client in turn put its oldest request forward, whichever has used least
    with the prompts that were chosen before. Among clients that have used the same, and for a single client,
    services take turns. Requests of one client are served first come, first served.

    A client is the API key of a request, or the client of a trace; requests without one share one account.

    VTC: Sheng et al., OSDI 2024, Algorithm 2. Ours: several services, whose tokens cost by the size of their
    weights; shares; and prompt tokens found in the prefix cache cost nothing.
    """

    prompt_price: float = 1.0
    output_price: float = 2.0

    def __post_init__(self) -> None:
        for name in ("prompt_price", "output_price"):
            price = getattr(self, name)
            require(0 < price < math.inf, "fair", name, "must be above 0", price)

    @property
    def prices(self) -> TokenPrices:
        return TokenPrices(self.prompt_price, self.output_price)

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """The number of the client's account, so that its requests are together, by arrival."""
        return float(request.account.number)

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """What the clients have used."""
        return table.client_tokens

    def queue(self, view: ServiceView) -> Sequence[RequestState]:
        """The waiting requests, by what their clients have used."""
        return FairQueue(view.waiting, view.weight_bytes, self.prices)

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Every service's turns, by the client that has used least, then by the time since its last step."""
        turns: list[tuple[tuple[float, int, int], Turn]] = []
        for service in view.services.values():
            if not len(service.running) and not service.waiting:
                continue
            for (key, number), turn in self.turns(self.candidates(service)):
                since = service.last_turn if turn.prefill else service.last_step
                turns.append(((key, since, number), turn))
        turns.sort(key=lambda pair: pair[0])
        return Decision([turn for _, turn in turns])


class FairQueue(Sequence[RequestState]):
    """A queue whose clients take turns; ``waiting`` has the requests of each client together.

    Requests whose goals are out of reach come last (``RequestState.deprioritized``).
    """

    def __init__(self, waiting: Sequence[RequestState], weight_bytes: int, prices: TokenPrices) -> None:
        self._waiting = waiting
        self._weight_bytes = weight_bytes
        self._prices = prices

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, index: int) -> RequestState:  # type: ignore[override]
        """Only the first request is found without going through the queue."""
        if index == 0 and self._waiting:
            return next(iter(self))
        return list(self)[index]

    def __iter__(self) -> Iterator[RequestState]:
        waiting = self._waiting
        heads: list[tuple[bool, float, int, int, int]] = []
        at = 0
        while at < len(waiting):
            heads.append(self._entry(at, waiting[at].account.tokens))
            at = bisect_right(waiting, waiting[at].rank, lo=at, key=lambda request: request.rank)
        heapify(heads)
        while heads:
            _, tokens, _, _, at = heappop(heads)
            request = waiting[at]
            yield request
            if at + 1 < len(waiting) and waiting[at + 1].rank == request.rank:
                # The prompt of a preempted request is charged already.
                charged = 0 if request.num_admissions else request.num_prompt_tokens
                price = prompt_price(request.account, self._prices, self._weight_bytes)
                heappush(heads, self._entry(at + 1, tokens + charged * price))

    def _entry(self, at: int, tokens: float) -> tuple[bool, float, int, int, int]:
        """By what the request's client has used, then by arrival."""
        request = self._waiting[at]
        return request.deprioritized, tokens, request.arrival_ns, request.number, at
