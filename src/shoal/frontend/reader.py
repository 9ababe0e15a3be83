"""ChoiceReader: turns an engine's events of one choice into deltas with text, up to a stop string."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.core import (
    FinishReason,
    Request,
    RequestRecord,
    ResumeState,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from shoal.frontend.detokenize import Decoder, IncrementalDetokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens given to the detokenizer; decoders depend on only the last few tokens before a text."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice of a call.

    tokens, logprobs: the new tokens; the text of the latest may come with a later delta. An
    end-of-sequence or stop token is among the tokens but has no text. finish: set in the last delta
    of a choice. stop_reason: the stop string or stop token id that ended it. error: message for
    FinishReason.ERROR, INVALID and REFUSED. cached_tokens: prompt tokens found in the prefix cache.
    queue_ns: time until the request was first admitted. prompt_logprobs: of the next prompt tokens, from the
    second on. embedding: of the prompt.
    """

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    queue_ns: int = 0
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    embedding: bytes | None = None


class ChoiceReader:
    """Converts the events of one request of a call into deltas.

    For a resumed request it first reads the earlier output, so that text and stop strings continue from
    there: deltas have only new output, the record covers everything. eos_token_ids: of the model; one that
    ends the earlier output has no text.
    """

    def __init__(
        self,
        request: Request,
        choice: int,
        sampling: SamplingParams,
        decoder: Decoder,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        context = request.prompt[-CONTEXT_TOKENS:] if isinstance(request.prompt, Sequence) else ()
        self.request_id = request.id
        self.choice = choice
        self.cached_tokens = 0 if request.resume_state is None else request.resume_state.num_cached_tokens
        self.queue_ns = 0 if request.resume_state is None else request.resume_state.queue_ns
        self.finish: FinishReason | None = None
        self._request = request
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(
            decoder,
            sampling.stop,
            sampling.min_tokens,
            context,
            skip_special_tokens=sampling.skip_special_tokens,
            include_stop=self._include_stop,
        )
        past = _past_event(request, sampling, eos_token_ids)
        self.past_text, used = self._read_tokens(past)
        """Text of the earlier output."""
        self.output = list(past.tokens[:used])
        self.scored_tokens = 0 if request.resume_state is None else request.resume_state.num_scored_tokens
        """Leading prompt tokens whose log-probabilities were received."""
        self._first_token_ns = request.first_token_ns if used else None
        self._last_token_ns = request.last_token_ns if used else 0
        resumed = request.resume_state if used else None
        self._largest_gap_ns = 0 if resumed is None else resumed.largest_gap_ns
        self._finish_ns = 0

    @property
    def started(self) -> bool:
        """Whether there are output tokens."""
        return bool(self.output)

    @property
    def output_tokens(self) -> int:
        return len(self.output)

    def read_past(self, now_ns: int) -> Delta | None:
        """The last delta, if the earlier output completes a stop string; else None."""
        if self._detokenizer.stop_reason is None:
            return None
        return self.read(TokenEvent(self.request_id), now_ns)

    def read(self, event: TokenEvent, now_ns: int) -> Delta:
        """The delta for one event of this request.

        When a stop string is completed, the choice is finished but the engine's request is not: the caller
        must then cancel the request.
        """
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.queue_ns = max(self.queue_ns, event.queue_ns)
        text, used = self._read_tokens(event)
        tokens = event.tokens[:used]
        if tokens:
            if self._first_token_ns is None:
                self._first_token_ns = now_ns
            else:
                self._largest_gap_ns = max(self._largest_gap_ns, now_ns - self._last_token_ns)
            self._last_token_ns = now_ns
            self.output += tokens
        if event.prompt_logprobs:
            # The first token has no log-probability.
            self.scored_tokens = max(1, self.scored_tokens) + len(event.prompt_logprobs)
        if event.finish is not None:
            text += self._detokenizer.finish()
        stop_reason: str | int | None = self._detokenizer.stop_reason
        finish = FinishReason.ERROR if event.finish is FinishReason.UNLOADED else event.finish
        self.finish = FinishReason.STOP if stop_reason is not None else finish
        if stop_reason is None and event.stop_token in self._stop_token_ids:
            stop_reason = event.stop_token
        self._finish_ns = now_ns
        return Delta(
            choice=self.choice,
            text=text,
            tokens=tokens,
            logprobs=None if event.logprobs is None else event.logprobs[:used],
            finish=self.finish,
            stop_reason=stop_reason,
            cached_tokens=self.cached_tokens,
            queue_ns=self.queue_ns,
            error=event.error,
            prompt_logprobs=event.prompt_logprobs,
            embedding=event.embedding,
        )

    def _read_tokens(self, event: TokenEvent) -> tuple[str, int]:
        """The event's text, and the number of its tokens that belong to the output."""
        shown = event.tokens
        if event.stop_token is not None and not self._include_stop:
            shown = shown[:-1]
        pieces = []
        for used, token in enumerate(shown, start=1):
            pieces.append(self._detokenizer.push(token))
            if self._detokenizer.stop_reason is not None:
                return "".join(pieces), used
        return "".join(pieces), len(event.tokens)

    def resumed_request(self, request_id: str, now_ns: int) -> Request:
        """The request with its output so far, to resume it under another id on any engine of its service.

        Its ``max_tokens`` must be set. Times are sent as ages, since hosts have different clocks.
        """
        request, most = self._request, self._request.sampling.max_tokens
        assert most is not None, "how many tokens a request may have is decided once, for all of its engines"
        first_token_ns = self._first_token_ns or now_ns
        state = ResumeState(
            max_new_tokens=most,
            age_ns=now_ns - request.arrival_ns,
            first_token_age_ns=now_ns - first_token_ns,
            last_token_age_ns=now_ns - self._last_token_ns if self.started else 0,
            largest_gap_ns=self._largest_gap_ns,
            num_cached_tokens=self.cached_tokens if self.started else 0,
            queue_ns=self.queue_ns if self.started else 0,
            num_admissions=int(self.started),
            num_scored_tokens=self.scored_tokens,
        )
        return replace(request, id=request_id, output_tokens=tuple(self.output), resume_state=state)

    def original_request(self, request_id: str) -> Request:
        """The original request, under another id."""
        return replace(self._request, id=request_id)

    def record(self) -> RequestRecord | None:
        """Times of the finished choice; None if it is unfinished, cancelled or failed."""
        if self.finish not in (FinishReason.STOP, FinishReason.LENGTH) or self._first_token_ns is None:
            return None
        return RequestRecord(
            request_id=self.request_id,
            service=self._request.service,
            arrival_ns=self._request.arrival_ns,
            first_token_ns=self._first_token_ns,
            finish_ns=self._finish_ns,
            prompt_tokens=len(self._request.prompt),
            output_tokens=self.output_tokens,
            largest_gap_ns=self._largest_gap_ns,
        )


def _past_event(request: Request, sampling: SamplingParams, eos_token_ids: Sequence[int]) -> TokenEvent:
    """The earlier output of a resumed request, as one event."""
    tokens = request.output_tokens
    if isinstance(tokens, int) or not tokens:
        return TokenEvent(request.id)
    last = tokens[-1]
    stops = last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos)
    ends = stops and sampling.may_stop_at(len(tokens))
    return TokenEvent(request.id, tokens, stop_token=last if ends else None)
