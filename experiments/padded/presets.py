"""Presets: published systems as options of static batching (SCLS and its ablations, S3, UELLM)."""

from collections.abc import Callable
from dataclasses import dataclass

from experiments.padded.interval import AdaptiveInterval, FixedInterval, Interval, WhenIdle
from experiments.padded.offload import OFFLOADERS
from experiments.padded.options import StaticOptions
from shoal.batches import FORMERS
from shoal.batches.estimates import MemoryByBytes, MemoryByRule, MemoryLimit
from shoal.core import lookup

SLICE_TOKENS = 128
"""Slice length S of SCLS's evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    """Parameters of SCLS's evaluation for one kind of static engine (sections 4.3 and 5.1)."""

    batch: int
    """Size of fixed batches."""
    interval_s: float
    """Shortest batching interval (Gamma)."""
    by_rule: bool
    """Whether memory is checked by a table (``MemoryByRule``), not by bytes."""

    def memory(self, *, token_bytes: int, available_bytes: int) -> MemoryLimit:
        """The paper's memory estimate for this engine; the table ignores the bytes."""
        if self.by_rule:
            return MemoryByRule()
        return MemoryByBytes(token_bytes=token_bytes, available_bytes=available_bytes)


STATIC_ENGINES: dict[str, EngineNumbers] = {
    "hf": EngineNumbers(batch=16, interval_s=6.0, by_rule=False),
    "ds": EngineNumbers(batch=12, interval_s=3.0, by_rule=True),
}
"""``hf``: transformers' generate; ``ds``: DeepSpeed-Inference; numbers are those for LLaMA2-13B on 80 GB."""


def _sls(engine: EngineNumbers) -> StaticOptions:
    return StaticOptions(
        former=FORMERS["fixed"],
        offloader=OFFLOADERS["round-robin"],
        interval=WhenIdle(),
        max_batch=engine.batch,
    )


def _so(engine: EngineNumbers) -> StaticOptions:
    return StaticOptions(
        former=FORMERS["fixed"],
        offloader=OFFLOADERS["round-robin"],
        interval=WhenIdle(),
        slice_tokens=SLICE_TOKENS,
        max_batch=engine.batch,
    )


def _least_time(offloader: str, interval: Interval, max_batch: int | None = None) -> StaticOptions:
    return StaticOptions(
        former=FORMERS["scls"],
        offloader=OFFLOADERS[offloader],
        interval=interval,
        slice_tokens=SLICE_TOKENS,
        max_batch=max_batch,
    )


def _predicted(former: str) -> Callable[[EngineNumbers], StaticOptions]:
    def options(engine: EngineNumbers) -> StaticOptions:
        return StaticOptions(
            former=FORMERS[former],
            offloader=OFFLOADERS["round-robin"],
            interval=FixedInterval(engine.interval_s),
            max_batch=None if former == "s3" else engine.batch,
            trust_predictions=True,
        )

    return options


def _fifo(engine: EngineNumbers) -> StaticOptions:
    return StaticOptions(
        former=FORMERS["fixed"],
        offloader=OFFLOADERS["round-robin"],
        interval=FixedInterval(engine.interval_s),
        max_batch=engine.batch,
    )


STATIC_PRESETS: dict[str, Callable[[EngineNumbers], StaticOptions]] = {
    "sls": _sls,
    "so": _so,
    "pm": lambda engine: _least_time("round-robin", FixedInterval(engine.interval_s), engine.batch),
    "ab": lambda engine: _least_time("round-robin", FixedInterval(engine.interval_s)),
    "lb": lambda engine: _least_time("max-min", FixedInterval(engine.interval_s)),
    "scls": lambda engine: _least_time("max-min", AdaptiveInterval(engine.interval_s)),
    "fifo": _fifo,
    "s3": _predicted("s3"),
    "odbs": _predicted("odbs"),
    "slo-dbs": _predicted("slo-dbs"),
    "uellm": _predicted("slo-odbs"),
    "uellm-literal": _predicted("slo-odbs-literal"),
}
"""SCLS's ablations from ``sls`` to ``scls``, then UELLM's batching and its baselines."""


def static_preset(name: str, engine: str = "hf") -> StaticOptions:
    """The options of a published system on one kind of engine (``STATIC_ENGINES``).

    Raises:
        ConfigError: unknown preset or engine; names the known ones.
    """
    return lookup("static preset", STATIC_PRESETS, name)(lookup("static engine", STATIC_ENGINES, engine))
