"""One call of a client, from its acceptance to its last token, whichever engines compute it."""

import asyncio
from collections.abc import Mapping, Sequence

from shoal.core import Request, SamplingParams
from shoal.frontend.detokenize import Decoder
from shoal.frontend.reader import ChoiceReader
from shoal.frontend.stream import Stream


class Call:
    """The stream of a call and the readers of its unfinished choices: all that is needed to go on elsewhere.

    Its choices are with one engine at a time. What they are called there has the number of the attempt in it,
    so that whatever an earlier engine still says about them has a name that nobody knows any more.
    """

    def __init__(
        self,
        call_id: str,
        requests: Mapping[int, Request],
        sampling: SamplingParams,
        decoder: Decoder,
        eos_token_ids: Sequence[int],
        stream: Stream,
        log_name: str,
    ) -> None:
        """requests: by number of the choice. sampling: of the call, with its stop strings."""
        first = next(iter(requests.values()))
        self.id = call_id
        """Its name among all calls of this cluster."""
        self.log_name = log_name
        """What it is called in the log."""
        self.service = first.service
        """The service that answers."""
        self.prompt_tokens = len(first.prompt)
        """Length of its prompt."""
        self.grammar = sampling.grammar
        """What its output must look like."""
        self.stream = stream
        """Where its deltas go."""
        self.unfinished = {
            choice: ChoiceReader(request, choice, sampling, decoder, eos_token_ids)
            for choice, request in requests.items()
        }
        """Readers of the choices that have not ended, by number."""
        self.engine: str | None = None
        """The engine that computes it; None: it waits for one."""
        self.waits_for_load_ns: int | None = None
        """Since when it waits until its service is loaded; None: it does not."""
        self.attempt = 0
        """How often it was sent to an engine."""
        self.progressed = True
        """Whether it got a token since it was sent to an engine again."""
        self.lost_engine = False
        """Whether an engine ended with it, and it got no token since."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when an engine can follow its grammar; raises the error if none can."""
        self.finished_tokens: list[int] = []
        """Lengths of the outputs that are complete."""

    def wire_id(self, choice: int) -> str:
        """What a choice is called at the engine in the present attempt."""
        return f"{self.id}-{choice}#{self.attempt}"

    def wire_ids(self) -> list[str]:
        """What its unfinished choices are called there."""
        return [self.wire_id(choice) for choice in self.unfinished]

    def rest(self, now_ns: int) -> list[Request]:
        """What the engine of the present attempt is to do."""
        if self.attempt == 1:
            return [
                reader.original_request(self.wire_id(choice)) for choice, reader in self.unfinished.items()
            ]
        return [
            reader.resumed_request(self.wire_id(choice), now_ns) for choice, reader in self.unfinished.items()
        ]

    def accept(self, error: Exception | None = None) -> None:
        """The first engine that was asked can follow its grammar, or the call ends with ``error``."""
        if self.accepted.done() or self.grammar is None:
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    @property
    def waiting(self) -> int:
        """Choices that have no token yet."""
        return sum(not reader.started for reader in self.unfinished.values())

    @property
    def output_tokens(self) -> int:
        """Tokens of all unfinished choices that were delivered."""
        return sum(reader.output_tokens for reader in self.unfinished.values())


def call_of(wire_id: str) -> str:
    """The id of the call that a choice belongs to."""
    return wire_id.rpartition("#")[0].rpartition("-")[0]
