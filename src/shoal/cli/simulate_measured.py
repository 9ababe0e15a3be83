"""``shoal simulate --compare`` and ``--fit-overhead``: simulate a measured run, and compare both."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shoal.cli.output import output_file
from shoal.config.scenario import Scenario
from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_measured import (
    compare_run,
    fit_scenario,
    is_part,
    load_measured_scenario,
    with_overhead,
)
from shoal.config.scenario_run import PreparedRun
from shoal.config.setting_tree import Table
from shoal.core import ConfigError
from shoal.measure import RunRecord

_FILES = ("comparison.json", "comparison.png")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Options about a measured run; all None: there is none.

    Raises ConfigError for an option that needs another.
    """

    compare: Path | None
    """Log whose requests are simulated and compared; None: that of ``fit``."""
    plot: Path | None
    """File of the picture of both runs."""
    fit: Path | None
    """Log to which the host's overhead is fitted."""
    fit_requests: int | None
    """How many of its requests are fitted to; None: all."""

    def __post_init__(self) -> None:
        if self.fit_requests is not None and self.fit is None:
            raise ConfigError("--fit-requests goes with --fit-overhead LOG")
        if self.plot is not None and self._log is None:
            raise ConfigError("--compare-plot goes with --compare LOG or --fit-overhead LOG")

    @property
    def _log(self) -> Path | None:
        return self.compare or self.fit

    def load(self, console: Console, file: Path | None, flags: Table) -> Scenario:
        """The scenario, with the log's requests and the fitted overhead if there are; prints the fit."""
        if self._log is None:
            return load_scenario(file=file, flags=flags)
        if self.fit is None:
            return load_measured_scenario(self._log, "--compare", file=file, flags=flags)
        # Requests of a part of a run were slowed down by the others, so all are simulated.
        whole = self.compare if self.compare is not None and is_part(self.fit, self.compare) else self.fit
        scenario = load_measured_scenario(whole, "--fit-overhead", file=file, flags=flags)
        overhead, fit = fit_scenario(scenario, self.fit, self.fit_requests)
        step, layer = (f"{seconds * 1e6:.1f}us" for seconds in (overhead.step_s, overhead.layer_s))
        console.print(
            f"fitted to {fit.intervals:,} times between tokens: overhead: {{step: {step}, layer: {layer}}}\n"
            f"their mean error is {fit.error:.1%}, and {fit.error_without:.1%} without overhead",
            highlight=False,
            soft_wrap=True,
        )
        if self.compare is not None:
            scenario = load_measured_scenario(self.compare, "--compare", file=file, flags=flags)
        return with_overhead(scenario, overhead)

    def show(
        self, console: Console, prepared: PreparedRun, run: RunRecord, folder: Path | None
    ) -> list[Path]:
        """Write and print the comparison with a measured run, if there is one; returns the files.

        folder: the figures and a picture are also written there.
        """
        figures, drawing = [folder and folder / name for name in _FILES]
        if self._log is None:
            for path in (figures, drawing):
                if path is not None:
                    path.unlink(missing_ok=True)  # of an earlier run in this folder
            return []
        comparison = compare_run(prepared, run, self._log)
        written = [] if figures is None else [figures]
        for path in written:
            with output_file(path):
                comparison.write(path)
        pictures = [path for path in (self.plot, drawing) if path is not None]
        for path in pictures:
            comparison.draw(path, run.title)
        console.print(comparison.grid().to_rich())
        if comparison.left_out:
            console.print(f"{comparison.left_out:,} requests of the log were not answered in simulation")
        return written + pictures
