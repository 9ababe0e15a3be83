"""``shoal profile --links``: measured rates of migrations between engines, and budgets from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from shoal.cluster.packing import MigrationBudgets
from shoal.core.units import format_size

if TYPE_CHECKING:
    from shoal.engine import EngineOptions
    from shoal.profile.migrations import MigrationRates

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """Measured migration rates by service, and the share of an engine's time for migrations."""

    rates: "Mapping[str, MigrationRates]"
    epoch_s: float
    """Length of a packing epoch."""
    share: float

    @property
    def budgets(self) -> MigrationBudgets:
        """What fits into that part of an epoch, whichever service moves; links of hosts were not measured."""
        time_s = self.share * self.epoch_s
        kv = min(rates.kv_bytes_per_s for rates in self.rates.values())
        prefill = min(rates.prefill_tokens_per_s for rates in self.rates.values())
        return MigrationBudgets(engine_bytes=int(kv * time_s), prefill_tokens=int(prefill * time_s))

    def to_json(self) -> dict[str, Any]:
        services = {
            name: {**asdict(rates), "kv_bytes_per_s": rates.kv_bytes_per_s}
            for name, rates in self.rates.items()
        }
        budgets = asdict(self.budgets)
        return {"epoch_s": self.epoch_s, "share": self.share, "services": services, "budgets": budgets}

    def table(self) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title="Requests that change engines"
        )
        table.add_column("service", no_wrap=True)
        for heading in ("prompt", "KV sent, MiB/s", "KV taken, MiB/s", "prefill, tokens/s"):
            table.add_column(heading, justify="right")
        for name, rates in self.rates.items():
            table.add_row(
                name,
                f"{rates.prompt_tokens:,}",
                f"{rates.send_bytes_per_s / _MIB:,.0f}",
                f"{rates.take_bytes_per_s / _MIB:,.0f}",
                f"{rates.prefill_tokens_per_s:,.0f}",
            )
        return table

    def snippet(self) -> str:
        """The budgets as keys of a configuration file."""
        budgets = self.budgets
        assert budgets.engine_bytes is not None
        size = max(1, budgets.engine_bytes)
        size -= size % _MIB if size > _MIB else 0
        written = f"{{engine: {format_size(size)}, prefill_tokens: {max(1, budgets.prefill_tokens or 0)}}}"
        return f"cluster: {{packing: {{budgets: {written}}}}}"


def measure_links(options: "EngineOptions", epoch_s: float, share: float) -> LinkReport:
    """Load all services into two engines, and migrate requests of each between them."""
    from shoal.cli.progress import ProgressDisplay
    from shoal.models import resolve_service
    from shoal.profile.measure import profiling_options
    from shoal.profile.migrations import MigrationProfiler, build_engine_pair

    with ProgressDisplay() as progress, TemporaryDirectory(prefix="shoal-") as folder:
        folders = {s.name: resolve_service(s, progress.update) for s in options.services}
        engines, info = build_engine_pair(profiling_options(options), folders, progress=progress.message)
        profiler = MigrationProfiler(engines, Path(folder))
        try:
            rates = {
                name: profiler.measure(name, service, partial(progress.update, f"moving requests of {name}"))
                for name, service in info.services.items()
            }
        finally:
            profiler.close()
    return LinkReport(rates=rates, epoch_s=epoch_s, share=share)
