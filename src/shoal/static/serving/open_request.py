"""One request on its way through static batches: what it may ask, and what it has so far."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.core import FinishReason, InvalidRequest, LengthPredictor, Request, SamplingParams, TokenEvent
from shoal.frontend.detokenize import Decoder
from shoal.frontend.offline_batch import Completion
from shoal.frontend.reader import ChoiceReader
from shoal.static.batching import StaticRequest


def check_static_sampling(sampling: SamplingParams) -> None:
    """Refuse what static batches do not do: anything but greedy decoding; raises InvalidRequest."""
    wants = {
        "temperature": not sampling.greedy,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "min_tokens": sampling.min_tokens > 0,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "embed": sampling.embed,
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "banned_sequences": bool(sampling.banned_sequences),
        "n": sampling.n != 1,
        "grammar": sampling.grammar is not None,
    }
    for param, wanted in wants.items():
        if wanted:
            raise InvalidRequest(
                f"{param}: static batches decode greedily, one output for a prompt (temperature 0, no "
                "penalties, biases, min_tokens, logprobs, embeddings, n or grammar); `shoal generate` does "
                "the rest",
                param=param,
            )


@dataclass(slots=True)
class OpenRequest:
    """A request that has no answer yet; the owner of its tokens."""

    request: Request
    prompt: Sequence[int]
    max_new_tokens: int
    """Most output tokens it may have."""
    ends: Collection[int]
    """Tokens that end it."""
    reader: ChoiceReader
    static_request: StaticRequest
    """The request as the batcher sees it."""
    tokens: list[int] = field(default_factory=list)
    """Output so far."""
    text: list[str] = field(default_factory=list)
    """Text of the output so far, one part for each batch."""
    batches: int = 0
    """Batches that it has taken part in."""
    completion: Completion | None = None
    """Its answer, once it has one."""

    @classmethod
    def open(
        cls,
        request: Request,
        number: int,
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int],
        decoder: Decoder,
        predictor: LengthPredictor | None,
        slo_s: float | None,
    ) -> "OpenRequest":
        """A request whose prompt is token ids; number: order of submission."""
        assert isinstance(request.prompt, Sequence)
        sampling = request.sampling
        static_request = StaticRequest(
            id=request.id,
            tokens=len(request.prompt),
            remaining=max_new_tokens,
            predicted=max_new_tokens if predictor is None else predictor.predict(request, 0, max_new_tokens),
            slo_s=slo_s,
            arrival_ns=request.arrival_ns,
            number=number,
        )
        return cls(
            request=request,
            prompt=request.prompt,
            max_new_tokens=max_new_tokens,
            ends={*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)},
            reader=ChoiceReader(request, 0, sampling, decoder),
            static_request=static_request,
        )

    @property
    def input_ids(self) -> list[int]:
        """Every token so far, prompt first: the input of its next batch."""
        return [*self.prompt, *self.tokens]

    def take(self, output: Sequence[int], ended: bool, now_ns: int, predictor: LengthPredictor | None) -> int:
        """What a batch brought; returns how many of its tokens belong to the answer.

        ended: whether the last token is one of ``ends``. Sets ``completion`` where this was all.
        """
        total = len(self.tokens) + len(output)
        finish = FinishReason.STOP if ended else FinishReason.LENGTH if total >= self.max_new_tokens else None
        delta = self.reader.read(
            TokenEvent(
                self.request.id,
                tuple(output),
                finish=finish,
                stop_token=output[-1] if ended else None,
                position=len(self.tokens),
            ),
            now_ns,
        )
        self.batches += 1
        self.tokens += delta.tokens
        self.text.append(delta.text)
        if delta.finish is not None:
            self._complete(delta.finish, delta.stop_reason, None)
            if predictor is not None:
                predictor.record(self.request, len(self.tokens))
        else:
            self.static_request = self.static_request.after(
                len(output), self._predicted_anew(len(output), predictor)
            )
        return len(delta.tokens)

    def fail(self, reason: str) -> None:
        """It cannot be answered; what it has is kept."""
        self.batches += 1
        self._complete(FinishReason.ERROR, None, reason)

    def _predicted_anew(self, generated: int, predictor: LengthPredictor | None) -> int | None:
        """Output tokens still to come, predicted anew if the request has outgrown its prediction."""
        if predictor is None or generated < self.static_request.predicted:
            return None
        so_far = len(self.tokens)
        return predictor.predict(self.request, so_far, self.max_new_tokens) - so_far

    def _complete(self, finish: FinishReason, stop_reason: str | int | None, error: str | None) -> None:
        self.completion = Completion(
            service=self.request.service,
            choice=0,
            prompt_tokens=len(self.prompt),
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason=finish,
            stop_reason=stop_reason,
            error=error,
            record=self.reader.record() if error is None else None,
        )
