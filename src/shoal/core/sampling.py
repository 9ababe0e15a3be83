"""Sampling parameters of a request, their limits and validation, and the defaults of a service."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from shoal.core.errors import InvalidRequest
from shoal.core.grammar import MAX_GRAMMAR_BYTES, Grammar

MAX_CHOICES = 128
MAX_LOGPROBS = 20
LARGEST_BIAS = 100.0
"""Limit on the absolute bias of a logit."""
MAX_BIASED_TOKENS = 1024
MAX_BANNED_SEQUENCES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 2048
"""Of one stop string."""
MIN_TEMPERATURE = 1e-5
"""Below this, sampling is greedy."""
_LARGEST_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with the names of vLLM and OpenAI."""

    max_tokens: int | None = None
    """None: as many as the model's context and the KV pool allow."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be sampled before this many output tokens, unless a grammar
    allows nothing else."""
    temperature: float = 1.0
    """0 (or below MIN_TEMPERATURE) is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this probability."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the probability of the most likely token."""
    repetition_penalty: float = 1.0
    """Over prompt and output (Keskar et al., CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Over the output (OpenAI's definition)."""
    frequency_penalty: float = 0.0
    """Over the output (OpenAI's definition)."""
    stop: tuple[str, ...] = ()
    """Strings that end the output and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output and are not part of its text."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to report with each output token; None: no log-probabilities."""
    seed: int | None = None
    """None: a random seed."""
    n: int = 1
    """Number of independent outputs of the same prompt."""
    grammar: Grammar | None = None
    """Constrains the output; None: no constraint."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report with each prompt token; None: no log-probabilities. Of ``n``
    outputs only the first reports them."""
    embed: bool = False
    """Report the prompt's embedding: what the model's last norm gives for its last token, of length 1."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens can be sampled; empty: all."""
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output cannot contain."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the parameter, for values out of range."""
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", f"must be at least 1, got {self.max_tokens}")
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}",
            )
        _require(self.min_tokens >= 0, "min_tokens", f"must not be negative, got {self.min_tokens}")
        self._check_range("temperature", self.temperature, 0.0, 100.0)
        _require(0.0 < self.top_p <= 1.0, "top_p", f"must be in (0, 1], got {self.top_p}")
        _require(self.top_k >= -1, "top_k", f"must be -1 or 0 (off) or at least 1, got {self.top_k}")
        _require(self.top_k <= _LARGEST_TOP_K, "top_k", f"must be at most {_LARGEST_TOP_K}, got {self.top_k}")
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        self._check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_stops()
        self._check_bias()
        for name in ("logprobs", "prompt_logprobs"):
            if (reported := getattr(self, name)) is not None:
                self._check_range(name, reported, 0, MAX_LOGPROBS)
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        if self.seed is not None:
            self._check_range("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_range("n", self.n, 1, MAX_CHOICES)

    def _check_stops(self) -> None:
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", "strings must not be empty")
        longest = max(map(len, self.stop), default=0)
        _require(longest <= MAX_STOP_CHARACTERS, "stop", f"at most {MAX_STOP_CHARACTERS} characters each")
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "must not be negative")

    def _check_bias(self) -> None:
        _require(
            len(self.logit_bias) <= MAX_BIASED_TOKENS, "logit_bias", f"at most {MAX_BIASED_TOKENS} tokens"
        )
        for token, bias in self.logit_bias:
            _require(token >= 0, "logit_bias", f"token ids must not be negative, got {token}")
            self._check_range("logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS)
        _require(all(t >= 0 for t in self.allowed_token_ids), "allowed_token_ids", "must not be negative")
        _require(
            len(self.banned_sequences) <= MAX_BANNED_SEQUENCES,
            "banned_sequences",
            f"at most {MAX_BANNED_SEQUENCES} sequences",
        )
        _require(all(self.banned_sequences), "banned_sequences", "must not be empty")

    def _check_grammar(self, grammar: Grammar) -> None:
        _require(not self.ignore_eos, "ignore_eos", "must be false where a grammar says when the output ends")
        size = len(grammar.source.encode(errors="replace"))
        _require(
            size <= MAX_GRAMMAR_BYTES, "grammar", f"has {size} bytes, at most {MAX_GRAMMAR_BYTES} may be"
        )

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        _require(
            math.isfinite(value) and low <= value <= high, name, f"must be in [{low}, {high}], got {value}"
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken; also if the temperature is too low for float32."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    def may_stop_at(self, output_tokens: int) -> bool:
        """Whether an end-of-sequence or stop token ends the output as its ``output_tokens``-th token."""
        # Under a grammar such a token is sampled before min_tokens only if nothing else is allowed.
        return output_tokens >= self.min_tokens or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_bias(self) -> bool:
        """Whether single tokens are biased, allowed or banned."""
        return bool(self.logit_bias or self.allowed_token_ids or self.banned_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Default parameters of a service's requests; None: as the model's generation config says.

    Fields and errors are those of SamplingParams.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        SamplingParams(**self._set())

    def with_fallback(self, model: Mapping[str, float]) -> "SamplingDefaults":
        """All fields with their effective values: set here, else in ``model``, else the default."""
        effective = sampling_params({**model, **self._set()})
        return SamplingDefaults(**{name: getattr(effective, name) for name in asdict(self)})

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request that sets some by name; raises InvalidRequest."""
        return sampling_params({**self._set(), **given})

    def _set(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from fields by name; raises InvalidRequest also for unknown names and wrong types.

    Tuples may be lists, token biases a mapping, and a single stop string need not be in a list.
    """
    known = tuple(SamplingParams.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"possible here: {', '.join(known)}"
            raise InvalidRequest(f"{name}: unknown key, {hint}", param=name)
    values = {name: _as_tuples(name, value) for name, value in given.items()}
    try:
        return SamplingParams(**values)
    except TypeError as error:
        name = next(filter(lambda name: _has_wrong_type(name, values[name]), values))
        raise InvalidRequest(f"{name}: {given[name]!r:.40} has the wrong type", param=name) from error


def _as_tuples(name: str, value: Any) -> Any:
    """A value with its lists, mappings and single stop string converted to tuples."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(_as_tuples("", one) for one in value) if isinstance(value, list) else value


def _has_wrong_type(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except TypeError:
        return True
    except InvalidRequest:
        pass  # its type is right; it may be valid only together with other fields
    return False


def _require(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {problem}", param=param)
