"""One call of a client: its stream and the state needed to resume it on any engine."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.cluster.status import RequestStatus
from shoal.core import NO_GOALS, SLO, Request, SamplingParams
from shoal.frontend.detokenize import Decoder
from shoal.frontend.reader import ChoiceReader
from shoal.frontend.stream import Stream
from shoal.frontend.timeline import Phase, Timeline


class Call:
    """The stream of a call and the readers of its unfinished choices.

    All choices are on one engine at a time. Their ids there contain the number of the attempt, so that late
    messages of an earlier engine have unknown ids.
    """

    def __init__(
        self,
        call_id: str,
        requests: Mapping[int, Request],
        sampling: SamplingParams,
        decoder: Decoder,
        eos_token_ids: Sequence[int],
        stream: Stream,
        name: str | None = None,
        slo: SLO = NO_GOALS,
    ) -> None:
        """requests: by choice. sampling: of the call, with its stop strings. name: the client's, for logs.

        slo: its goals, resolved.
        """
        first = next(iter(requests.values()))
        self.id = call_id
        self.name = name
        self.log_name = call_id if name is None else f"{name} ({call_id})"
        self.service = first.service
        self.request = first
        """The request of its first choice, as it was submitted."""
        self.prompt_tokens = len(first.prompt)
        self.grammar = sampling.grammar
        self.stream = stream
        self.unfinished = {
            choice: ChoiceReader(request, choice, sampling, decoder, eos_token_ids)
            for choice, request in requests.items()
        }
        """Readers of the unfinished choices."""
        self.timelines = {
            choice: Timeline.from_arrival(request.arrival_ns) for choice, request in requests.items()
        }
        """Of all choices."""
        stream.timelines = list(self.timelines.values())
        self.engine: str | None = None
        """None: it waits for an engine."""
        self.waits_for_load_ns: int | None = None
        """Since when it waits for its service to be loaded; None: it does not."""
        self.attempt = 0
        self.batch: int | None = None
        """Number of its last batch; None: it was in none."""
        self.slice_ends: dict[int, int] = {}
        """Output tokens of each unfinished choice at which its slice ends; empty without slices."""
        self.rested: set[int] = set()
        """Unfinished choices whose slice is over, while others of the call go on."""
        self.progressed = True
        """Whether it got a token in the present attempt; True in the first."""
        self.lost_engine = False
        """Whether its engine ended, and it has got no token since."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when an engine has accepted its grammar; raises the error if none can."""
        self.finished_tokens: list[int] = []
        """Output lengths of the finished choices."""
        self.slo = slo
        self.met: bool | None = None
        """Whether the finished choices met their goals; None: it has none, or no choice has finished."""

    def wire_id(self, choice: int) -> str:
        """Id of a choice on the engine in the present attempt."""
        return f"{self.id}-{choice}#{self.attempt}"

    def wire_ids(self) -> list[str]:
        """Ids of the unfinished choices there."""
        return [self.wire_id(choice) for choice in self.unfinished]

    def remaining_requests(self, now_ns: int) -> list[Request]:
        """The requests for the engine of the present attempt, with the output so far."""
        requests = []
        for choice, reader in self.unfinished.items():
            if self.attempt == 1:
                request = reader.original_request(self.wire_id(choice))
            else:
                request = reader.resumed_request(self.wire_id(choice), now_ns)
            if self.batch is not None:
                request = replace(request, batch=self.batch, slice_tokens=self._slice_left(choice, reader))
            requests.append(request)
        return requests

    def join_batch(self, batch: int | None, slice_tokens: int | None) -> None:
        """Its next dispatch is with a batch. slice_tokens: of a new slice; None: the present one goes on."""
        self.batch = batch
        if slice_tokens is not None:
            self.slice_ends = {
                choice: reader.output_tokens + slice_tokens for choice, reader in self.unfinished.items()
            }

    def _slice_left(self, choice: int, reader: ChoiceReader) -> int | None:
        end = self.slice_ends.get(choice)
        return None if end is None else max(1, end - reader.output_tokens)

    def accept(self, error: Exception | None = None) -> None:
        """An engine has accepted its grammar, or the call ends with ``error``."""
        if self.accepted.done() or self.grammar is None:
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    def begin_phase(self, phase: Phase, at_ns: int) -> None:
        """All unfinished choices begin a phase, on the call's present engine."""
        for choice in self.unfinished:
            self.timelines[choice].begin(phase, self.engine, at_ns)

    def request_status(self, choice: int) -> RequestStatus:
        """The status of an unfinished choice, or of one that ends now."""
        reader, timeline = self.unfinished[choice], self.timelines[choice]
        return RequestStatus(
            id=f"{self.id}-{choice}",
            name=self.name,
            service=self.service,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=reader.cached_tokens,
            output_tokens=reader.output_tokens,
            phases=tuple(timeline.phases),
            ended_ns=timeline.ended_ns,
            finish=None if timeline.finish is None else timeline.finish.value,
            why=timeline.why,
        )

    @property
    def waiting(self) -> int:
        """Number of choices without a first token."""
        return sum(not reader.started for reader in self.unfinished.values())

    @property
    def output_tokens(self) -> int:
        """Delivered tokens of all unfinished choices."""
        return sum(reader.output_tokens for reader in self.unfinished.values())


def call_of(wire_id: str) -> str:
    """The call id in the id of a choice."""
    return wire_id.rpartition("#")[0].rpartition("-")[0]
