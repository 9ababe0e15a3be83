"""The offline interface of static batching (``StaticShoal``): loads a model and completes prompts."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.padded.calibrate import calibrate
from experiments.padded.engine import StaticEngine, StaticOutcome, max_request_tokens
from experiments.padded.interval import AdaptiveInterval, FixedInterval, Interval
from experiments.padded.options import StaticOptions
from experiments.padded.presets import STATIC_ENGINES, EngineNumbers, static_preset
from shoal.batches import ServingTime
from shoal.core import ConfigError, InvalidRequest, LengthPredictor, Request, SamplingParams, Service
from shoal.engine.build import default_threads
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.forecast.latency_profile import load_profile
from shoal.frontend.progress import LoadProgress
from shoal.models import Tokenizer, resolve_service

if TYPE_CHECKING:
    from experiments.padded.torch_executor import StaticModel

_run_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSetup:
    """Options of ``StaticShoal``; raises ConfigError for numbers out of range."""

    preset: str = "scls"
    """One of ``STATIC_PRESETS``."""
    engine: str = "hf"
    """One of ``STATIC_ENGINES``, whose parameters the preset takes."""
    workers: int = 2
    """Static engines, each a thread; they share the weights."""
    slice_tokens: int | None = None
    """None: the preset's."""
    max_batch: int | None = None
    """None: the preset's."""
    interval_s: float | None = None
    """The interval, or the shortest one of an adaptive interval; None: the preset's."""
    device: str = "cpu"
    threads: int | None = None
    """CPU threads of each worker; None: an equal share of the cores."""
    kv_bytes: int | None = None
    """Memory for the KV of all workers; None: ``StaticModel.default_kv_bytes``."""
    profile: Path | None = None
    """A file of `shoal profile`; None: calibrate with a few small batches."""

    def __post_init__(self) -> None:
        for name in ("workers", "slice_tokens", "max_batch", "threads", "kv_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.options()

    def options(self) -> StaticOptions:
        """The preset with these options; raises ConfigError."""
        options = static_preset(self.preset, self.engine)
        return replace(
            options,
            interval=self._interval(options.interval),
            slice_tokens=self.slice_tokens or options.slice_tokens,
            max_batch=self.max_batch or options.max_batch,
        )

    def _interval(self, interval: Interval) -> Interval:
        if self.interval_s is None:
            return interval
        if isinstance(interval, FixedInterval):
            return FixedInterval(self.interval_s)
        if isinstance(interval, AdaptiveInterval):
            return AdaptiveInterval(self.interval_s, interval.factor)
        raise ConfigError(
            f"static preset {self.preset!r} has no batching interval: its workers take a batch when they are "
            "idle; leave interval_s out"
        )


class StaticShoal:
    """A model served in static batches, for offline use.

    >>> shoal = StaticShoal("smollm2", StaticSetup(preset="scls", slice_tokens=32))
    ... outcome = shoal.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=64))
    ... print(outcome.completions[0].text, outcome.report.early_return_ratio)

    predictor: predicts output lengths, for presets that use predictions. progress: show loading on the
    terminal. Raises ConfigError, ModelUnavailable or ModelUnsupported.
    """

    def __init__(
        self,
        service: str | Service,
        setup: StaticSetup | None = None,
        *,
        predictor: LengthPredictor | None = None,
        progress: bool = True,
    ) -> None:
        from experiments.padded.torch_executor import StaticBatchExecutor, load_static_model

        self.setup = setup or StaticSetup()
        self.service = Service(name=service, model=service) if isinstance(service, str) else service
        threads = self.setup.threads or max(1, default_threads() // self.setup.workers)
        with LoadProgress(shown=progress) as loading:
            folder = resolve_service(self.service, loading.fetching)
            self.tokenizer = Tokenizer.from_folder(folder, self.service.chat_template)
            loading.doing(f"loading {self.service.model} on {self.setup.device}")
            model = load_static_model(self.service, folder, device=self.setup.device)
            time = self._serving_time(model, threads, loading)
        kv_bytes = self.setup.kv_bytes or model.default_kv_bytes()
        memory = self._numbers.memory(
            token_bytes=model.kv_token_bytes, available_bytes=max(1, kv_bytes // self.setup.workers)
        )
        self.info = _describe(
            self.service,
            model,
            self.setup,
            threads,
            kv_bytes,
            max_request_tokens(memory, model.context_tokens),
        )
        self._engine = StaticEngine(
            self.service,
            self.setup.options(),
            lambda: StaticBatchExecutor(model, threads=threads),
            self.info,
            workers=self.setup.workers,
            time=time,
            memory=memory,
            predictor=predictor,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        chat: bool = False,
        arrivals_s: Sequence[float] | None = None,
        progress: bool = True,
    ) -> StaticOutcome:
        """Complete prompts; see ``StaticEngine.run``.

        prompts: texts or lists of token ids. sampling: one for all, or one for each; greedy. chat: put each
        text into the chat template. arrivals_s: arrival of each, in seconds after the start; None: all at
        once.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        arrivals = [0.0] * len(prompts) if arrivals_s is None else arrivals_s
        for name, values in (("sampling", each), ("arrivals_s", arrivals)):
            if len(values) != len(prompts):
                raise InvalidRequest(f"{name} has {len(values)} values for {len(prompts)} prompts", name)
        run = next(_run_numbers)
        requests = [
            Request(
                id=f"static-{run}-{number}",
                service=self.service.name,
                prompt=self._encode(prompt, chat),
                sampling=params,
                arrival_ns=round(arrival_s * 1e9),
            )
            for number, (prompt, params, arrival_s) in enumerate(zip(prompts, each, arrivals, strict=True))
        ]
        return self._engine.run(requests, self.tokenizer, progress=progress)

    def _encode(self, prompt: str | Sequence[int], chat: bool) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if chat:
            return self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)

    @property
    def _numbers(self) -> EngineNumbers:
        return STATIC_ENGINES[self.setup.engine]

    def _serving_time(self, model: "StaticModel", threads: int, loading: LoadProgress) -> ServingTime:
        from experiments.padded.torch_executor import StaticBatchExecutor

        if self.setup.profile is not None:
            return load_profile(self.setup.profile).padded_form(self.service.name)
        executor = StaticBatchExecutor(model, threads=threads)
        # In another thread, because torch's number of threads is a setting of the calling thread.
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(
                calibrate, executor, context_tokens=model.context_tokens, progress=loading.doing
            ).result()


def _describe(
    service: Service, model: "StaticModel", setup: StaticSetup, threads: int, kv_bytes: int, total: int
) -> EngineInfo:
    """The limits of requests; KV is counted in single tokens."""
    if total == 0:
        raise ConfigError(
            f"{kv_bytes} bytes for the KV of {setup.workers} workers hold no request at all: a token of "
            f"{service.model} takes {model.kv_token_bytes}; give more or use fewer workers"
        )
    kv_tokens = kv_bytes // model.kv_token_bytes
    limits = ServiceInfo(
        model=service.model,
        context_tokens=model.context_tokens,
        max_total_tokens=total,
        kv_tokens=kv_tokens // setup.workers,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        execution_s=service.execution_s,
    )
    return EngineInfo(
        services={service.name: limits},
        device=setup.device,
        threads=threads,
        block_size=1,
        merged_blocks=kv_tokens,
        kv_bytes=kv_bytes,
        weight_bytes=model.weight_bytes,
    )
