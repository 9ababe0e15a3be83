"""A run of ``shoal bench``: connects, sends the workload once or at several rates, prints and writes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from shoal.bench import (
    Answer,
    Call,
    LoadRun,
    Target,
    find_knee,
    make_calls,
    run_load,
    run_record,
    vllm_figures,
)
from shoal.bench.load import many_open_files
from shoal.cli.http_client import auth_headers, base_url, first_key
from shoal.cli.output import json_text, output_file, print_written, write_texts
from shoal.cli.simulate_view import facts_table, rejections
from shoal.config.scenario_facts import some
from shoal.config.scenario_file import at_rate
from shoal.core import SLO, ConfigError, ShoalError
from shoal.measure import RunRecord, compare, summarise, summary_tables, verdict, write_run, write_summary
from shoal.measure.tables import seconds
from shoal.workload import WorkloadOptions, build_requests

_BLOCK_SIZE = 16
_FORMATS = ("summary", "jsonl", "csv", "html")
"""Files of ``write_run``; a client sees neither samples nor steps."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """Options of the command, and what has been measured."""

    console: Console
    url: str
    models: Sequence[str]
    """Those to ask; empty: all of the server."""
    api_key: str | None
    chat: bool
    extra: Mapping[str, Any]
    """Fields of each request."""
    workload: WorkloadOptions
    slo: SLO
    sweep_steps: int | None = None
    """None: no sweep."""
    runs: dict[str, tuple[LoadRun, RunRecord]] = field(default_factory=dict)
    """By title, in this order."""

    def run(self, out: Path | None, json_path: Path | None, vllm_json: Path | None) -> None:
        """Measure, print, and write the last run, or of a sweep the highest rate that is sustained."""
        if self.sweep_steps is not None and self._rate is None:
            raise ConfigError("--sweep needs a rate to begin with: --rate 1")
        chosen: str | None = None
        interrupted = False
        with many_open_files():
            try:
                chosen = asyncio.run(self._measure())
            except KeyboardInterrupt:
                interrupted = True
        name = chosen if chosen is not None else next(reversed(self.runs), None)
        if name is not None:
            # Before tables are printed: a reader such as ``| head`` may close standard output.
            written = self._write(self.runs[name], out, json_path, vllm_json)
            self._print(name)
            print_written(self.console, written)
        if interrupted:
            raise KeyboardInterrupt
        if name is not None and not any(row.answered for row in self.runs[name][1].requests):
            raise ShoalError("no request was answered")

    @property
    def _rate(self) -> float | None:
        return getattr(self.workload.arrivals, "rate", None)

    async def _measure(self) -> str | None:
        """Send the workload; returns the title of the run to report, None for the last one."""
        headers = auth_headers(first_key(self.api_key), "--api-key")
        async with Target.open(
            base_url(self.url), headers=headers, chat=self.chat, extra=self.extra
        ) as target:
            services = await self._services(target)
            await _try_each(target, services)
            if self.sweep_steps is None:
                await self._send(target, services, self.workload)
                return None
            assert self._rate is not None

            async def attempt(rate: float) -> bool:
                name = await self._send(target, services, at_rate(self.workload, rate))
                found = verdict(self.runs[name][1])
                self.console.print(Text(f"{name}: {found.text}"))
                return found.kind == "served"

            sweep = await find_knee(attempt, self._rate, self.sweep_steps)
            return None if sweep.knee is None else _title(sweep.knee)

    async def _services(self, target: Target) -> list[str]:
        there = await target.services()
        unknown = [name for name in self.models if name not in there]
        if unknown or not there:
            raise ConfigError(
                f"the server has no model {unknown[0]!r}; it has {', '.join(there)}"
                if there
                else "the server has no models"
            )
        return list(dict.fromkeys(self.models)) or there

    async def _send(self, target: Target, services: Sequence[str], workload: WorkloadOptions) -> str:
        """One run of a workload; returns its title."""
        calls = make_calls(
            build_requests(workload, services, _BLOCK_SIZE), workload.seed, self.slo, _BLOCK_SIZE
        )
        rate = getattr(workload.arrivals, "rate", None)
        name = _title(rate) if workload.clients is None else f"{workload.clients} clients"
        run = LoadRun()
        try:
            with _Progress(len(calls)) as progress:
                await run_load(target, calls, run, workload.clients, progress.show)
        finally:
            self.runs[name] = run, self._record(run, name, services, len(calls))
        return name

    def _record(self, run: LoadRun, name: str, services: Sequence[str], total: int) -> RunRecord:
        late = seconds(run.client.delay_p99_s)
        facts = {
            "server": base_url(self.url),
            "models": ", ".join(services),
            "load": name + (f", {len(run.answers):,} of {total:,} sent" if len(run.answers) < total else ""),
            "client": f"{run.client.cpu_share:.0%} of a core, timers {late} late (p99)",
        }
        return run_record(
            run,
            f"{', '.join(services)} at {name}",
            facts,
            subject=f"{some(services)} at {base_url(self.url)}, {name}",
            clients=self.workload.clients,
            stopped=len(run.answers) < total or any(each.finish == "cancelled" for each in run.answers),
        )

    def _print(self, name: str) -> None:
        run, record = self.runs[name]
        self.console.print(facts_table(record.facts))
        if not record.requests:
            self.console.print(Text("No request has ended, so there is nothing to tell.", style="yellow"))
            return
        for table in summary_tables(summarise(record)):
            self.console.print(table)
        if len(self.runs) > 1:
            self.console.print(compare({each: record for each, (_, record) in self.runs.items()}))
        for line in (*rejections(record), *_errors(record), *_client_problems(run)):
            self.console.print(Text(line, style="yellow"))
        self.console.print(Text(verdict(record).text, style="bold"))

    def _write(
        self,
        measured: tuple[LoadRun, RunRecord],
        out: Path | None,
        json_path: Path | None,
        vllm_json: Path | None,
    ) -> list[Path]:
        run, record = measured
        written = [] if out is None else write_run(record, out, formats=_FORMATS)
        figures = json_text(vllm_figures(run, record))
        written += write_texts([(vllm_json, figures), (None if out is None else out / "vllm.json", figures)])
        if json_path is not None:
            with output_file(json_path) as file:
                write_summary(record, file)
            written.append(json_path)
        return written


def _title(rate: float | None) -> str:
    return "arrivals of the trace" if rate is None else f"{rate:.4g} requests/s"


async def _try_each(target: Target, services: Sequence[str]) -> None:
    """Send a short call to each model, so that mistakes are told at once, and none is loaded meanwhile."""
    for service in services:
        answer = Answer(Call(id="first", service=service, text="the", output_tokens=1))
        await target.send(answer)
        if answer.error is not None:
            raise ShoalError(f"{service}: {answer.error}")


def _errors(record: RunRecord) -> list[str]:
    failed = [row for row in record.requests if row.finish == "error"]
    return [f"{len(failed):,} failed; the first, {failed[0].request_id}: {failed[0].error}"] if failed else []


def _client_problems(run: LoadRun) -> list[str]:
    if not run.client.saturated:
        return []
    return [
        f"This client was saturated ({run.client.cpu_share:.0%} of a core, timers "
        f"{seconds(run.client.delay_p99_s)} late): its own delays are part of the figures. Send less, or "
        "from a computer with idle cores."
    ]


class _Progress:
    """A bar on the terminal: ended and running requests."""

    def __init__(self, total: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        stderr = Console(stderr=True)
        self._bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, run: LoadRun) -> None:
        self._bar.update(self._task, completed=run.ended, description=f"requests, {run.running} running")
