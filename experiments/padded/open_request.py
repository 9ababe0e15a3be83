"""An unfinished request of a static engine: its output so far, and checks of its sampling parameters."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.batches import PooledRequest
from shoal.core import FinishReason, InvalidRequest, LengthPredictor, Request, SamplingParams, TokenEvent
from shoal.frontend.detokenize import Decoder
from shoal.frontend.offline_batch import Completion
from shoal.frontend.reader import ChoiceReader


def check_static_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for everything but greedy decoding."""
    unsupported = {
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
    for param, used in unsupported.items():
        if used:
            raise InvalidRequest(
                f"{param}: static batches decode greedily, one output for a prompt (temperature 0, no "
                "penalties, biases, min_tokens, logprobs, embeddings, n or grammar); `shoal generate` does "
                "the rest",
                param=param,
            )


@dataclass(slots=True)
class OpenRequest:
    """A request with its output so far."""

    request: Request
    prompt: Sequence[int]
    max_new_tokens: int
    ends: Collection[int]
    """Tokens that end the request."""
    reader: ChoiceReader
    static_request: PooledRequest
    """The current value for the batcher."""
    tokens: list[int] = field(default_factory=list)
    """Output so far."""
    text: list[str] = field(default_factory=list)
    """Output so far, one part for each batch."""
    batches: int = 0
    """Batches so far."""
    completion: Completion | None = None
    """None until the request has ended."""

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
        """Make one from a request with token ids; number: order of submission."""
        assert isinstance(request.prompt, Sequence)
        sampling = request.sampling
        static_request = PooledRequest(
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
        """Prompt and output so far: the input of the next batch."""
        return [*self.prompt, *self.tokens]

    def add_batch(
        self, output: Sequence[int], ended: bool, now_ns: int, predictor: LengthPredictor | None
    ) -> int:
        """Add the output of a batch; returns how many of its tokens belong to the response.

        ended: whether the last token is one of ``ends``. Sets ``completion`` if the request has ended.
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
                len(output), self._updated_prediction(len(output), predictor)
            )
        return len(delta.tokens)

    def fail(self, reason: str) -> None:
        """End the request with an error; its output is kept."""
        self.batches += 1
        self._complete(FinishReason.ERROR, None, reason)

    def _updated_prediction(self, generated: int, predictor: LengthPredictor | None) -> int | None:
        """A new prediction of further output tokens; None unless the request has outgrown the last one."""
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
