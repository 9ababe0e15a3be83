"""Result entries and tables of `benchmarks.throughput`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 140


@dataclass
class Entry:
    """Results of a contestant.

    facts: from its start. failed: reason of a failed start. jobs, failures: answers of all rounds, and
    reasons of failures, by shape.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    failed: str | None = None
    jobs: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rates(self, shape: str) -> list[float]:
        """Output tokens per second of each round."""
        return [job["tokens"] / job["seconds"] for job in self.jobs.get(shape, [])]

    def failure(self, shape: str) -> str | None:
        """Reason why a shape has no or not all results."""
        return self.failed or self.failures.get(shape)


def show(entries: Sequence[Entry], shapes: Sequence[str], own: Sequence[str]) -> None:
    """Print rates by shape, the parts of step times, and servers' times to a first token.

    own: contestants whose ratio to every other is shown.
    """
    console = Console(width=WIDTH)
    by_name = {entry.name: entry for entry in entries}
    for shape in shapes:
        console.print(_rates(shape, entries, [by_name[name] for name in own if name in by_name]))
        for entry in entries:
            if (failure := entry.failure(shape)) is not None:
                console.print(f"{entry.name} failed: {failure}", markup=False, highlight=False)
    console.print(_parts(entries, shapes))
    for entry in entries:
        if "first_token_s" in entry.facts:
            seconds = entry.facts["first_token_s"]
            console.print(f"{entry.name}: {seconds:.1f} s from the start of `shoal serve` to the first token")


def _rates(shape: str, entries: Sequence[Entry], own: Sequence[Entry]) -> Table:
    table = Table(title=f"{shape}: output tokens per second", title_justify="left")
    for column in ("", "version", "weights", "KV"):
        table.add_column(column)
    for column in ("median", "range", *(f"{entry.name} / this" for entry in own)):
        table.add_column(column, justify="right")
    for entry in entries:
        facts = [str(entry.facts.get(name, "")) for name in ("version", "weights", "kv")]
        rates = entry.rates(shape)
        if entry.failure(shape) is not None:
            table.add_row(entry.name, *facts, "failed")
            continue
        if not rates:
            table.add_row(entry.name, *facts, "not run")
            continue
        ratios = [_ratio(mine.rates(shape), rates) for mine in own]
        spread = f"{min(rates):.1f}-{max(rates):.1f}"
        table.add_row(entry.name, *facts, f"{statistics.median(rates):.1f}", spread, *ratios)
    return table


def _ratio(mine: Sequence[float], others: Sequence[float]) -> str:
    """Median ratio within rounds."""
    ratios = [one / other for one, other in zip(mine, others, strict=False)]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _parts(entries: Sequence[Entry], shapes: Sequence[str]) -> Table:
    """Mean parts of step times, of contestants that report them."""
    names = list({part: None for job in _with_parts(entries, shapes) for part in job["parts_ns"]})
    table = Table(title="milliseconds of a step, decode and prefill", title_justify="left")
    table.add_column("")
    for column in ("shape", "steps", *names):
        table.add_column(column, justify="right")
    for entry in entries:
        for shape in shapes:
            jobs = _with_parts([entry], [shape])
            steps = sum(job["steps"] for job in jobs)
            if steps:
                times = [sum(job["parts_ns"][name] for job in jobs) / steps / 1e6 for name in names]
                row = [f"{time:.2f}" for time in times]
                table.add_row(entry.name, shape, str(steps // len(jobs)), *row)
    return table


def _with_parts(entries: Sequence[Entry], shapes: Sequence[str]) -> list[Mapping[str, Any]]:
    jobs = [job for entry in entries for shape in shapes for job in entry.jobs.get(shape, [])]
    return [job for job in jobs if "parts_ns" in job]
